"""States of the target against its own forward under an explicit causal mask."""

import pytest
import torch
from transformers import DynamicCache

from hf_longspec.generation.target_parts import TargetParts
from hf_longspec.testing import EOS_TOKEN_ID, tiny_prompts, tiny_target
from hf_longspec.training.positions import anchor_offset_positions
from hf_longspec.training.target_pass import TargetPass

LENGTH = 37
# Keys and hidden states of size 1 to 10 in float32, from attention that sums in another order.
TOLERANCE = 2e-4
# plain, windowed layers with a softcap, and layers without rotation
TARGETS = ["llama", "gemma2", "cohere2", "qwen3"]


def explicit(target, tokens, positions, layer):
    """Keys, values and hidden states under a 4-D mask that leaves transformers nothing to guess."""
    place = torch.arange(tokens.shape[1])
    causal = place[:, None] >= place
    masks = {}
    for kind in set(getattr(target.config, "layer_types", None) or ["full_attention"]):
        seen = causal
        if kind == "sliding_attention":
            seen = causal & (place[:, None] - place < target.config.sliding_window)
        masks[kind] = torch.zeros(1, 1, *seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    mask = masks if len(masks) > 1 else next(iter(masks.values()))
    cache = DynamicCache()
    hidden = target.model(
        input_ids=tokens, position_ids=positions, attention_mask=mask, past_key_values=cache
    ).last_hidden_state
    return cache.layers[layer].keys, cache.layers[layer].values, hidden


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("chunk_size", [None, 10])
def test_positions_with_a_jump_are_one_text(name, chunk_size):
    target = tiny_target(name)
    tokens, _ = tiny_prompts(target.config.vocab_size, [LENGTH] * 2)
    tokens[:, 20] = EOS_TOKEN_ID  # two documents, the second of which sees the first
    positions = anchor_offset_positions(LENGTH, [0, 2000], anchors=4)
    parts = TargetParts(target, 1)
    states = TargetPass(parts, chunk_size, hidden=True)(tokens, positions)
    keys, values, hidden = explicit(target, tokens, positions, 1)
    torch.testing.assert_close(states.keys, keys, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(states.values, values, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(states.hidden, hidden, rtol=TOLERANCE, atol=TOLERANCE)
    logits = target(input_ids=tokens, position_ids=positions, past_key_values=DynamicCache()).logits
    torch.testing.assert_close(parts.head(states.hidden), logits, rtol=TOLERANCE, atol=TOLERANCE)


def test_without_a_cache_transformers_cuts_the_text_at_the_jump():
    """Why a cache is always passed: the comparison above would notice."""
    target = tiny_target("llama")
    tokens, _ = tiny_prompts(target.config.vocab_size, [LENGTH])
    positions = anchor_offset_positions(LENGTH, [2000], anchors=4)
    hidden = explicit(target, tokens, positions, 1)[2]
    cut = target.model(input_ids=tokens, position_ids=positions, use_cache=False).last_hidden_state
    assert (cut - hidden).abs().max() > 100 * TOLERANCE


def test_padding_on_the_right_changes_nothing_before_it():
    target = tiny_target("llama")
    tokens, _ = tiny_prompts(target.config.vocab_size, [LENGTH])
    positions = anchor_offset_positions(LENGTH, [9], anchors=4)
    run = TargetPass(TargetParts(target, 2), hidden=True)
    whole, short = run(tokens, positions), run(tokens[:, :20], positions[:, :20])
    torch.testing.assert_close(whole.keys[:, :, :20], short.keys, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(whole.hidden[:, :20], short.hidden, rtol=TOLERANCE, atol=TOLERANCE)


def test_hidden_states_are_kept_only_if_wanted_and_nothing_requires_a_gradient():
    target = tiny_target("llama")
    tokens, _ = tiny_prompts(target.config.vocab_size, [11])
    states = TargetPass(TargetParts(target, 0))(tokens, torch.arange(11)[None])
    assert states.hidden is None
    assert not states.keys.requires_grad and not states.values.requires_grad
