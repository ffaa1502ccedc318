"""Clients of the OpenAI API that people have, as they are: their texts are those of plain `generate`.

Each test needs its client: langchain-openai, llama-index-llms-openai-like, litellm, instructor, lm-eval[api].
"""

import json
from typing import Literal

import openai
import pydantic
import pytest

from tests.cli.served import NEW, WITH_TOOLS, Reference, serving, with_template

pytestmark = pytest.mark.soak
QUESTION = "one two three, one two three, one two"
STOP = "\n\n"


class Pick(pydantic.BaseModel):
    """An animal."""

    model_config = pydantic.ConfigDict(extra="forbid")
    kind: Literal["cat", "dog"]
    old: bool


@pytest.fixture(scope="module")
def target(tiny, tmp_path_factory):
    return with_template(tiny.target, tmp_path_factory.mktemp("clients") / "tiny", WITH_TOOLS)


@pytest.fixture(scope="module")
def server(target):
    with serving(target, rows=4) as server:
        yield server


@pytest.fixture(scope="module")
def expected(target):
    return Reference(target)


@pytest.fixture
def stop(expected):
    """A text that ends an answer, and the answer before it."""
    whole = expected(QUESTION, 40)
    return whole[20:22], whole[: whole.index(whole[20:22])]


def test_langchain(server, expected, stop):
    chat = pytest.importorskip("langchain_openai").ChatOpenAI
    how = {"base_url": f"{server.address}/v1", "api_key": "none", "model": server.model, "temperature": 0}
    model = chat(max_tokens=NEW, **how)
    assert model.invoke(QUESTION).content == expected(QUESTION)
    assert "".join(chunk.content for chunk in model.stream(QUESTION)) == expected(QUESTION)
    assert chat(max_tokens=40, **how).bind(stop=[stop[0]]).invoke(QUESTION).content == stop[1]
    longer = chat(max_tokens=200, **how)
    called = longer.bind_tools([Pick], tool_choice="Pick", strict=True).invoke("a cat")
    assert Pick(**called.tool_calls[0]["args"])
    assert isinstance(longer.with_structured_output(Pick, method="json_schema").invoke("a cat"), Pick)


def test_llama_index(server, expected):
    like = pytest.importorskip("llama_index.llms.openai_like").OpenAILike
    model = like(
        api_base=f"{server.address}/v1", api_key="none", model=server.model, is_chat_model=True, temperature=0,
        max_tokens=NEW,
    )  # fmt: skip
    assert model.complete(QUESTION).text == expected(QUESTION)
    assert [part.text for part in model.stream_complete(QUESTION)][-1] == expected(QUESTION)


def test_litellm(server, expected, stop):
    litellm = pytest.importorskip("litellm")
    how = {"model": f"openai/{server.model}", "api_base": f"{server.address}/v1", "api_key": "none", "temperature": 0}
    messages = [{"role": "user", "content": QUESTION}]
    answer = litellm.completion(messages=messages, max_tokens=NEW, user="me", **how)
    assert answer.choices[0].message.content == expected(QUESTION)
    chunks = litellm.completion(messages=messages, max_tokens=NEW, stream=True, **how)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected(QUESTION)
    answer = litellm.completion(messages=messages, max_tokens=40, stop=[stop[0]], **how)
    assert answer.choices[0].message.content == stop[1]


def test_instructor(server):
    instructor = pytest.importorskip("instructor")
    client = instructor.from_openai(openai.OpenAI(base_url=f"{server.address}/v1", api_key="none"))
    messages = [{"role": "user", "content": "a cat"}]
    answer = client.chat.completions.create(
        model=server.model, messages=messages, response_model=Pick, max_tokens=200, temperature=0, max_retries=0
    )
    assert isinstance(answer, Pick)


def test_lm_eval(server, expected, stop):
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalChatCompletion

    assert lm_eval
    model = LocalChatCompletion(
        base_url=f"{server.address}/v1/chat/completions", model=server.model, tokenizer_backend=None
    )
    question = json.dumps([{"role": "user", "content": QUESTION}])
    arguments = {"until": [stop[0]], "max_gen_toks": 40, "temperature": 0}
    requests = [Instance("generate_until", {}, (model.apply_chat_template(json.loads(question)), arguments), 0)]
    assert model.generate_until(requests) == [stop[1]]
