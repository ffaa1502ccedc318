"""A running server of `hf-longspec serve`, and the answers of plain `generate` to compare its own with."""

import json
import shutil
import socket
import time
import urllib.request
from contextlib import contextmanager
from threading import Event, Thread
from types import SimpleNamespace

import openai
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cli.serving.model_manager import ModelManager

from hf_longspec import NgramDraftModel
from hf_longspec.cli.serve import make_routes, make_server
from hf_longspec.cli.serving.routes import Limits

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "
WITH_TOOLS = "{% if tools %}{{ tools | tojson }}\n{% endif %}" + TEMPLATE
POSITIONS = 700
NEW = 9
HEAD = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def with_template(model, folder, template=TEMPLATE):
    """A copy of the folder of a model in `folder`, with a chat template and few positions."""
    folder = shutil.copytree(model, folder)
    of_tokenizer, of_model = folder / "tokenizer_config.json", folder / "config.json"
    of_tokenizer.write_text(json.dumps(json.loads(of_tokenizer.read_text()) | {"chat_template": template}))
    of_model.write_text(json.dumps(json.loads(of_model.read_text()) | {"max_position_embeddings": POSITIONS}))
    return folder


@contextmanager
def serving(folder, rows=1, grace=2, **limits):
    """A running server of the model in a folder: its address, a client of OpenAI, the model and the decoder."""
    models = ModelManager(device="cpu", dtype="float32", force_model=str(folder))
    limits = Limits(**{"body": 1, "tokens": 5000, "waiting": 64, "cache": 64} | limits)
    routes = make_routes(models, lambda model: NgramDraftModel.from_target(model, gate=False), limits, rows)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = make_server(routes, "127.0.0.1", port, grace)
    thread = Thread(target=server.run, daemon=True)
    thread.start()
    wait_for(lambda: server.started or not thread.is_alive())
    address = f"http://127.0.0.1:{port}"
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60)
    engine = routes.engine
    found = {"processor": routes.reader.processor, "app": routes.app, "engine": engine, "target": engine.model}

    def stop():
        server.should_exit = True

    yield SimpleNamespace(stop=stop, address=address, port=port, client=client, model=str(folder), **found)
    stop()
    thread.join(20)
    assert not thread.is_alive()


def wait_for(condition, seconds=60):
    """Return once a condition holds."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


class Reference:
    """The answers of plain `generate` for a folder."""

    def __init__(self, folder):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._known = {}

    def __call__(self, text, new=NEW, **options):
        """The answer to one question; the seed is set just before."""
        key = repr((text, new, sorted(options.items())))
        if key not in self._known:
            message = [{"role": "user", "content": text}]
            inputs = self.tokenizer.apply_chat_template(
                message, add_generation_prompt=True, return_dict=True, return_tensors="pt"
            )
            self._known[key] = self.continued(inputs, new, **options)
        return self._known[key]

    def continued(self, inputs, new=NEW, seed=None, **options):
        """The continuation of tokens."""
        if seed is not None:
            torch.manual_seed(seed)
        out = self.model.generate(**inputs, **{"max_new_tokens": new, "do_sample": False} | options)
        return self.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


class Held:
    """The thread of the model, busy until the end of a `with` block, in which requests wait."""

    def __init__(self, server):
        self.event = Event()
        server.engine.batcher.run_alone(self.event.wait)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.event.set()


def sent(server, text, new=NEW):
    """A socket on which a request without a stream was sent."""
    client = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": new}
    data = json.dumps(body).encode()
    client.sendall(f"{HEAD}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return client


def ask(server, text, new=NEW, **options):
    """The answer to a question, as the client of OpenAI has it."""
    messages = [{"role": "user", "content": text}]
    options = {"model": server.model, "temperature": 0, "max_tokens": new} | options
    return server.client.chat.completions.create(messages=messages, **options)


def answered(server, text, **options):
    """The text of an answer."""
    return ask(server, text, **options).choices[0].message.content


def streamed(server, text, **options):
    """The text of an answer that comes as a stream."""
    return "".join(chunk.choices[0].delta.content or "" for chunk in ask(server, text, stream=True, **options))


def metrics(server, requests=0):
    """Read the counters once so many requests are counted: a stream may reach its client before that."""
    deadline = time.monotonic() + 30
    while True:
        with urllib.request.urlopen(f"{server.address}/metrics") as page:
            lines = page.read().decode().splitlines()
        found = {name: float(number) for name, number in (line.split() for line in lines if not line.startswith("#"))}
        if found["hf_longspec_requests_total"] >= requests:
            return found
        assert time.monotonic() < deadline
