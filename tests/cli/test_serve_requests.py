"""`serve`: routes, fields, bounds and abuse: what is not obeyed is refused, and the server goes on."""

import http.client
import json
import re
import socket
from threading import Event

import openai
import pytest
from fastapi.routing import APIRoute

from hf_longspec.cli.serving import fields as api
from hf_longspec.modeling.plain.modeling_plain import PlainDraftModel
from tests.cli.conftest import HUB_CARDS
from tests.cli.served import HEAD, NEW, Held, Reference, answered, ask, sent, serving, wait_for
from tests.cli.test_serve_isolation import tiny

ROUTES = {
    ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("POST", "/v1/responses"), ("POST", "/load_model"),
    ("GET", "/v1/models"), ("GET", "/v1/models/{name:path}"), ("GET", "/health"), ("GET", "/metrics"),
}  # fmt: skip
# Of the server underneath, in transformers 5.17 to 5.24.
LEFT_OUT = (
    "/v1/systemone", "/v1/audio/transcriptions", "/reset", "/docs", "/openapi.json", "/redoc",
)  # fmt: skip
QUESTION = "one two three, one two"
MESSAGES = [{"role": "user", "content": QUESTION}]
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny("llama", tmp_path_factory.mktemp("llama"), HUB_CARDS / "tiny-target")


@pytest.fixture(scope="module")
def server(folder):
    with serving(folder, tokens=100, waiting=2) as server:
        yield server


@pytest.fixture(scope="module")
def expected(folder):
    return Reference(folder)


def call(server, path, body=None, method="POST", headers=JSON):
    """Status and text of a request; a body that is no bytes is sent as JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request(method, path, body if isinstance(body, bytes) else json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def chat(server, **fields):
    return call(server, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4} | fields)


def test_routes(server):
    routes = [route for route in server.app.routes if isinstance(route, APIRoute)]
    assert {(method, route.path) for route in routes for method in route.methods} == ROUTES
    assert len(routes) == len(server.app.routes)
    for path in LEFT_OUT:
        assert {call(server, path, {}, method)[0] for method in ("GET", "POST", "OPTIONS")} == {404}
    status, text = call(server, "/v1/models", method="GET")
    assert status == 200 and [model["id"] for model in json.loads(text)["data"]] == [server.model]
    assert call(server, "/health", method="GET")[0] == 200


def test_only_the_one_model_is_loaded(server):
    status, text = call(server, "/load_model", {"model": server.model})
    assert status == 200 and json.loads(text.removeprefix("data: "))["status"] == "ready"
    for other in ("org/other", str(HUB_CARDS / "tiny-target"), f"{server.model}@dev", f"{server.model}:a.gguf", ""):
        assert call(server, "/load_model", {"model": other})[0] == 403
        assert chat(server, model=other)[0] == 400


WRONG_SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "x"}}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
# One for each rule: of a value, of a type, of a name, of the model, of this server.
REFUSED = [
    ({"n": 17}, "n=17"),
    ({"presence_penalty": 2.5}, "presence_penalty=2.5"),
    ({"top_logprobs": 2}, "top_logprobs=2 needs logprobs=true"),
    ({"functions": [{"name": "f"}]}, "functions: an earlier form of `tools`. Pass `tools`."),
    ({"reasoning_effort": "low"}, "Pass it in `chat_template_kwargs`."),
    ({"modalities": ["text", "audio"]}, "modalities.1='audio'"),
    ({"continue_final_message": True}, "continue_final_message=true: the last message is not the assistant's"),
    ({"no_such_field": 1}, "no_such_field: this server has no such field"),
    ({"\ud800" * 300: 1}, "unable to parse"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.json_schema"),
    ({"response_format": WRONG_SCHEMA}, "cannot be followed"),
    ({"tool_choice": "required"}, "tool_choice='required'"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools: the chat template"),
    ({"max_tokens": 0}, "max_tokens=0"),
    ({"max_tokens": "ten"}, "max_tokens='ten'"),
    ({"max_tokens": 101}, "this server allows 100"),
    ({"max_completion_tokens": 3}, "max_completion_tokens"),
    ({"generation_config": '{"max_new_tokens": 101}', "max_tokens": None}, "this server allows 100"),
    ({"generation_config": '{"num_beams": 2}'}, "generation_config.num_beams"),
    ({"temperature": 1e-9}, "temperature=1e-09"),
    ({"temperature": float("nan")}, "temperature=nan"),
    ({"logit_bias": {"258": 1}}, "logit_bias names token 258"),
    ({"logit_bias": {"1": 1e9}}, "logit_bias.1"),
    ({"stop": [""]}, "stop"),
    ({"seed": 2**70}, "seed"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template: the chat template"),
    ({"messages": [0] * 1000}, "messages.0=0"),
    ({"messages": [{"role": "user"}]}, ": a message needs `content`."),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "request cannot be read"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "reads no images"),
    ({"messages": [{"role": "user", "content": [IMAGE | {"image_url": {"url": "/etc/x"}}]}]}, "messages.0.content"),
    ({"messages": MESSAGES * 50}, "positions. Shorten it."),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_what_is_not_obeyed_is_refused_by_its_name(server, fields, said):
    status, text = chat(server, **{"stream": True} | fields)
    assert status == 400 and said in json.loads(text)["error"]["message"]


@pytest.mark.parametrize(
    "field",
    [
        {"suffix": "x"},
        {"best_of": 2},
        {"logprobs": 6},
        {"logprobs": 1, "echo": True},
        {"max_tokens": 0},
        {"prompt": ""},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": [258]},
    ],
    ids=str,
)
def test_completions_follow_the_same_rules(server, field):
    status, text = call(server, "/v1/completions", {"prompt": QUESTION} | field)
    assert status == 400 and next(iter(field)) in json.loads(text)["error"]["message"]


def test_settings_that_change_nothing_are_accepted(server, expected):
    same = {"n": 1, "logprobs": False, "presence_penalty": 0.0, "response_format": {"type": "text"}, "top_p": None}
    same |= {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "modalities": ["text"]}
    same |= {"parallel_tool_calls": True, "prediction": {"type": "content", "content": "x"}, "tool_choice": "auto"}
    stream = {"include_usage": True, "include_obfuscation": False}
    assert answered(server, QUESTION, stream_options=stream, **same) == expected(QUESTION)
    inputs = expected.tokenizer(QUESTION, return_tensors="pt")
    done = server.client.completions.create(model=server.model, prompt=QUESTION, temperature=0, max_tokens=NEW, n=1)
    assert done.choices[0].text == expected.continued(inputs)


@pytest.mark.parametrize("does_sample", [False, True], ids=["greedy model", "sampling model"])
@pytest.mark.parametrize(
    ("fields", "settings"),
    [
        ({"temperature": 1.5}, {"do_sample": True, "temperature": 1.5}),
        ({"top_p": 0.7, "temperature": None}, {"do_sample": True, "top_p": 0.7}),
        ({"temperature": 0, "top_p": 0.7}, {"do_sample": False}),
        ({"logit_bias": {"97": 100}}, {"do_sample": False, "sequence_bias": {(97,): 100.0}}),
        ({"max_tokens": None, "max_completion_tokens": 3}, {"do_sample": False, "max_new_tokens": 3}),
        (
            {"temperature": None, "generation_config": '{"do_sample": true, "top_k": 5}'},
            {"do_sample": True, "top_k": 5},
        ),
    ],
    ids=lambda value: "-".join(value),
)
def test_sampling_is_that_of_the_request(server, expected, monkeypatch, does_sample, fields, settings):
    monkeypatch.setattr(server.target.generation_config, "do_sample", does_sample)
    fields = {"temperature": 0, "max_tokens": NEW} | fields
    status, text = chat(server, seed=5, **fields)
    plain = {"assistant_model": PlainDraftModel.from_target(expected.model)} if settings.get("do_sample") else {}
    want = expected(QUESTION, seed=5, **settings, **plain)
    assert status == 200 and json.loads(text)["choices"][0]["message"]["content"] == want


@pytest.mark.parametrize(
    ("fields", "settings"),
    [
        ({"top_k": 3, "seed": 2}, {"do_sample": True, "top_k": 3}),
        ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
    ],
    ids=["top_k", "repetition_penalty"],
)
def test_settings_that_the_api_does_not_have(server, expected, fields, settings):
    """Clients send them in `extra_body`, at the top level."""
    fields = {"temperature": None if "seed" in fields else 0, "max_tokens": NEW} | fields
    plain = {"seed": 2, "assistant_model": PlainDraftModel.from_target(expected.model)} if "seed" in fields else {}
    status, text = chat(server, **fields)
    assert status == 200
    assert json.loads(text)["choices"][0]["message"]["content"] == expected(QUESTION, **settings, **plain)


def test_a_model_without_a_template(server, expected, monkeypatch):
    monkeypatch.setattr(server.processor, "chat_template", None)
    status, text = chat(server)
    assert status == 400 and "no chat template. Save one" in text
    assert call(server, "/v1/completions", {"prompt": QUESTION, "max_tokens": 1})[0] == 200


def test_transformers_chat(server, monkeypatch, capsys):
    """It asks whether the model is loaded, and sends the settings of a file of the model beside its own."""
    chat = pytest.importorskip("transformers.cli.chat", exc_type=ImportError)  # that of 5.17 needs `requests`
    lines = iter([QUESTION, "n", "!exit"])  # "n": do not go on after the last token
    monkeypatch.setattr("rich.console.Console.input", lambda *_, **__: next(lines))
    settings = {"generation_config": str(HUB_CARDS / "tiny-target" / "generation_config.json")}
    flags = ["do_sample=False", f"max_new_tokens={NEW}"]
    chat.Chat(server.model, f"{server.address}/v1", flags, user="me", **settings)
    shown = "".join(capsys.readouterr().out.split())
    assert "alreadyloaded" in shown and f"{NEW}tokens" in shown


def test_requests_that_wait_are_bounded(server, expected):
    """Two may wait for one. What was accepted is answered, and a client that leaves makes room."""
    wait_for(lambda: not server.engine.jobs)
    with Held(server):
        streams = [ask(server, QUESTION, stream=True) for _ in range(3)]
        with pytest.raises(openai.RateLimitError, match="2 requests wait already"):
            ask(server, QUESTION)
        streams.pop().close()
        wait_for(lambda: len(server.engine.jobs) == 2)
        streams.append(ask(server, QUESTION, stream=True))
    for stream in streams:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == expected(QUESTION)


def test_a_large_body_is_refused_before_it_is_read(server):
    """With its length in advance, and in chunks. The server answers before it has all of it."""
    assert call(server, "/v1/chat/completions", b"", headers=JSON | {"Content-Length": str(2**26)})[0] == 413
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
        client.sendall(f"{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode())
        for _ in range(2):  # of any number
            client.sendall(b"100000\r\n" + b" " * 2**20 + b"\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 413")
    assert call(server, "/health", method="GET")[0] == 200


def test_a_long_prompt_does_not_hold_up_other_requests(server, monkeypatch):
    """While the tokenizer works on one, /health answers."""
    working, go_on = Event(), Event()
    apply = server.processor.apply_chat_template

    def slow(*args, **kwargs):
        working.set()
        assert go_on.wait(30)
        return apply(*args, **kwargs)

    monkeypatch.setattr(server.processor, "apply_chat_template", slow)
    with sent(server, QUESTION) as client:
        assert working.wait(30)
        assert call(server, "/health", method="GET")[0] == 200
        go_on.set()
        assert client.recv(100).startswith(b"HTTP/1.1 200")


BODY = json.dumps({"messages": MESSAGES, "max_tokens": 1}).encode()
ABUSE = [
    (b"{", JSON),
    (b'{"messages": "\xff"}', JSON),
    (b'{"messages":' + b"[" * 400_000 + b"]" * 400_000 + b"}", JSON),
    (b'{"max_tokens": ' + b"9" * 10_000 + b"}", JSON),
    (b"null", JSON),
    (BODY, {"Content-Type": "multipart/form-data; boundary=x"}),
    (BODY, {"Content-Type": "\xe9" * 100}),
    # without a body: one that the server has not read when it hangs up would reset the connection with its answer
    (b"", JSON | {"Content-Length": "-1"}),
]


@pytest.mark.parametrize(("body", "headers"), ABUSE, ids=range(len(ABUSE)))
def test_abuse_gets_4xx_and_the_server_goes_on(server, body, headers):
    status, text = call(server, "/v1/chat/completions", body, headers=headers)
    assert 400 <= status < 500 and "Traceback" not in text
    assert call(server, "/health", method="GET")[0] == 200


def test_the_page_names_every_field():
    """In the class that it has."""
    page = (HUB_CARDS.parent / "docs" / "serving.md").read_text().partition("<!-- fields:start -->")[2]
    honoured, accepted, refused = page.partition("<!-- fields:end -->")[0].split("\n\n")[1:4]
    kinds = api.ChatRequest, api.CompletionRequest, api.ResponseRequest
    fields = {name for kind in kinds for name in kind.model_fields}
    values = {"best_of", "modalities", "background", "include"}  # accepted at the value that changes nothing
    assert (fields - values) | {"max_completion_tokens"} <= set(re.findall(r"`(\w+)`", honoured))
    assert values | api.ResponseRequest.accepted | api.ChatRequest.accepted <= set(re.findall(r"`(\w+)`", accepted))
    assert set(re.findall(r"`(\w+)`", refused)) >= api.REFUSED.keys()
