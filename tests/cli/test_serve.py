"""`serve`: a server with a draft, asked by the client of OpenAI, against plain `generate`."""

import json
import shutil
import socket
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from types import SimpleNamespace

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_longspec import NgramDraftModel
from hf_longspec.cli.serve import DraftServe
from tests.watching import before

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "
NEW, POSITIONS = 24, 700
QUESTION = "one two three, one two three, one two"


@pytest.fixture(scope="module")
def target(tiny, tmp_path_factory):
    """A folder of the tiny target with a chat template and few positions."""
    folder = shutil.copytree(tiny.target, tmp_path_factory.mktemp("target") / "tiny")
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": POSITIONS}))
    return folder


@pytest.fixture(scope="module")
def server(target):
    """A running server, its client and draft."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    made = {}

    def open_draft(model):
        made["model"] = model
        made["draft"] = NgramDraftModel.from_target(model, gate=False)
        return made["draft"]

    class Server(DraftServe):
        def start_server(self):
            made["serve"] = self
            super().start_server()

    settings = {"device": "cpu", "dtype": "float32", "host": "127.0.0.1", "port": port}
    thread = Thread(target=Server, args=(open_draft, str(target)), kwargs=settings, daemon=True)
    thread.start()
    until = time.monotonic() + 60
    while not (made.get("serve") and made["serve"].server.started):
        assert thread.is_alive() and time.monotonic() < until
        time.sleep(0.05)
    address = f"http://127.0.0.1:{port}"
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60)
    yield SimpleNamespace(address=address, client=client, model=str(target), target=made["model"])
    made["serve"].server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def expected(target):
    """The answer of plain `generate`."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(target)

    def answer(text, new=NEW):
        message = [{"role": "user", "content": text}]
        inputs = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        out = model.generate(**inputs, max_new_tokens=new, do_sample=False)
        return tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    return answer


def ask(server, text=QUESTION, new=NEW, **options):
    messages = [{"role": "user", "content": text}]
    options = {"model": server.model, "temperature": 0, "max_tokens": new} | options
    return server.client.chat.completions.create(messages=messages, **options)


def streamed(server, text=QUESTION):
    return "".join(chunk.choices[0].delta.content or "" for chunk in ask(server, text, stream=True))


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


def test_answers_are_those_of_generate_and_the_draft_drafts(server, expected):
    before = metrics(server)
    answer = ask(server)
    assert answer.choices[0].message.content == expected(QUESTION) == streamed(server)
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == NEW
    after = metrics(server, before["hf_longspec_requests_total"] + 2)
    new = {name.removeprefix("hf_longspec_"): after[name] - before[name] for name in after if name.endswith("_total")}
    assert new["requests_total"] == 2 and new["generated_tokens_total"] == 2 * (NEW - 1)
    assert new["accepted_tokens_total"] > 0 and new["plain_requests_total"] == 0 and new["decode_seconds_total"] > 0
    assert new["reused_tokens_total"] >= len(QUESTION)  # the second request has the same prompt


def test_two_clients_at_once(server, expected):
    questions = [QUESTION, "four five, four five, four"]
    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(lambda text: streamed(server, text), questions))
    assert answers == list(map(expected, questions))


def test_a_further_turn_reads_the_new_tokens_only(server, expected, monkeypatch):
    document = "one two three four five six seven eight nine ten. " * 4
    lengths = []
    see = lambda _, *args, **kwargs: lengths.append(kwargs.get("input_ids", kwargs.get("inputs_embeds")).shape[1])  # noqa: E731
    before(monkeypatch, type(server.target.model), "forward", see)
    for question in ("one two", "nine ten, nine ten, nine"):
        lengths.clear()
        assert streamed(server, document + question) == expected(document + question)
        longest = max(lengths)
    assert longest < 50 < len(document)


def test_a_client_that_disconnects_ends_its_request(server, expected):
    before = metrics(server)["hf_longspec_requests_total"]
    stream = ask(server, new=4000, stream=True)
    next(iter(stream))
    next(iter(stream))
    stream.close()
    assert streamed(server) == expected(QUESTION)
    assert metrics(server, before + 2)["hf_longspec_requests_total"] == before + 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model": "org/other"}, "pinned to"),
        ({"text": "x" * POSITIONS}, f"{POSITIONS} positions"),
        ({"text": "x" * POSITIONS, "stream": True}, f"{POSITIONS} positions"),
    ],
    ids=["model", "prompt", "prompt of a stream"],
)
def test_wrong_requests(server, wrong, message):
    with pytest.raises(openai.BadRequestError) as error:
        ask(server, **wrong)
    assert message in error.value.response.read().decode()


def test_new_tokens_end_with_the_positions(server):
    """As for every server, a prompt that leaves less room than is asked for gets a shorter answer."""
    answer = ask(server, "x" * (POSITIONS - 30))
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == POSITIONS and 0 < answer.usage.completion_tokens < NEW


class TestCommand:
    def test_a_port_in_use(self, main, tiny):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            status, _, error = main("serve", "--target", tiny.target, "--port", port)
        assert status == 2 and error.startswith(f"error: cannot listen on 127.0.0.1:{port}: Address already in use.")

    def test_without_the_packages(self, main, tiny, monkeypatch):
        monkeypatch.setitem(sys.modules, "fastapi", None)
        monkeypatch.delitem(sys.modules, "hf_longspec.cli.serve")
        status, _, error = main("serve", "--target", tiny.target)
        assert status == 2 and error.startswith("error: serve needs fastapi, which is not installed: pip install")
