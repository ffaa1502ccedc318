"""`serve --rows`: clients at once, each with the answer of plain `generate`, and what befalls one befalls no other."""

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from hf_longspec import PlainDraftModel, StructuredOutput
from tests.cli.served import (
    NEW,
    POSITIONS,
    Reference,
    answered,
    ask,
    metrics,
    serving,
    streamed,
    wait_for,
    with_template,
)

QUESTIONS = ["one two three, one two three, one two", "four five, four five, four", "a", "the sea, the sea, the"]


@pytest.fixture(scope="module")
def target(tiny, tmp_path_factory):
    return with_template(tiny.target, tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="module")
def server(target):
    with serving(target, rows=3) as server:
        yield server
        server.decoder.batcher.close(cancel=True)


@pytest.fixture(scope="module")
def expected(target):
    return Reference(target)


def test_streams_and_answers_at_once(server, expected):
    before = metrics(server)
    with ThreadPoolExecutor(8) as threads:
        streams = list(threads.map(lambda text: streamed(server, text), QUESTIONS))
        answers = list(threads.map(lambda text: answered(server, text), QUESTIONS))
    assert streams == answers == list(map(expected, QUESTIONS))
    after = metrics(server, before["hf_longspec_requests_total"] + 8)
    new = {name.removeprefix("hf_longspec_"): after[name] - before[name] for name in after if name.endswith("_total")}
    assert new["requests_total"] == 8 and new["generated_tokens_total"] == 8 * (NEW - 1)
    assert new["accepted_tokens_total"] > 0 and new["plain_requests_total"] == 0


def test_agents_that_alternate_reread_nothing(server, expected):
    """Three at once with prompts of their own: in the second turn they read what follows the first one."""
    documents = [f"{word} is the number of this agent. " * 4 for word in ("one", "two", "three")]
    known = sum(map(len, documents))  # a token is a character
    for turn in range(2):
        before = metrics(server)
        with ThreadPoolExecutor(3) as threads:
            assert list(threads.map(lambda text: answered(server, text), documents)) == list(map(expected, documents))
        after = metrics(server, before["hf_longspec_requests_total"] + 3)
        reused = after["hf_longspec_reused_tokens_total"] - before["hf_longspec_reused_tokens_total"]
        assert reused >= known if turn else reused < known / 2
        documents = [document + "nine ten" for document in documents]


def test_a_seed_is_that_of_its_request(server, expected):
    options = {"temperature": 1.0, "seed": 3}
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda text: answered(server, text, **options), [*QUESTIONS[:2], QUESTIONS[0]]))
    options |= {"do_sample": True, "assistant_model": PlainDraftModel.from_target(expected.model)}
    assert found[0] == found[2] == expected(QUESTIONS[0], **options)
    assert found[1] == expected(QUESTIONS[1], **options)


def test_answers_with_a_structure_beside_others(server, expected):
    pytest.importorskip("llguidance")
    schema = {"type": "array", "items": {"enum": ["cat", "dog"]}, "minItems": 2, "maxItems": 2}
    asked = {"response_format": {"type": "json_schema", "json_schema": {"name": "pets", "schema": schema}}}
    structure = StructuredOutput(expected.tokenizer, json_schema=schema)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda of: streamed(server, QUESTIONS[0], **of), [asked, {}, asked, {}]))
    assert found == 2 * [expected(QUESTIONS[0], logits_processor=[structure]), expected(QUESTIONS[0])]


def test_stop_strings_and_prompts_that_are_too_long(server, expected):
    whole = expected(QUESTIONS[0])
    stop = whole[4:6]
    assert answered(server, QUESTIONS[0], stop=stop) == whole[: whole.index(stop) + len(stop)]
    with pytest.raises(openai.BadRequestError, match="positions"):
        ask(server, "x" * POSITIONS)
    assert answered(server, QUESTIONS[1]) == expected(QUESTIONS[1])


def test_a_client_that_leaves_frees_its_row(server, expected):
    stream = ask(server, QUESTIONS[0], new=500, stream=True)
    next(iter(stream))
    wait_for(lambda: server.decoder.batcher.num_running == 1)
    stream.close()
    wait_for(lambda: not server.decoder.batcher.num_running and not server.decoder.jobs)
    assert answered(server, QUESTIONS[1]) == expected(QUESTIONS[1])
