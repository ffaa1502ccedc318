"""`serve`: what an answer holds beside its text, and who may ask, against plain `generate`."""

import asyncio
import json
import socket
import threading
import urllib.error
import urllib.request
from collections import Counter
from typing import Literal

import openai
import pydantic
import pytest
import torch

from hf_longspec import PlainDraftModel
from hf_longspec.cli.serving.fields import Penalties
from tests.cli.served import NEW, WITH_TOOLS, Reference, answered, ask, serving, streamed, wait_for, with_template

QUESTION = "one two three, one two three, one two"


@pytest.fixture(scope="module")
def target(tiny, tmp_path_factory):
    return with_template(tiny.target, tmp_path_factory.mktemp("answers") / "tiny")


@pytest.fixture(scope="module")
def server(target):
    with serving(target, rows=4) as server:
        yield server


@pytest.fixture(scope="module")
def expected(target):
    return Reference(target)


@pytest.fixture(scope="module")
def prompt(expected):
    message = [{"role": "user", "content": QUESTION}]
    return expected.tokenizer.apply_chat_template(
        message, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )


@pytest.mark.parametrize(("presence", "frequency"), [(0.9, 0.0), (0.0, 0.8), (1.5, -0.7)])
def test_penalties_lower_what_the_answer_has(server, expected, prompt, presence, frequency):
    """Token by token by hand: the score of a token falls once, and once for each time that it was written."""
    ids, new = prompt["input_ids"], []
    for _ in range(24):
        scores = expected.model(torch.cat([ids, torch.tensor([new], dtype=torch.long)], 1)).logits[0, -1]
        for token in set(new):
            scores[token] -= presence + frequency * new.count(token)
        new.append(int(scores.argmax()))
    options = {"new": 24, "presence_penalty": presence, "frequency_penalty": frequency}
    text = expected.tokenizer.decode(new)
    assert answered(server, QUESTION, **options) == text != expected(QUESTION, 24)


def test_log_probabilities_are_those_of_the_target(server, expected, prompt):
    """Of all tokens, in a stream, too; whatever the penalties and the temperature are. Rounding: 1e-4."""
    answer = ask(server, QUESTION, logprobs=True, top_logprobs=3, presence_penalty=0.5).choices[0]
    told = answer.logprobs.content
    text = "".join(one.token for one in told)
    assert text == answer.message.content and len(told) == NEW
    ids = expected.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    whole = torch.cat([prompt["input_ids"], ids], 1)
    rows = expected.model(whole).logits[0, prompt["input_ids"].shape[1] - 1 : -1].log_softmax(-1)
    for one, row, token in zip(told, rows, ids[0], strict=True):
        assert one.logprob == pytest.approx(float(row[token]), abs=1e-4)
        best = row.topk(3)
        assert [top.logprob for top in one.top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert [top.token for top in one.top_logprobs] == [expected.tokenizer.decode([id]) for id in best.indices]
    chunks = [chunk.choices[0] for chunk in ask(server, QUESTION, logprobs=True, top_logprobs=0, stream=True, seed=1)]
    told = [one for chunk in chunks if chunk.logprobs for one in chunk.logprobs.content]
    assert "".join(one.token for one in told) == expected(QUESTION) and not told[0].top_logprobs


def test_several_answers_share_their_prompt(server, expected):
    """Each has the next seed. The prompt is read once, and its tokens are counted once."""
    answer = ask(server, QUESTION, n=3, temperature=1.0, seed=5)
    alone = [answered(server, QUESTION, temperature=1.0, seed=5 + number) for number in range(3)]
    assert [choice.message.content for choice in answer.choices] == alone and len(set(alone)) > 1
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.completion_tokens == 3 * NEW
    texts = ["", "", ""]
    for chunk in ask(server, QUESTION, n=3, temperature=1.0, seed=5, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == alone


def test_continued_texts(server, expected):
    """Several prompts, tokens, repeated prompts, log probabilities."""
    prompts = [QUESTION, "four five, four"]
    ids = [expected.tokenizer(text)["input_ids"] for text in prompts]
    want = [expected.continued(expected.tokenizer(text, return_tensors="pt")) for text in prompts]
    create = server.client.completions.create
    same = {"model": server.model, "temperature": 0, "max_tokens": NEW}
    for given in (prompts, ids):
        assert [one.text for one in create(prompt=given, **same).choices] == want
    assert [one.text for one in create(prompt=ids[1], n=2, **same).choices] == [want[1]] * 2
    echoed = create(prompt=prompts, echo=True, **same)
    assert [one.text for one in echoed.choices] == [prompt + text for prompt, text in zip(prompts, want, strict=True)]
    parts = ["", ""]
    for chunk in create(prompt=ids, echo=True, stream=True, **same):
        for one in chunk.choices:
            parts[one.index] += one.text
    assert parts == [one.text for one in echoed.choices]
    told = create(prompt=QUESTION, logprobs=2, **same).choices[0].logprobs
    assert "".join(told.tokens) == want[0] and len(told.top_logprobs[0]) == 2
    assert max(told.top_logprobs[0].values()) == told.token_logprobs[0] and told.text_offset[:2] == [0, 1]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_text_that_may_begin_a_stop_is_held_back(server, expected, size):
    """The stream never shows a part of it. Tokens are characters here."""
    whole = expected(QUESTION, 40)
    stop = whole[20 : 20 + size]
    shown = whole[: whole.index(stop)]
    chunks = [chunk.choices[0] for chunk in ask(server, QUESTION, new=40, stop=[stop, "\0"], stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == shown
    assert chunks[-1].finish_reason == "stop"
    never = whole[-4:] + "\0"  # what is held back at the end is shown
    assert streamed(server, QUESTION, new=40, stop=never) == whole


def test_the_last_turn_of_the_assistant_is_continued(server, expected):
    turn = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "one two"}]
    apply = expected.tokenizer.apply_chat_template
    inputs = apply(turn, continue_final_message=True, return_dict=True, return_tensors="pt")
    more = apply(turn, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    create = server.client.chat.completions.create
    same = {"model": server.model, "messages": turn, "temperature": 0, "max_tokens": NEW}
    assert create(**same).choices[0].message.content == expected.continued(inputs)
    other = create(**same, extra_body={"continue_final_message": False}).choices[0].message.content
    assert other == expected.continued(more)


def test_a_target_without_a_batcher(tiny, tmp_path):
    """Its requests run one after the other: texts, streams, seeds, stops, and clients that leave."""
    folder = with_template(tiny.target, tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    (folder / "config.json").write_text(json.dumps(config))
    expected = Reference(folder)
    with serving(folder, rows=None) as server:
        assert server.engine.batcher is None and server.engine.rows == 1
        whole = expected(QUESTION, 40)
        assert answered(server, QUESTION, new=40) == streamed(server, QUESTION, new=40) == whole
        assert answered(server, QUESTION, new=40, stop=whole[9:11]) == whole[: whole.index(whole[9:11])]
        plain = {"do_sample": True, "assistant_model": PlainDraftModel.from_target(expected.model)}
        assert answered(server, QUESTION, temperature=1.0, seed=3) == expected(QUESTION, seed=3, **plain)
        left = ask(server, QUESTION, new=500, stream=True)
        next(iter(left))
        left.close()
        wait_for(lambda: not server.engine.jobs)
        with pytest.raises(openai.BadRequestError, match="logprobs: a request that runs alone has none"):
            ask(server, QUESTION, logprobs=True)


class Pick(pydantic.BaseModel):
    kind: Literal["cat", "dog"]
    old: bool


def test_objects_of_pydantic(server, monkeypatch):
    """`strict` is in every tool that the client makes of a class. An answer is parsed to the class."""
    monkeypatch.setattr(server.processor, "chat_template", WITH_TOOLS)
    choice = {"type": "function", "function": {"name": "Pick"}}
    same = {"model": server.model, "messages": [{"role": "user", "content": "a cat"}], "temperature": 0}
    parse = server.client.chat.completions.parse
    tool = openai.pydantic_function_tool(Pick)
    answer = parse(**same, tools=[tool], tool_choice=choice, max_tokens=300)
    (call,) = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Pick)
    assert isinstance(parse(**same, response_format=Pick, max_tokens=300).choices[0].message.parsed, Pick)


def test_calls_are_read_as_the_tokenizer_says(server, expected, monkeypatch):
    """Of a model that writes calls by itself, after its most frequent letter; one, if the client takes no more."""
    tools = [{"type": "function", "function": {"name": "pick"}}]
    message, how = [{"role": "user", "content": QUESTION}], {"return_dict": True, "return_tensors": "pt"}
    inputs = expected.tokenizer.apply_chat_template(
        message, tools=tools, chat_template=WITH_TOOLS, add_generation_prompt=True, **how
    )
    text = expected.continued(inputs, 60)
    letter = Counter(text[:-2].replace(" ", "")).most_common(1)[0][0]
    call = {"open": letter, "close": next(part[0] for part in text.split(letter)[1:] if part), "content": "text"}
    call |= {"repeats": True}
    call["transform"] = {"type": "function", "function": {"name": "pick", "arguments": "{content}"}}
    fields = {"tool_calls": call, "content": {"close_pattern": "(?!)", "content": "text"}}
    monkeypatch.setattr(server.processor, "chat_template", WITH_TOOLS)
    template = {"start_anchor_pattern": r"\Z", "fields": fields}
    monkeypatch.setattr(server.processor, "response_template", template, raising=False)
    answer = ask(server, QUESTION, new=60, tools=tools).choices[0]
    calls = answer.message.tool_calls
    assert len(calls) > 1 and {call.function.name for call in calls} == {"pick"}
    assert answer.finish_reason == "tool_calls"
    (one,) = ask(server, QUESTION, new=60, tools=tools, parallel_tool_calls=False).choices[0].message.tool_calls
    assert one.function == calls[0].function
    chunks = [chunk.choices[0].delta for chunk in ask(server, QUESTION, new=60, tools=tools, stream=True)]
    streamed_calls = [call for delta in chunks for call in delta.tool_calls or ()]
    assert [call.function.arguments for call in streamed_calls] == [call.function.arguments for call in calls]
    assert [call.index for call in streamed_calls] == list(range(len(calls)))


def test_a_text_with_at_most_one_call_is_whole(server):
    """What was held back as the beginning of a stop is shown at the end."""
    shape = {"type": "json_schema", "json_schema": {"name": "pick", "schema": Pick.model_json_schema()}}
    shape["json_schema"]["schema"]["additionalProperties"] = False
    how = {"new": 90, "response_format": shape, "parallel_tool_calls": False, "stop": "}\0"}
    answer = ask(server, "a cat", **how).choices[0]
    assert Pick.model_validate_json(answer.message.content) and answer.finish_reason == "stop"
    assert streamed(server, "a cat", **how) == answer.message.content


def test_an_answer_that_ends_after_a_call_ends_with_it(server, monkeypatch):
    """The end token follows the call, as models write it."""
    call = {"open": "{", "close": "}", "content": "text", "repeats": True}
    call["transform"] = {"type": "function", "function": {"name": "pick", "arguments": "{content}"}}
    fields = {"tool_calls": call, "content": {"close": "<|endoftext|>", "content": "text"}}
    template = {"start_anchor_pattern": r"\Z", "fields": fields}
    monkeypatch.setattr(server.processor, "chat_template", WITH_TOOLS)
    monkeypatch.setattr(server.processor, "response_template", template, raising=False)
    schema = Pick.model_json_schema() | {"additionalProperties": False}
    how = {"new": 90, "tools": [{"type": "function", "function": {"name": "pick"}}]}
    how["response_format"] = {"type": "json_schema", "json_schema": {"name": "pick", "schema": schema}}
    answer = ask(server, "a cat", **how).choices[0]
    assert answer.finish_reason == "tool_calls" and '"kind"' in answer.message.tool_calls[0].function.arguments
    assert answer.message.content is None
    assert [chunk.choices[0].finish_reason for chunk in ask(server, "a cat", stream=True, **how)][-1] == "tool_calls"


def test_responses(server, expected):
    """A text, messages, instructions, a schema; whole and as a stream."""
    create = server.client.responses.create
    same = {"model": server.model, "temperature": 0, "max_output_tokens": NEW, "store": False}
    parts = [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}]
    for given in (QUESTION, parts):
        answer = create(input=given, **same)
        assert answer.output_text == expected(QUESTION) and answer.usage.output_tokens == NEW
    events = list(create(input=QUESTION, stream=True, **same))
    assert "".join(event.delta for event in events if event.type.endswith("text.delta")) == expected(QUESTION)
    assert events[-1].response.output_text == expected(QUESTION)
    parsed = server.client.responses.parse(input="a cat", text_format=Pick, **same | {"max_output_tokens": 300})
    assert isinstance(parsed.output_parsed, Pick)
    broken = [{"role": "user", "content": "a"}, {"type": "function_call"}]
    for wrong in ({"previous_response_id": "x"}, {"input": []}, {"input": broken}, {"background": True}):
        with pytest.raises(openai.BadRequestError, match=next(iter(wrong))):
            create(**{"input": "a"} | same | wrong)


def test_clients_that_wait_for_many(server, expected):
    """The asynchronous client, with streams among others."""

    async def asked():
        client = openai.AsyncOpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)
        same = {"model": server.model, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
        same |= {"max_tokens": NEW}

        async def stream():
            chunks = await client.chat.completions.create(stream=True, **same)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

        async def whole():
            return (await client.chat.completions.create(**same)).choices[0].message.content

        return await asyncio.gather(stream(), whole(), stream(), whole())

    assert asyncio.run(asked()) == [expected(QUESTION)] * 4


def test_models_are_described(server):
    assert server.client.models.retrieve(server.model).id == server.model
    with pytest.raises(openai.NotFoundError, match="one model"):
        server.client.models.retrieve("other")


def test_a_cancelled_request_is_logged_as_such(server, capfd):
    stream = ask(server, QUESTION, new=500, stream=True)
    next(iter(stream))
    stream.close()
    wait_for(lambda: not server.engine.jobs)
    lines = [line for line in capfd.readouterr().err.splitlines() if not line.startswith("INFO")]
    assert lines[-1].startswith("Cancelled after ") and lines[-1].endswith(" tokens.")


def headers_of(address, path, **headers):
    request = urllib.request.Request(address + path, headers=headers)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.headers


def test_keys_and_origins(target, server):
    """No key and no other origin by default. /health needs no key."""
    assert "access-control-allow-origin" not in headers_of(server.address, "/health", Origin="http://a.example")[1]
    with serving(target, api_key="k\u00e9y", origins=("http://a.example",), waiting=0) as locked:
        for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "k"}):
            assert headers_of(locked.address, "/v1/models", **given)[0] == 401
        key = "Bearer k\u00e9y".encode().decode("latin-1")
        assert headers_of(locked.address, "/v1/models", Authorization=key)[0] == 200
        for origin, is_known in (("http://a.example", True), ("http://b.example", False)):
            status, headers = headers_of(locked.address, "/health", Origin=origin)
            assert status == 200 and ("access-control-allow-origin" in headers) == is_known
        with pytest.raises(openai.AuthenticationError):
            answered(locked, QUESTION)


def test_a_full_server_says_when_to_come_again(target):
    with serving(target, rows=1, waiting=0) as server:
        held = threading.Event()
        server.engine.batcher.run_alone(held.wait)
        with pytest.raises(openai.BadRequestError, match="asks for 2 answers, and this server has room for 1"):
            ask(server, QUESTION, n=2)
        with ask(server, QUESTION, stream=True) as stream:
            with pytest.raises(openai.RateLimitError) as error:
                ask(server, QUESTION)
            assert int(error.value.response.headers["retry-after"]) > 0
            held.set()
            list(stream)


def test_what_runs_may_end(target, expected):
    """After a signal the server takes no more requests, and finishes those that it has."""
    with serving(target, grace=30) as server:
        stream = ask(server, QUESTION, new=200, stream=True)
        texts = [next(iter(stream)).choices[0].delta.content or ""]
        server.stop()
        texts += [chunk.choices[0].delta.content or "" for chunk in stream]
        assert "".join(texts) == expected(QUESTION, 200)
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", server.port), timeout=5)


def test_penalties_of_no_answer_change_nothing():
    scores = torch.randn(2, 5)
    assert torch.equal(Penalties(1.0, 1.0, 3)(torch.ones(2, 3, dtype=torch.long), scores), scores)
    lowered = Penalties(0.5, 0.25, 1)(torch.tensor([[0, 4, 4], [1, 1, 2]]), scores)
    want = scores.clone()
    want[0, 4] -= 1.0
    want[1, [1, 2]] -= 0.75
    assert torch.allclose(lowered, want)


def test_a_body_of_json(server):
    """Errors are JSON as the client reads it, with the type that the API has."""
    with pytest.raises(openai.BadRequestError) as error:
        ask(server, QUESTION, model="other")
    assert error.value.body["type"] == "invalid_request_error" and "one model" in json.dumps(error.value.body)
