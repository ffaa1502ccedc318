"""`serve`: nothing of a request reaches another, whatever becomes of it; every answer is that of plain `generate`."""

import random
import shutil
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import openai
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_longspec import SpeculativeCache
from hf_longspec.batching.slots import SlotSession
from hf_longspec.generation.cache import CACHE_NAME
from hf_longspec.prefix_cache import continues_as_one_text
from tests.cli.conftest import HUB_CARDS
from tests.cli.served import NEW, Held, Reference, answered, ask, sent, serving, streamed, wait_for, with_template
from tests.pairwise import few
from tests.robustness.peaked_weights import peak
from tests.robustness.shrunk_configs import shrunk_config
from tests.watching import before as called_before

# Keys and values; the same and states in each layer; layers with states alone beside others.
TARGETS = "llama", "falcon_h1", "granitemoehybrid"
SHARED = "one two three, one two three. " * 3


def tiny(name, folder, tokenizer):
    """A folder with a tiny random model of an architecture, and the tokenizer of another folder."""
    model = AutoModelForCausalLM.from_config(shrunk_config(name, vocab_size=258, eos_token_id=256, bos_token_id=256))
    peak(model, 258)
    with torch.no_grad():
        model.get_output_embeddings().weight[128:] = 0  # bytes that are no ASCII hardly ever follow
    model.save_pretrained(folder / "model")
    for file in tokenizer.glob("tokenizer*"):
        shutil.copy(file, folder / "model")
    return with_template(folder / "model", folder / "tiny")


@pytest.fixture(scope="module")
def pair(request, tiny_folder):
    """A server, and the answers of `generate`."""
    folder = tiny_folder(request.param)
    with serving(folder) as server:
        yield server, Reference(folder)


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    return lambda name: tiny(name, tmp_path_factory.mktemp(name), HUB_CARDS / "tiny-target")


@pytest.mark.parametrize("pair", TARGETS, indirect=True)
def test_requests_that_extend_the_last_one_repeat_it_or_do_not(pair):
    server, expected = pair
    texts = [SHARED + "one", "four five, four", SHARED + "two", SHARED + "two, three", SHARED + "two", "seven"]
    turn = [{"role": "user", "content": "seven"}]
    turn += [{"role": "assistant", "content": expected("seven")}, {"role": "user", "content": "eight"}]
    for text in texts:
        assert answered(server, text) == expected(text)
    answer = server.client.chat.completions.create(model=server.model, messages=turn, temperature=0, max_tokens=NEW)
    inputs = expected.tokenizer.apply_chat_template(
        turn, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    assert answer.choices[0].message.content == expected.continued(inputs)


def leave_while_waiting(server, monkeypatch):
    with Held(server):
        client = sent(server, SHARED + "left")
        wait_for(lambda: server.engine.jobs)
        client.close()
        wait_for(lambda: not server.engine.jobs)


def leave_in_the_middle(server, monkeypatch):
    stream = ask(server, SHARED + "left", new=400, stream=True)
    for _ in range(4):
        next(iter(stream))
    stream.close()


def fail_before_reading(server, monkeypatch):
    """A message with quotes, as those of Python's own errors."""

    def broken(*args, **kwargs):
        raise RuntimeError('"broken"\nby a test')

    with monkeypatch.context() as patched:
        patched.setattr(server.target, "generate", broken)
        with pytest.raises(openai.APIError) as error:
            streamed(server, SHARED + "left")
        assert error.value.body["message"] == '"broken"; by a test'
        with pytest.raises(openai.InternalServerError, match="broken"):
            answered(server, SHARED + "left")


def fail_in_the_middle(server, monkeypatch):
    calls = []

    def break_later(session):
        calls.append(None)
        if len(calls) > 3:
            raise RuntimeError("broken by a test")

    with monkeypatch.context() as patched:
        called_before(patched, SlotSession, "iterate", break_later)
        with pytest.raises(openai.APIError) as error:
            streamed(server, SHARED + "left", new=90)
        assert error.value.body["message"] == "broken by a test"


ENDS = [leave_while_waiting, leave_in_the_middle, fail_before_reading, fail_in_the_middle]
# Every end where states and keys are to be put back, and some for the other targets.
CASES = [(TARGETS[1], end) for end in ENDS]
CASES += few([(TARGETS[place % 2 * 2], end) for place, end in enumerate(ENDS)], 2)


@pytest.mark.parametrize(("pair", "end"), CASES, ids=lambda one: getattr(one, "__name__", one), indirect=["pair"])
def test_a_request_after_one_that_did_not_finish(pair, monkeypatch, end):
    server, expected = pair
    assert answered(server, "four five") == expected("four five")
    end(server, monkeypatch)
    assert answered(server, SHARED + "next") == expected(SHARED + "next")
    assert streamed(server, SHARED + "next one") == expected(SHARED + "next one")


@pytest.mark.parametrize(
    ("kind", "changes", "is_one_text"),
    [
        ("falcon_h1", {}, True),
        ("falcon_h1", {"time_step_limit": (0.0, 0.1)}, False),
        ("falcon_h1", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, False),
        ("nemotron_h", {"time_step_min": 0.1}, False),
    ],
    ids=["whole", "clamped", "dynamic", "clamped below"],
)
def test_targets_whose_second_turn_is_another_text_read_every_prompt(kind, changes, is_one_text):
    model = AutoModelForCausalLM.from_config(shrunk_config(kind, **changes))
    assert continues_as_one_text(model) is is_one_text


def test_a_cache_with_states_refuses_shorter_lengths():
    """As `crop` does. Before anything was read, after `reset` and with the lengths that it has, it does not."""
    model = AutoModelForCausalLM.from_config(shrunk_config("falcon_h1")).eval()
    cache = SpeculativeCache(model.config, batch_size=2, max_length=40)
    cache.set_lengths([9, 9])
    cache.set_lengths([0, 0])
    with torch.no_grad():
        model(torch.ones(2, 7, dtype=torch.long), **{CACHE_NAME: cache}, use_cache=True)
    for shorter in ([6, 7], [0, 0]):
        with pytest.raises(ValueError, match=r"rows hold \(7, 7\) tokens, .* cannot be shortened"):
            cache.set_lengths(shorter)
    cache.set_lengths([7, 7])
    with pytest.raises(ValueError, match="cannot be shortened"):
        cache.set_lengths([7, 5])
    cache.reset()
    cache.set_lengths([0, 0])


# Of the soak test, for each target.
SECONDS = 200
BAD = [{"n": 99}, {"messages": []}, {"no_such_field": 1}, {"stop": [""]}, {"logit_bias": {"999": 1}}]


@pytest.mark.soak
@pytest.mark.parametrize("name", TARGETS)
def test_sixteen_clients_that_leave_at_random(name, tiny_folder, monkeypatch):
    """Streams, single answers and several choices, some cut off, some failing, and wrong requests.

    All whole answers are those of `generate`, and the memory of the process stays.
    """
    folder = tiny_folder(name)
    expected, chance, raised = Reference(folder), random.Random(0), []
    texts = [SHARED[: 30 * part] + word for part in range(4) for word in ("one", "two", "three", "four five")]
    whole = {text: expected(text) for text in texts}
    counts, sizes = Counter(), []

    def sometimes(session):
        if chance.random() < 0.003:
            raised.append(None)
            raise RuntimeError("broken by a test")

    def client(server, number, until):
        own = random.Random(number)
        while time.monotonic() < until:
            text = own.choice(texts)
            way = own.choice(("stream", "single", "several", "leave", "bad"))
            try:
                if way == "leave":
                    with ask(server, text, new=400, stream=True) as stream:
                        for _, _ in zip(range(own.randrange(4)), stream, strict=False):
                            pass
                elif way == "several":
                    assert {one.message.content for one in ask(server, text, n=3).choices} == {whole[text]}
                elif way == "bad":
                    with pytest.raises(openai.BadRequestError):
                        ask(server, text, extra_body=own.choice(BAD))
                else:
                    assert (streamed if way == "stream" else answered)(server, text) == whole[text], text
                counts[way] += 1
            except openai.APIError:  # compared with the number of errors that were raised
                counts["failed"] += 1
            if number == 0:
                sizes.append(psutil.Process().memory_info().rss)

    called_before(monkeypatch, SlotSession, "iterate", sometimes)
    with serving(folder, rows=None) as server, ThreadPoolExecutor(16) as threads:
        until = time.monotonic() + SECONDS
        assert len(list(threads.map(lambda number: client(server, number, until), range(16)))) == 16
        wait_for(lambda: not server.engine.jobs)
    assert len(counts) == 6 and min(counts.values()) > 10, counts
    assert counts["failed"] <= 8 * len(raised)  # an error of a step ends all that it has
    half = len(sizes) // 2
    assert max(sizes[half:]) < 1.05 * max(sizes[:half]), (max(sizes[:half]), max(sizes[half:]))
