"""The tiny targets are what their names say: they build, depend on their context, and batch exactly."""

import pytest
import torch

from tests.tiny_targets import (
    BOS_TOKEN_ID,
    EOS_TOKEN_ID,
    LOGIT_STD,
    NUM_SPECIAL_TOKENS,
    PAD_TOKEN_ID,
    TINY_TARGETS,
    WINDOW,
    tiny_prompts,
    tiny_target,
)

NUM_NEW_TOKENS = 14
LENGTHS = (9, 40, 23)  # below and above the window

# A feature that is switched off moves the last logits by at least this share of their norm. The weakest one here,
# the final softcap, was seen at 0.03; a feature that is not computed at all gives 0.
VISIBLE = 0.01


def last_logits(model, input_ids):
    with torch.no_grad():
        return model(input_ids).logits[0, -1]


def relative_change(changed, original):
    return ((changed - original).norm() / original.norm()).item()


@pytest.mark.parametrize("name", TINY_TARGETS)
def test_every_target_is_small_varied_and_does_not_feel_padding(name):
    model = tiny_target(name)
    config = model.config
    assert config.model_type.removesuffix("_text") == name
    assert 2 <= config.num_hidden_layers <= 4
    assert name == "deepseek_v3" or config.num_attention_heads // config.num_key_value_heads >= 2
    special = (config.pad_token_id, config.bos_token_id, config.eos_token_id)
    assert special == (PAD_TOKEN_ID, BOS_TOKEN_ID, EOS_TOKEN_ID)
    if getattr(config, "sliding_window", None) is not None:
        assert config.sliding_window == WINDOW < max(LENGTHS)
    with torch.no_grad():
        logits = model(tiny_prompts(config.vocab_size, [64], seed=1)[0]).logits[0]
    assert 0.5 * LOGIT_STD < logits.std() < 1.5 * LOGIT_STD
    assert logits.argmax(-1).unique().numel() >= 16
    input_ids, mask = tiny_prompts(config.vocab_size, LENGTHS)
    options = {"max_new_tokens": NUM_NEW_TOKENS, "min_new_tokens": NUM_NEW_TOKENS, "do_sample": False}
    batch = model.generate(input_ids=input_ids, attention_mask=mask, **options)[:, max(LENGTHS) :]
    for row, length in enumerate(LENGTHS):
        alone = {"input_ids": input_ids[row : row + 1, -length:], "attention_mask": mask[row : row + 1, -length:]}
        single = model.generate(**alone, **options)[0, length:].tolist()
        assert batch[row].tolist() == single and len(set(single)) >= 5


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3", "gpt_oss", "cohere2"])
def test_the_window_is_felt(name):
    windowed, unbounded = tiny_target(name), tiny_target(name, sliding_window=4096)
    unbounded.load_state_dict(windowed.state_dict())
    input_ids, _ = tiny_prompts(windowed.config.vocab_size, [3 * WINDOW])
    original, changed = last_logits(windowed, input_ids), last_logits(unbounded, input_ids)
    assert relative_change(changed, original) > VISIBLE
    short = input_ids[:, : WINDOW - 1]
    torch.testing.assert_close(last_logits(unbounded, short), last_logits(windowed, short))


@pytest.mark.parametrize("setting", ["attn_logit_softcapping", "final_logit_softcapping"])
def test_the_softcaps_are_felt(setting):
    capped, uncapped = tiny_target("gemma2"), tiny_target("gemma2", **{setting: None})
    uncapped.load_state_dict(capped.state_dict())
    input_ids, _ = tiny_prompts(capped.config.vocab_size, [40])
    assert relative_change(last_logits(uncapped, input_ids), last_logits(capped, input_ids)) > VISIBLE


def test_the_sinks_are_felt():
    model = tiny_target("gpt_oss")
    input_ids, _ = tiny_prompts(model.config.vocab_size, [40])
    original = last_logits(model, input_ids)
    for layer in model.model.layers:
        layer.self_attn.sinks.data.fill_(-torch.inf)
    assert relative_change(last_logits(model, input_ids), original) > VISIBLE


def test_same_seed_same_weights_and_the_global_random_state_is_left_alone():
    before = torch.get_rng_state()
    first, again, other = tiny_target("qwen3"), tiny_target("qwen3"), tiny_target("qwen3", seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert tiny_target("qwen3", dtype=torch.bfloat16).dtype == torch.bfloat16
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name])
        assert not torch.equal(weight, other.state_dict()[name])


def test_prompts_are_left_padded_and_rows_do_not_depend_on_the_batch():
    input_ids, attention_mask = tiny_prompts(50, [3, 7], seed=5)
    assert input_ids.shape == attention_mask.shape == (2, 7)
    assert attention_mask.sum(1).tolist() == [3, 7]
    assert input_ids[0, :4].tolist() == [PAD_TOKEN_ID] * 4
    assert input_ids[attention_mask.bool()].min() >= NUM_SPECIAL_TOKENS
    assert input_ids.max() < 50
    alone, _ = tiny_prompts(50, [3], seed=5)
    assert torch.equal(alone[0], input_ids[0, 4:])
    assert not torch.equal(tiny_prompts(50, [7], seed=6)[0], tiny_prompts(50, [7], seed=5)[0])


@pytest.mark.parametrize(("vocab_size", "lengths"), [(50, []), (50, [3, 0]), (3, [4])])
def test_impossible_prompts_and_targets_are_refused(vocab_size, lengths):
    with pytest.raises(ValueError, match="expected"):
        tiny_prompts(vocab_size, lengths)
    with pytest.raises(ValueError, match=r"'gpt2'.* llama"):
        tiny_target("gpt2")
