"""`serve`: a server with a draft, asked by the client of OpenAI, against plain `generate`.

Requests are decoded one after the other, or at once in the rows of a batch.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from hf_longspec import PlainDraftModel, StructuredOutput
from tests import scripts
from tests.cli.served import (
    NEW,
    POSITIONS,
    WITH_TOOLS,
    Reference,
    answered,
    ask,
    metrics,
    serving,
    streamed,
    wait_for,
    with_template,
)
from tests.watching import before as called_before

QUESTIONS = ["one two three, one two three, one two", "four five, four five, four", "a", "the sea, the sea, the"]


@pytest.fixture(scope="module")
def target(tiny, tmp_path_factory):
    return with_template(tiny.target, tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="module", params=[1, 3], ids=["in turn", "at once"])
def server(request, target):
    with serving(target, rows=request.param) as server:
        yield server


@pytest.fixture(scope="module")
def expected(target):
    return Reference(target)


def test_streams_and_answers_are_those_of_generate_and_the_draft_drafts(server, expected):
    before = metrics(server)
    with ThreadPoolExecutor(8) as threads:
        streams = list(threads.map(lambda text: streamed(server, text), QUESTIONS))
        answers = list(threads.map(lambda text: ask(server, text), QUESTIONS))
    assert streams == [answer.choices[0].message.content for answer in answers] == list(map(expected, QUESTIONS))
    assert answers[0].choices[0].finish_reason == "length" and answers[0].usage.completion_tokens == NEW
    after = metrics(server, before["hf_longspec_requests_total"] + 8)
    new = {name.removeprefix("hf_longspec_"): after[name] - before[name] for name in after if name.endswith("_total")}
    assert new["requests_total"] == 8 and new["generated_tokens_total"] == 8 * (NEW - 1)
    assert new["accepted_tokens_total"] > 0 and new["plain_requests_total"] == 0 and new["decode_seconds_total"] > 0


def test_agents_that_alternate_reread_nothing(server, expected, monkeypatch):
    """Three at once with prompts of their own: in later turns they read what follows the earlier ones."""
    documents = [f"{word} is the number of this agent. " * 4 for word in ("one", "two", "three")]
    lengths = []

    def see(model, *args, **kwargs):
        if model is server.target.model:
            lengths.append(kwargs.get("input_ids", kwargs.get("inputs_embeds")).shape[1])

    called_before(monkeypatch, type(server.target.model), "forward", see)
    for turn in range(3):
        known, before = sum(map(len, documents)), metrics(server)  # a token is a character
        lengths.clear()
        documents = [document + ("nine ten", "four five", "six")[turn] for document in documents]
        with ThreadPoolExecutor(3) as threads:
            assert list(threads.map(lambda text: answered(server, text), documents)) == list(map(expected, documents))
        after = metrics(server, before["hf_longspec_requests_total"] + 3)
        reused = after["hf_longspec_reused_tokens_total"] - before["hf_longspec_reused_tokens_total"]
        assert reused >= known if turn else reused < known / 2
        assert (max(lengths) < 60) == (turn > 0)


def test_the_script_of_three_agents(server, tmp_path, capsys):
    paths = [tmp_path / word for word in ("one", "two", "three")]
    for path in paths:
        path.write_text(f"{path.name} is the number of an agent. " * 4)
    arguments = ["--url", server.address, "--tokens", 5, "--prompts", *paths]
    assert scripts.run("three_agents", *arguments, folder="examples") == 0
    rows = [list(map(int, line.split())) for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[0] for row in rows] == [1, 2, 3] * 3
    assert all(prompt - reused < 60 < prompt for _, prompt, reused in rows[3:])


def test_a_seed_is_that_of_its_request(server, expected):
    options = {"temperature": 1.0, "seed": 3}
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda text: answered(server, text, **options), [*QUESTIONS[:2], QUESTIONS[0]]))
    options |= {"do_sample": True, "assistant_model": PlainDraftModel.from_target(expected.model)}
    assert found[0] == found[2] == expected(QUESTIONS[0], **options)
    assert found[1] == expected(QUESTIONS[1], **options)
    free = {answered(server, QUESTIONS[0], temperature=1.0, new=16) for _ in range(3)}
    assert len(free) > 1  # the seed of an earlier request is not that of the next


def test_answers_end_with_stop_strings_and_with_the_positions(server, expected):
    """As for every server, a prompt that leaves less room than is asked for gets a shorter answer."""
    whole = expected(QUESTIONS[0])
    stop = whole[4:6]
    answer = ask(server, QUESTIONS[0], stop=[stop, "never"]).choices[0]
    assert answer.message.content == whole[: whole.index(stop)] and answer.finish_reason == "stop"
    chunks = [chunk.choices[0].delta.content for chunk in ask(server, QUESTIONS[0], stop=stop, stream=True)]
    assert "".join(filter(None, chunks)) == answer.message.content
    answer = ask(server, "x" * (POSITIONS - 24))
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == POSITIONS and 0 < answer.usage.completion_tokens < NEW
    with pytest.raises(openai.BadRequestError, match="positions"):
        ask(server, "x" * POSITIONS)


def test_a_client_that_leaves_makes_room(server, expected):
    """The next one does not wait for 500 tokens."""
    before = metrics(server)
    stream = ask(server, QUESTIONS[0], new=500, stream=True)
    next(iter(stream))
    stream.close()
    wait_for(lambda: not server.engine.jobs)
    assert answered(server, QUESTIONS[1]) == expected(QUESTIONS[1])
    after = metrics(server, before["hf_longspec_requests_total"] + 2)
    assert after["hf_longspec_generated_tokens_total"] - before["hf_longspec_generated_tokens_total"] < 400


def test_without_the_packages(main, tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "fastapi", None)
    for name in [name for name in sys.modules if name.startswith("hf_longspec.cli.serv")]:
        monkeypatch.delitem(sys.modules, name)
    status, _, error = main("serve", "--target", tiny.target)
    assert status == 2 and error.startswith("error: serve needs fastapi, which is not installed: pip install")


SHAPE = {"type": "object", "properties": {"kind": {"enum": ["cat", "dog"]}, "old": {"type": "boolean"}}}
SHAPE |= {"required": ["kind", "old"], "additionalProperties": False}


def test_answers_with_a_structure_beside_others(server, expected):
    """As plain `generate` with the same processor, at once and as a stream; other answers are free."""
    text = expected("a cat", 40, logits_processor=[StructuredOutput(expected.tokenizer, json_schema=SHAPE)])
    asked = {"response_format": {"type": "json_schema", "json_schema": {"name": "shape", "schema": SHAPE}}}
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda of: streamed(server, "a cat", new=40, **of), [asked, {}, asked, {}]))
    assert found == 2 * [text, expected("a cat", 40)] and answered(server, "a cat", new=40, **asked) == text
    assert json.loads(text).keys() == {"kind", "old"}
    assert answered(server, "a cat", response_format={"type": "json_object"}).startswith("{")


TOOLS = [
    {"type": "function", "function": {"name": "pick", "parameters": SHAPE}},
    {"type": "function", "function": {"name": "stop"}},
]
PICK = {"type": "function", "function": {"name": "pick"}}


def test_answers_that_have_to_be_calls(server, monkeypatch):
    """At once and as a stream; cut off, the answer is text; without a choice or with "none" it is free."""
    monkeypatch.setattr(server.processor, "chat_template", WITH_TOOLS)
    for choice, names in ((PICK, {"pick"}), ("required", {"pick", "stop"})):
        asked = {"tools": TOOLS, "tool_choice": choice, "new": 90}
        answer = ask(server, "a cat", **asked).choices[0]
        (call,) = answer.message.tool_calls
        assert answer.finish_reason == "tool_calls" and not answer.message.content and call.function.name in names
        if call.function.name == "pick":
            assert json.loads(call.function.arguments).keys() == {"kind", "old"}
        chunks = [chunk.choices[0].delta for chunk in ask(server, "a cat", stream=True, **asked)]
        (streamed_call,) = [one for delta in chunks for one in delta.tool_calls or ()]
        assert streamed_call.function.model_dump() == call.function.model_dump()
        assert not any(delta.content for delta in chunks)
    cut = ask(server, "a cat", tools=TOOLS, tool_choice=PICK, new=20).choices[0]
    assert cut.finish_reason == "length" and cut.message.content == '{"name": "pick", "argum'[:20]
    assert not cut.message.tool_calls
    assert answered(server, "a cat", tools=TOOLS, tool_choice="none") == answered(server, "a cat")
    for wrong in ({"tool_choice": "required"}, {"tools": TOOLS[1:], "tool_choice": PICK}):
        with pytest.raises(openai.BadRequestError, match="tool_choice="):
            ask(server, "a cat", **wrong)
    with pytest.raises(openai.BadRequestError, match="tools: it is not known how"):
        ask(server, "a cat", tools=TOOLS)
    # whatever the model writes is text up to a call, in this form
    call = {"open": "o", "close": "e", "content": "text", "repeats": True}
    call |= {"transform": {"type": "function", "function": {"name": "pick", "arguments": "{content}"}}}
    fields = {"tool_calls": call, "content": {"close_pattern": "(?!)", "content": "text"}}
    monkeypatch.setattr(server.processor, "response_template", {"start_anchor_pattern": r"\Z", "fields": fields})
    found = ask(server, "a cat", tools=TOOLS, new=60).choices[0].message
    one = ask(server, "a cat", tools=TOOLS, new=60, parallel_tool_calls=False).choices[0].message
    print(found, one)
