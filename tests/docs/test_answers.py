"""Answers of docs/faq.md and docs/models.md that no other test has to be true."""

import pytest

from hf_longspec import PlainDraftModel, SpeculativeCache
from hf_longspec.testing import TINY_TARGETS, tiny_prompts, tiny_target
from tests.docs.blocks import read


@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_the_cache_that_is_asked_for_is_replaced(cache):
    model = tiny_target("llama")
    draft = PlainDraftModel.from_target(model)
    prompt, mask = tiny_prompts(128, [9])
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    out = model.generate(prompt, assistant_model=draft, cache_implementation=cache, **options)
    assert isinstance(out.past_key_values, SpeculativeCache)
    assert out.sequences.equal(model.generate(prompt, **options).sequences)


def test_the_architectures_of_the_page_are_those_of_the_tests():
    listed = read("docs/models.md").split("More tests run on ")[1].split(", on transformers")[0]
    listed = listed.replace(" (text)", "").replace(" and ", ", ").replace("\n", " ")
    assert sorted(listed.split(", ")) == sorted(TINY_TARGETS)
