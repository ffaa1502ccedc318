"""`serve`: a server with a draft, asked by the client of OpenAI, against plain `generate`."""

import json
import sys

import openai
import pytest

from hf_longspec import StructuredOutput
from tests import scripts
from tests.cli.served import (
    NEW,
    POSITIONS,
    TEMPLATE,
    Reference,
    answered,
    ask,
    metrics,
    serving,
    streamed,
    with_template,
)
from tests.watching import before as called_before

QUESTION = "one two three, one two three, one two"


@pytest.fixture(scope="module")
def target(tiny, tmp_path_factory):
    return with_template(tiny.target, tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="module")
def server(target):
    with serving(target) as server:
        yield server


@pytest.fixture(scope="module")
def expected(target):
    return Reference(target)


def test_answers_are_those_of_generate_and_the_draft_drafts(server, expected):
    before = metrics(server)
    answer = ask(server, QUESTION)
    assert answer.choices[0].message.content == expected(QUESTION) == streamed(server, QUESTION)
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == NEW
    after = metrics(server, before["hf_longspec_requests_total"] + 2)
    new = {name.removeprefix("hf_longspec_"): after[name] - before[name] for name in after if name.endswith("_total")}
    assert new["requests_total"] == 2 and new["generated_tokens_total"] == 2 * (NEW - 1)
    assert new["accepted_tokens_total"] > 0 and new["plain_requests_total"] == 0 and new["decode_seconds_total"] > 0
    assert new["reused_tokens_total"] >= len(QUESTION)  # the second request has the same prompt


def test_agents_that_alternate_reread_nothing(server, expected, monkeypatch):
    """Three conversations with system prompts of their own, each of which reads its new tokens alone."""
    documents = [f"{word} is the number of this agent. " * 4 for word in ("one", "two", "three")]
    chats = [[{"role": "system", "content": document}] for document in documents]
    lengths = []

    def see(model, *args, **kwargs):
        if model is server.target.model:
            lengths.append(kwargs.get("input_ids", kwargs.get("inputs_embeds")).shape[1])

    called_before(monkeypatch, type(server.target.model), "forward", see)
    for turn in range(3):
        for chat in chats:
            chat.append({"role": "user", "content": ("nine ten", "four five", "six")[turn]})
            lengths.clear()
            answer = server.client.chat.completions.create(
                model=server.model, messages=chat, temperature=0, max_tokens=NEW
            )
            text = answer.choices[0].message.content
            inputs = expected.tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"
            )
            assert max(lengths) < 60 < len(documents[0]) if turn else max(lengths) > 60
            assert text == expected.continued(inputs)
            chat.append({"role": "assistant", "content": text})


def test_the_script_of_three_agents(server, tmp_path, capsys):
    paths = [tmp_path / word for word in ("one", "two", "three")]
    for path in paths:
        path.write_text(f"{path.name} is the number of an agent. " * 4)
    arguments = ["--url", server.address, "--tokens", 5, "--prompts", *paths]
    assert scripts.run("three_agents", *arguments, folder="examples") == 0
    rows = [list(map(int, line.split())) for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[0] for row in rows] == [1, 2, 3] * 3
    assert all(prompt - reused < 60 < prompt for _, prompt, reused in rows[3:])


def test_new_tokens_end_with_the_positions(server):
    """As for every server, a prompt that leaves less room than is asked for gets a shorter answer."""
    answer = ask(server, "x" * (POSITIONS - 24))
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == POSITIONS and 0 < answer.usage.completion_tokens < NEW


class TestCommand:
    def test_without_the_packages(self, main, tiny, monkeypatch):
        monkeypatch.setitem(sys.modules, "fastapi", None)
        for name in [name for name in sys.modules if name.startswith("hf_longspec.cli.serv")]:
            monkeypatch.delitem(sys.modules, name)
        status, _, error = main("serve", "--target", tiny.target)
        assert status == 2 and error.startswith("error: serve needs fastapi, which is not installed: pip install")


SHAPE = {"type": "object", "properties": {"kind": {"enum": ["cat", "dog"]}, "old": {"type": "boolean"}}}
SHAPE |= {"required": ["kind", "old"], "additionalProperties": False}


def test_answers_with_a_structure(server, expected):
    """As plain `generate` with the same processor, at once and as a stream; later answers are free again."""
    structure = StructuredOutput(expected.tokenizer, json_schema=SHAPE)
    text = expected("a cat", 40, logits_processor=[structure])
    asked = {"response_format": {"type": "json_schema", "json_schema": {"name": "shape", "schema": SHAPE}}, "new": 40}
    assert answered(server, "a cat", **asked) == streamed(server, "a cat", **asked) == text
    assert json.loads(text).keys() == {"kind", "old"}
    assert answered(server, "a cat", response_format={"type": "json_object"}).startswith("{")
    assert answered(server, "a cat") == expected("a cat")


WITH_TOOLS = "{% if tools %}{{ tools | tojson }}\n{% endif %}" + TEMPLATE
TOOLS = [
    {"type": "function", "function": {"name": "pick", "parameters": SHAPE}},
    {"type": "function", "function": {"name": "stop"}},
]
PICK = {"type": "function", "function": {"name": "pick"}}


def test_answers_that_have_to_be_calls(server, monkeypatch):
    """At once and as a stream; cut off, the answer is text; without a choice or with "none" it is free."""
    (loaded,) = server.models.loaded_models.values()
    monkeypatch.setattr(loaded.processor, "chat_template", WITH_TOOLS)
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
    assert answered(server, "a cat", tools=TOOLS) == answered(server, "a cat", tools=TOOLS, tool_choice="auto")
    for wrong in ({"tool_choice": "required"}, {"tools": TOOLS[1:], "tool_choice": PICK}):
        with pytest.raises(openai.BadRequestError, match="tool_choice="):
            ask(server, "a cat", **wrong)
