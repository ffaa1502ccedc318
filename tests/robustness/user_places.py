"""Logits processors of users whose state is in containers, outside of Python's objects, or in compiled code."""

import array
import collections
import contextvars
import ctypes
import decimal
import hashlib
import heapq
import io
import logging
import mmap
import multiprocessing
import os
import queue
import random
import sqlite3
import tempfile
import threading
import weakref
import zlib

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models
from torch import nn
from transformers import PretrainedConfig

from tests.robustness.user_processors import place
from tests.tiny_tokenizers import character_tokenizer

# Containers.


@place
def a_deque():
    seen = collections.deque([0], maxlen=2)
    return lambda: seen.append(seen[-1] + 1) or seen[-1], lambda: list(seen)


@place
def a_queue():
    waiting = queue.Queue()
    waiting.put(0)

    def bump():
        number = waiting.get() + 1
        waiting.put(number)
        return number

    return bump, lambda: list(waiting.queue)


@place
def a_heap():
    numbers = list(range(1, 1000))
    return lambda: heapq.heappop(numbers), lambda: len(numbers)


@place
def a_counter():
    counter = collections.Counter()
    return lambda: counter.update("a") or counter["a"], lambda: dict(counter)


@place
def a_chain_map():
    held = collections.ChainMap({}, {"calls": 0})
    return lambda: held.update(calls=held["calls"] + 1) or held["calls"], lambda: held["calls"]


@place
def order_of_a_dict():
    order = collections.OrderedDict.fromkeys(range(7))
    return lambda: order.move_to_end(next(iter(order))) or next(iter(order)), lambda: list(order)


@place
def an_array():
    counts = array.array("l", [0])
    return lambda: counts.__setitem__(0, counts[0] + 1) or counts[0], lambda: counts[0]


@place
def bytes_in_place():
    counts = memoryview(bytearray(1))
    return lambda: counts.__setitem__(0, counts[0] + 1) or counts[0], lambda: counts[0]


@place
def numpy_array():
    counts = np.zeros(1, dtype=np.int64)
    return lambda: counts.__iadd__(1) is not None and int(counts[0]), lambda: int(counts[0])


@place
def tensor_in_place():
    count = torch.zeros((), dtype=torch.long)
    return lambda: int(count.add_(1)), lambda: int(count)


@place
def parameter():
    weight = nn.Parameter(torch.zeros(()), requires_grad=False)
    return lambda: int(weight.add_(1)), lambda: int(weight)


def _of_many_parts(count):
    parts = [[number] for number in range(count)]
    return lambda: parts[-1].append(0) or len(parts[-1]), lambda: len(parts[-1])


@place
def over_500_parts():
    return _of_many_parts(600)


@place
def over_10_000_parts():
    return _of_many_parts(11_000)


# Outside of the processor.


@place
def config_attribute():
    config = PretrainedConfig(calls=0)
    return lambda: setattr(config, "calls", config.calls + 1) or config.calls, lambda: config.calls


@place(has_model=True)
def config_of_the_target(model):
    config = model.config
    config.calls = 0

    def bump():
        config.calls += 1
        return config.calls

    def read():
        return vars(config).pop("calls", None)

    return bump, read


@place(has_model=True)
def attribute_of_the_target(model):
    model.calls_of_a_user = 0

    def bump():
        model.calls_of_a_user += 1
        return model.calls_of_a_user

    def read():
        return vars(model).pop("calls_of_a_user", None)

    return bump, read


@place
def tokenizer_attribute():
    tokenizer = character_tokenizer("abc")
    tokenizer.calls = 0
    return lambda: setattr(tokenizer, "calls", tokenizer.calls + 1) or tokenizer.calls, lambda: tokenizer.calls


@place
def environment():
    name = "TESTS_CALLS_OF_A_PROCESSOR"
    os.environ[name] = "0"

    def bump():
        os.environ[name] = str(int(os.environ[name]) + 1)
        return int(os.environ[name])

    return bump, lambda: os.environ.pop(name, None)


@place
def file_by_its_path():
    handle, path = tempfile.mkstemp()
    os.close(handle)

    def bump():
        with open(path, "a") as file:
            file.write("x")
        return os.path.getsize(path)

    return bump, lambda: (os.path.getsize(path), os.remove(path))


@place
def open_file():
    file = tempfile.TemporaryFile()  # noqa: SIM115
    return lambda: file.write(b"x") and file.tell(), lambda: (file.tell(), file.close())


@place
def text_buffer():
    buffer = io.StringIO()
    return lambda: buffer.write("x") and buffer.tell(), buffer.getvalue


@place
def memory_map():
    pages = mmap.mmap(-1, 8)
    return lambda: pages.__setitem__(0, pages[0] + 1) or pages[0], lambda: pages[0]


@place
def c_variable():
    number = ctypes.c_int(0)
    return lambda: setattr(number, "value", number.value + 1) or number.value, lambda: number.value


@place
def shared_memory():
    number = multiprocessing.Value("i", 0)
    return lambda: setattr(number, "value", number.value + 1) or number.value, lambda: number.value


@place
def database():
    base = sqlite3.connect(":memory:")
    base.execute("create table calls (number integer)")
    count = lambda: base.execute("select count(*) from calls").fetchone()[0]  # noqa: E731
    return lambda: base.execute("insert into calls values (1)") and count(), count


@place
def context_variable():
    variable = contextvars.ContextVar("calls", default=0)
    return lambda: variable.set(variable.get() + 1) and variable.get(), variable.get


@place
def decimal_context():
    context = decimal.Context(prec=1)

    def bump():
        context.prec += 1
        return context.prec

    return bump, lambda: context.prec


@place
def logger_attribute():
    logger = logging.getLogger("tests.calls_of_a_processor")
    logger.calls = 0
    return lambda: setattr(logger, "calls", logger.calls + 1) or logger.calls, lambda: logger.calls


@place
def thread_local():
    local = threading.local()
    local.calls = 0
    return lambda: setattr(local, "calls", local.calls + 1) or local.calls, lambda: local.calls


@place
def behind_a_lock():
    lock, count = threading.Lock(), [0]

    def bump():
        with lock:
            count[0] += 1
            return count[0]

    return bump, lambda: count[0]


class _Referred:
    calls = 0


_referred: list[_Referred] = []


@place
def weakly_referred():
    _referred[:] = [_Referred()]
    reference = weakref.ref(_referred[0])

    def bump():
        reference().calls += 1
        return reference().calls

    return bump, lambda: reference().calls


# Random numbers; a seed of `generate` sets those of torch.


@place
def random_module():
    random.seed(3)
    return lambda: random.randrange(1, 12), random.random


@place
def random_object():
    source = random.Random(3)
    return lambda: source.randrange(1, 12), source.random


@place
def numpy_generator():
    source = np.random.default_rng(3)
    return lambda: int(source.integers(1, 12)), source.random


@place
def torch_generator():
    source = torch.Generator().manual_seed(3)
    return lambda: int(torch.randint(1, 12, (), generator=source)), lambda: source.get_state().tolist()


@place(is_sampled=False)  # how many numbers sampling has drawn by a call is not promised
def torch_random_numbers():
    torch.manual_seed(5)
    return lambda: int(torch.randint(1, 12, ())), lambda: None


# Objects of compiled code, of which nothing is known but what they answer.


@place
def hash_of_all_calls():
    state = hashlib.sha256()
    return lambda: state.update(b"x") or state.digest()[0] % 12, state.hexdigest


@place
def compressor():
    state, sizes = zlib.compressobj(level=0), []

    def bump():
        sizes.append(len(state.compress(b"x") + state.flush(zlib.Z_SYNC_FLUSH)))
        return sum(sizes)

    return bump, lambda: sum(sizes)


@place
def tokenizer_in_rust():
    backend = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))

    def bump():
        backend.add_tokens([f"<{backend.get_vocab_size()}>"])
        return backend.get_vocab_size()

    return bump, backend.get_vocab_size


@place
def stream_in_rust():
    backend = Tokenizer(models.WordLevel({chr(97 + number): number for number in range(26)}, unk_token="a"))
    backend.decoder = decoders.Fuse()
    stream = decoders.DecodeStream(skip_special_tokens=False)
    text: list[str] = []

    def bump():
        text.append(stream.step(backend, len(text) % 26) or "")
        return len("".join(text))

    return bump, lambda: "".join(text)
