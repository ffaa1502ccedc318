"""Classes for images and text, as `AutoModelForCausalLM` gives them for gemma-3-4b-it: text alone, and images."""

from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel, Qwen2AudioForConditionalGeneration

from hf_longspec import PlainDraftModel, SpecAttnDraftModel, SpeculativeCache
from hf_longspec.generation.cache import CACHE_NAME
from hf_longspec.generation.call import Prompts
from tests.generation import test_unsupported
from tests.generation.tiny_models import IMAGE_TOKEN, peaked, vision_language_model
from tests.robustness.shrunk_configs import shrunk_config
from tests.rounding import rounding
from tests.tiny_targets import RandomTreeDraftModel, tiny_prompts
from tests.watching import after

pytestmark = pytest.mark.usefixtures("every_step_speculates")

REFUSED = {"paligemma": "attend to later tokens", "kosmos-2.5": "it takes positions from the length of its cache or"}
VOCAB_OF_TEXT = IMAGE_TOKEN  # prompts contain no image token
WRONG = 0.01  # gap of logits after a broken rule, at least; they spread by 1 to 2
OPTIONS = {"max_new_tokens": 11, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


# Classes that `AutoModelForImageTextToText` does not give, and their settings.
OTHERS = {
    "fuyu": (AutoModelForCausalLM.from_config, {"patch_size": 4, "image_token_id": IMAGE_TOKEN}),
    "qwen2_audio": (
        Qwen2AudioForConditionalGeneration,
        {"audio_config": {"num_mel_bins": 16, "max_source_positions": 20}, "audio_token_id": IMAGE_TOKEN},
    ),
}


@pytest.fixture(scope="module")
def models():
    def make(name):
        if name not in OTHERS:
            return vision_language_model(name)
        make_model, settings = OTHERS[name]
        return peaked(lambda: make_model(shrunk_config(name, **settings)))

    return cache(make)


def check(model, lengths, **inputs):
    input_ids, mask = tiny_prompts(VOCAB_OF_TEXT, lengths)
    call = OPTIONS | {"attention_mask": mask} | inputs
    plain = model.generate(input_ids, **call)
    draft = random_tree(model, plain)
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    attention = [part.config._attn_implementation for part in parts]
    assert torch.equal(model.generate(input_ids, **call, assistant_model=draft), plain)
    assert attention == [part.config._attn_implementation for part in parts]
    assert draft.last_speculation.num_accepted_draft_tokens > 0


# Types of tokens that are all text, as processors return them.
OF_TEXT = {"gemma3": "token_type_ids", "qwen2_5_vl": "mm_token_type_ids"}


@pytest.mark.parametrize("name", ["gemma3", "qwen2_5_vl", "qwen3_5", "fuyu"])
def test_text_alone(name, models):
    check(models(name), (23, 9, 40))
    if name in OF_TEXT:
        check(models(name), (23, 9), **{OF_TEXT[name]: torch.zeros(2, 23, dtype=torch.long)})


@pytest.mark.parametrize(("name", "reason"), REFUSED.items())
def test_classes_whose_text_differs(name, reason, models):
    """PaliGemma's prompts are attended to in both directions, and Kosmos-2.5 counts positions by its tokens."""
    draft = PlainDraftModel.from_target(models(name))
    with pytest.raises(ValueError, match=reason):
        models(name).generate(tiny_prompts(VOCAB_OF_TEXT, (9,))[0], **OPTIONS, assistant_model=draft)
    assert draft.last_speculation is None


SOUND, HEARD = "feature_attention_mask", (torch.arange(40) < 16).long()[None]  # of 40 frames, 16 have sound
# Class: number of tokens of an image or a sound, and the inputs of a batch with one in each row.
GRID = torch.tensor([[x, y] for y in range(4) for x in range(4)])
IMAGES = {
    "gemma3": (4, lambda n: {"pixel_values": torch.randn(n, 3, 28, 28)}),
    "gemma4": (4, lambda n: {"pixel_values": torch.rand(n, 16, 588), "image_position_ids": GRID.expand(n, -1, -1)}),
    "llava": (4, lambda n: {"pixel_values": torch.randn(n, 3, 28, 28)}),
    "mistral3": (4, lambda n: {"pixel_values": torch.randn(n, 3, 56, 56), "image_sizes": torch.full((n, 2), 56)}),
    "idefics3": (1, lambda n: {"pixel_values": torch.randn(n, 1, 3, 28, 28)}),
    # the name was changed, and transformers 5.23 still takes this one
    "fuyu": (4, lambda n: {"image_patches": torch.randn(n, 4, 48)}),
    "qwen2_audio": (4, lambda n: {"input_features": torch.randn(n, 16, 40), SOUND: HEARD.repeat(n, 1)}),
}
TYPES = {"gemma3": "token_type_ids", "gemma4": "mm_token_type_ids"}
GRIDS = torch.tensor([[1, 4, 4], [1, 4, 6]])  # patches of the images of two rows in time, height and width


def with_image(name, lengths, after, types=True, seed=0):
    """A call with an image in each prompt, `after` tokens before its end, padded on the left."""
    tokens, make = IMAGES[name]
    input_ids, mask = tiny_prompts(VOCAB_OF_TEXT, lengths)
    end = input_ids.shape[1] - after
    input_ids[:, end - tokens : end] = IMAGE_TOKEN
    torch.manual_seed(seed)
    call = OPTIONS | {"attention_mask": mask} | make(len(lengths))
    if types and name in TYPES:
        call[TYPES[name]] = (input_ids == IMAGE_TOKEN).long()
    return input_ids, call | {"output_logits": True, "return_dict_in_generate": True}


def with_grids(lengths, after=6):
    """A call with an image of another size in each prompt, 4 patches a token, and M-RoPE positions that differ."""
    input_ids, mask = tiny_prompts(VOCAB_OF_TEXT, lengths)
    grids, end = GRIDS[: len(lengths)], input_ids.shape[1] - after
    for row, count in zip(input_ids, grids.prod(1) // 4, strict=True):
        row[end - count : end] = IMAGE_TOKEN
    torch.manual_seed(0)
    call = {"attention_mask": mask, "image_grid_thw": grids, "mm_token_type_ids": (input_ids == IMAGE_TOKEN).long()}
    call["pixel_values"] = torch.randn(int(grids.prod(1).sum()), 3 * 2 * 14 * 14)
    return input_ids, OPTIONS | call | {"output_logits": True, "return_dict_in_generate": True}


def check_image(model, draft, input_ids, call):
    plain = model.generate(input_ids, **call)
    out = model.generate(input_ids, **call, assistant_model=draft(model, plain.sequences))
    assert torch.equal(out.sequences, plain.sequences)
    logits, layers = torch.stack(plain.logits), model.config.get_text_config().num_hidden_layers
    torch.testing.assert_close(torch.stack(out.logits), logits, **rounding(logits, layers))
    return out, plain


def check_unsupported(model, reason, input_ids, call, **options):
    test_unsupported.check_unsupported(lambda: model, reason, call | {"input_ids": input_ids}, **options)


def random_tree(model, sequences):
    draft = RandomTreeDraftModel.from_target(model)
    draft.hints = sequences[:, -OPTIONS["max_new_tokens"] :].tolist()
    return draft


@pytest.mark.parametrize("name", IMAGES)
def test_image(name, models):
    input_ids, call = with_image(name, (14, 21), after=6)
    out, plain = check_image(models(name), random_tree, input_ids, call)
    assert out.speculation.num_accepted_draft_tokens > 0
    other = models(name).generate(input_ids, **call | with_image(name, (14, 21), after=6, seed=1)[1])
    assert (other.logits[0] - plain.logits[0]).abs().max() > WRONG


def test_types_of_tokens_that_matter(models):
    """Without an image, gemma3 attends in both directions where they are 1, and text goes on after that."""
    model = models("gemma3")
    input_ids, _ = tiny_prompts(VOCAB_OF_TEXT, (9,))
    types = torch.tensor([[0, 0, 1, 1, 1, 0, 0, 0, 0]])
    call = OPTIONS | {"token_type_ids": types, "output_logits": True, "return_dict_in_generate": True}
    _, plain = check_image(model, random_tree, input_ids, call)
    other = model.generate(input_ids, **call | {"token_type_ids": 0 * types})
    assert (other.logits[0] - plain.logits[0]).abs().max() > WRONG
    types[:, -1] = 1
    check_unsupported(model, r"row 0 does not end with text.*token_type_ids", input_ids, call)


def test_second_turn_after_an_image(models):
    """The cache holds the image; the user passes text alone. With the image again, the call is refused."""
    model = models("llava")
    input_ids, call = with_image("llava", (17,), after=6)
    draft = PlainDraftModel.from_target(model)
    first = model.generate(input_ids, **call, assistant_model=draft)
    more = torch.cat([first.sequences, tiny_prompts(VOCAB_OF_TEXT, (5,))[0]], dim=1)
    again = call | {"attention_mask": torch.ones_like(more)}
    stock = model.generate(input_ids, **call)
    again[CACHE_NAME] = stock.past_key_values
    check_unsupported(model, rf"{CACHE_NAME} holds 27 tokens.*Drop {CACHE_NAME}", more, again, stock_error=ValueError)
    second = model.generate(more, **OPTIONS, **{CACHE_NAME: first.past_key_values}, assistant_model=draft)
    assert torch.equal(second, model.generate(more, **OPTIONS, **{CACHE_NAME: stock.past_key_values}))


def random_chain(model, sequences):
    draft = random_tree(model, sequences)
    draft.chain = True
    return draft


def coupled_specattn(model, _):
    return SpecAttnDraftModel.from_target(model, acceptance="coupled")


DRAFTS = {"tree": random_tree, "chain": random_chain, "specattn": coupled_specattn}
EVEN, UNEVEN = (21, 21), (14, 21)


@pytest.mark.parametrize(
    ("name", "draft", "lengths"),
    [
        ("qwen2_vl", "specattn", UNEVEN),
        ("qwen2_5_vl", "tree", UNEVEN),
        ("qwen3_vl", "chain", EVEN),
        ("qwen3_5", "tree", EVEN),
        ("qwen3_5", "specattn", (17,)),
    ],
)
def test_positions_after_an_image(name, draft, lengths, models, monkeypatch):
    """M-RoPE: text goes on at the last position of the image. SpecAttn drafts what the target emits, positions too."""
    model, (input_ids, call) = models(name), with_grids(lengths)
    out, plain = check_image(model, DRAFTS[draft], input_ids, call)
    offsets, stats = model.model.rope_deltas, out.speculation
    assert offsets.flatten().tolist() == [-2, -3][: len(lengths)]
    # drafts after the last token are not verified, and rows end together
    assert stats.num_accepted_draft_tokens >= (0.9 * stats.num_draft_tokens if draft == "specattn" else 1)
    sampled = call | {"do_sample": True, "top_k": 40}
    texts = []
    for drafting in (PlainDraftModel.from_target(model), DRAFTS[draft](model, plain.sequences)):
        torch.manual_seed(5)
        texts.append(model.generate(input_ids, **sampled, assistant_model=drafting).sequences)
    assert torch.equal(*texts)
    assert torch.equal(model.model.rope_deltas, offsets)
    monkeypatch.setattr(SpeculativeCache, "position_ids", lambda self, places: places)
    unchecked = DRAFTS[draft](model, plain.sequences)
    unchecked.generation_config.check_target = False
    wrong = model.generate(input_ids, **call, assistant_model=unchecked)
    assert (wrong.logits[0] - plain.logits[0]).abs().max() > WRONG


@pytest.mark.parametrize(("name", "lengths"), [("qwen2_5_vl", UNEVEN), ("qwen3_5", EVEN)])
def test_second_turn_after_positions_of_an_image(name, lengths, models):
    model, (input_ids, call) = models(name), with_grids(lengths)
    first, stock = (
        model.generate(input_ids, **call, **how) for how in ({"assistant_model": random_tree(model, input_ids)}, {})
    )
    more = torch.cat([first.sequences, tiny_prompts(VOCAB_OF_TEXT, (5, 5))[0]], dim=1)
    mask = torch.cat([call["attention_mask"], torch.ones_like(more[:, input_ids.shape[1] :])], dim=1)
    again = OPTIONS | {"attention_mask": mask}
    plain = model.generate(more, **again, **{CACHE_NAME: stock.past_key_values})
    draft = random_tree(model, plain)
    assert torch.equal(
        model.generate(more, **again, **{CACHE_NAME: first.past_key_values}, assistant_model=draft), plain
    )
    assert draft.last_speculation.num_accepted_draft_tokens > 0


def prepared(self, *args, **kwargs):
    """The stock method under another name."""
    return GenerationMixin.prepare_inputs_for_generation(self, *args, **kwargs)


def test_images_whose_positions_are_not_served(models, monkeypatch):
    """Classes that prepare their own inputs may count on in another way; frequencies may change at a position."""
    model = models("qwen2_vl")
    check_unsupported(models("qwen3_5"), "different lengths.*recurrent states", *with_grids(UNEVEN))
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "prepare_inputs_for_generation", prepared)
        patch.setattr("hf_longspec.generation.call.foreign_methods", lambda model: [])  # as if of transformers
        check_unsupported(model, r"mm_token_type_ids.*M-RoPE.*Pass text only", *with_grids((17,)))
        later = OPTIONS | {"position_ids": torch.arange(9).repeat(4, 1, 1) + 3}
        check_unsupported(model, r"position_ids: .*M-RoPE.*new cache", tiny_prompts(VOCAB_OF_TEXT, (9,))[0], later)
    rotary = model.config.text_config.rope_parameters | {"rope_type": "dynamic", "factor": 2.0}
    monkeypatch.setattr(model.config.text_config, "rope_parameters", rotary)
    monkeypatch.setattr(model.model.language_model.rotary_emb, "rope_type", "dynamic")
    check_unsupported(model, "M-RoPE.*rotary frequencies that change", *with_grids((17,)))


def test_positions_that_the_user_gives(models):
    """Text has the same position on all axes, and a place in the text: anything else is no text."""
    model, (input_ids, call) = models("qwen2_vl"), with_grids((17,))
    positions = torch.arange(17).repeat(4, 1, 1)
    positions[1:] += 3
    text, other = input_ids.clamp_max(IMAGE_TOKEN - 1), OPTIONS | {"position_ids": positions}
    plain = model.generate(text, **other)
    assert torch.equal(model.generate(text, **other, assistant_model=random_tree(model, plain)), plain)
    positions = positions.clone()
    positions[1, :, -1] += 1
    with pytest.raises(ValueError, match="do not count the tokens"):
        model.generate(text, **OPTIONS, position_ids=positions, assistant_model=random_tree(model, plain))
    check_unsupported(model, "does not end with text", input_ids, call | {"position_ids": positions})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"prefill_chunk_size": 8}, r"prefill_chunk_size=8 .*Drop prefill_chunk_size"),
        ({"output_router_logits": True}, "output_router_logits: "),
        ({}, "the prompt of row 0 does not end with text: .*Add a token"),
    ],
    ids=["chunks", "every_forward", "no_text"],
)
def test_calls_with_images_that_are_refused(change, reason, models, monkeypatch):
    model = models("llava")
    monkeypatch.setattr(model, "_validate_model_kwargs", lambda kwargs: None)
    input_ids, call = with_image("llava", (19, 19), after=6 if change else 0)
    check_unsupported(model, reason, input_ids, call | change)


def test_padding_with_other_inputs_of_tokens(models, monkeypatch):
    """The loop moves tokens and their types to the other side of the padding, and cannot know what else to move."""
    model = models("llava")
    monkeypatch.setattr(model, "_validate_model_kwargs", lambda kwargs: None)
    input_ids, call = with_image("llava", (14, 21), after=6)
    call["segment_ids"] = torch.ones_like(input_ids)
    check_unsupported(model, r"segment_ids: .*padding", input_ids, call)
    input_ids, call = with_image("llava", (19, 19), after=6)
    check_image(model, random_tree, input_ids, call | {"segment_ids": torch.ones_like(input_ids)})


def test_a_decoder_without_an_embedding_for_each_token(models, monkeypatch):
    """As in models that shorten the prompt, or merge the image in a later layer."""
    model = models("llava")
    layers = model.get_decoder().layers
    monkeypatch.setattr(model, "get_decoder", lambda: layers[1])
    reason = "LlavaForConditionalGeneration does not get one embedding"
    check_unsupported(model, reason, *with_image("llava", (17,), after=6))


def test_an_image_that_text_sees_is_compared(models, monkeypatch):
    """If the prompt's end ran without what the first forward gave it, the check of the target would say so."""
    model = vision_language_model("gemma3")
    after(monkeypatch, Prompts, "prefill", lambda _, own, *__: setattr(own, "logits", own.logits.flip(-1)))
    with pytest.raises(ValueError, match="cannot be verified"):
        check_image(model, random_tree, *with_image("gemma3", (17,), after=6))
