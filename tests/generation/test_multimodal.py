"""Classes for images and text, as `AutoModelForCausalLM` gives them for gemma-3-4b-it: text-only calls."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_longspec import PlainDraftModel, SpecAttnDraftModel
from hf_longspec.generation.target import TargetView
from hf_longspec.modeling.plain.configuration_plain import PlainConfig
from hf_longspec.testing import RandomTreeDraftModel, tiny_prompts
from tests.generation.tiny_models import IMAGE_TOKEN, SIZES, peaked, vision_language_model

TEXT_ALONE = ("gemma3", "gemma4", "llava", "mistral3", "idefics3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
REFUSED = {"paligemma": "attend to later tokens", "kosmos-2.5": "it takes positions from the length of its cache or"}
VOCAB_OF_TEXT = IMAGE_TOKEN  # prompts contain no image token
OPTIONS = {"max_new_tokens": 11, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(scope="module")
def models():
    made = {}

    def get(name):
        if name not in made:
            made[name] = fuyu() if name == "fuyu" else vision_language_model(name)
        return made[name]

    return get


def fuyu():
    config = AutoConfig.for_model("fuyu", text_config={"model_type": "persimmon", **SIZES}, patch_size=4, **SIZES)
    return peaked(lambda: AutoModelForCausalLM.from_config(config))


def check(model, lengths, **inputs):
    input_ids, mask = tiny_prompts(VOCAB_OF_TEXT, lengths)
    call = OPTIONS | {"attention_mask": mask} | inputs
    plain = model.generate(input_ids, **call)
    config = PlainConfig(**PlainDraftModel.from_target(model).config.to_dict())
    draft = RandomTreeDraftModel(config, hints=plain[:, max(lengths) :].tolist())
    assert torch.equal(model.generate(input_ids, **call, assistant_model=draft), plain)
    assert draft.last_speculation.num_accepted_draft_tokens > 0


@pytest.mark.parametrize("lengths", [(37,), (23, 9, 40)], ids=["one", "ragged"])
@pytest.mark.parametrize("name", [*TEXT_ALONE, "fuyu"])
def test_text_alone(name, lengths, models):
    check(models(name), lengths)


def test_what_auto_model_for_causal_lm_gives(models):
    model = AutoModelForCausalLM.from_config(models("gemma3").config)
    assert type(model) is type(models("gemma3")) and TargetView(model).sliding_layers == {0, 1}


@pytest.mark.parametrize("name", ["gemma3", "qwen2_vl"])
def test_the_target_drafts_for_itself(name, models):
    model = models(name)
    input_ids, mask = tiny_prompts(VOCAB_OF_TEXT, (40, 23))
    draft = SpecAttnDraftModel.from_target(model)
    drafted = model.generate(input_ids, attention_mask=mask, **OPTIONS, assistant_model=draft)
    assert torch.equal(drafted, model.generate(input_ids, attention_mask=mask, **OPTIONS))
    assert draft.last_speculation.num_accepted_draft_tokens > 0


@pytest.mark.parametrize(("name", "argument"), [("gemma3", "token_type_ids"), ("qwen2_5_vl", "mm_token_type_ids")])
def test_types_of_tokens_that_are_all_text(name, argument, models):
    """As processors return them."""
    check(models(name), (23, 9), **{argument: torch.zeros(2, 23, dtype=torch.long)})


def test_types_of_tokens_that_matter(models):
    model = models("gemma3")
    input_ids, _ = tiny_prompts(VOCAB_OF_TEXT, (9,))
    types = torch.tensor([[0, 0, 1, 1, 1, 0, 0, 0, 0]])
    draft = PlainDraftModel.from_target(model)
    with pytest.raises(ValueError, match="token_type_ids would not reach the model"):
        model.generate(input_ids, token_type_ids=types, **OPTIONS, assistant_model=draft)
    assert draft.last_speculation is None


def test_zeros_that_are_no_text(models):
    """In PaliGemma, tokens of type 0 see each other in both directions."""
    assert not TargetView(models("paligemma")).ignores_zeros("token_type_ids")
    assert TargetView(models("gemma3")).ignores_zeros("token_type_ids")


@pytest.mark.parametrize("name", ["gemma3", "llava"])
def test_images_are_refused_by_name(name, models):
    """Before the first token. Transformers 5.23 encodes them before it calls any decoding."""
    model, tokens = models(name), 4
    input_ids, _ = tiny_prompts(VOCAB_OF_TEXT, (12,))
    input_ids[0, 2 : 2 + tokens] = IMAGE_TOKEN
    pixels = torch.randn(1, 3, 28, 28)
    assert model.generate(input_ids, pixel_values=pixels, **OPTIONS).shape == (1, 23)
    draft = PlainDraftModel.from_target(model)
    with pytest.raises(ValueError, match=r"(image inputs|pixel_values) would not reach.*or call generate\(\) without"):
        model.generate(input_ids, pixel_values=pixels, **OPTIONS, assistant_model=draft)
    assert draft.last_speculation is None


@pytest.mark.parametrize(("name", "reason"), REFUSED.items())
def test_classes_whose_text_differs(name, reason, models):
    """PaliGemma's prompts are attended to in both directions, and Kosmos-2.5 counts positions by its tokens."""
    draft = PlainDraftModel.from_target(models(name))
    with pytest.raises(ValueError, match=reason):
        models(name).generate(tiny_prompts(VOCAB_OF_TEXT, (9,))[0], **OPTIONS, assistant_model=draft)
