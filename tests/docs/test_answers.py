"""Answers of docs/faq.md and docs/models.md that no other test has to be true."""

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import hf_longspec
from hf_longspec.testing import TINY_TARGETS, tiny_target
from tests.docs.blocks import PROJECT, read

CARDS = PROJECT / "hub_cards"


@pytest.fixture(scope="module")
def target():
    return AutoModelForCausalLM.from_pretrained(CARDS / "tiny-target", dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(CARDS / "tiny-target", padding_side="left")


@pytest.fixture
def draft():
    return AutoModel.from_pretrained(CARDS / "tiny-longspec", dtype=torch.float32)


@pytest.fixture
def generate(target, tokenizer, draft):
    """`generate(**options)`: twelve tokens after one prompt."""
    inputs = tokenizer(["The history of the lighthouse begins"], return_tensors="pt")

    def run(assistant_model=draft, **options):
        return target.generate(**inputs, assistant_model=assistant_model, **({"max_new_tokens": 12} | options))

    return run


@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_the_cache_that_is_asked_for_is_replaced(generate, draft, cache):
    out = generate(cache_implementation=cache, return_dict_in_generate=True)
    assert isinstance(out.past_key_values, hf_longspec.SpeculativeCache)
    assert out.sequences.equal(generate(None)) and draft.last_speculation.num_forwards > 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences has to be 1"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions=True is not supported"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states=True is not supported"),
        ({"cache_implementation": "offloaded"}, "kept as the model computes them"),
        ({"guidance_scale": 1.5}, "keeps state from call to call"),
        ({"watermarking_config": {"bias": 2.5}}, "keeps state from call to call"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 0]])}, "padding must be on the left"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_refused(target, draft, options, reason):
    inputs = {"input_ids": torch.arange(5, 12)[None], "max_new_tokens": 4} | options
    with pytest.raises(ValueError, match=reason):
        target.generate(assistant_model=draft, **inputs)


def test_a_draft_of_another_vocabulary_is_refused(draft):
    with pytest.raises(ValueError, match="different tokenizers"):
        tiny_target("llama").generate(torch.tensor([[5, 6, 7]]), assistant_model=draft, max_new_tokens=4)


def test_beams_leave_the_draft_alone(generate, draft):
    assert generate(num_beams=2).equal(generate(None, num_beams=2))
    assert draft.last_speculation is None


def test_other_assistants_and_prompt_lookup_still_work(generate, target):
    small = AutoModelForCausalLM.from_pretrained(CARDS / "tiny-target", dtype=torch.float32)
    assert generate(small).equal(generate(None))
    assert generate(None, prompt_lookup_num_tokens=3).equal(generate(None))


def test_stop_strings_need_the_tokenizer(generate, tokenizer, draft):
    text = tokenizer.decode(generate(None, max_new_tokens=40)[0])
    stop = text[-9:-4]
    options = {"stop_strings": [stop], "max_new_tokens": 40}
    stopped = generate(tokenizer=tokenizer, **options)
    assert stop in tokenizer.decode(stopped[0])[-9:] and len(tokenizer.decode(stopped[0])) < len(text)
    assert stopped.equal(generate(None, tokenizer=tokenizer, **options))
    assert draft.last_speculation.num_forwards > 0
    with pytest.raises(ValueError, match="tokenizer"):
        generate(**options)


def test_the_architectures_of_the_page_are_those_of_the_tests():
    listed = read("docs/models.md").split("More tests run on ")[1].split(", on transformers")[0]
    listed = listed.replace(" (text)", "").replace(" and ", ", ").replace("\n", " ")
    assert sorted(listed.split(", ")) == sorted(TINY_TARGETS)
