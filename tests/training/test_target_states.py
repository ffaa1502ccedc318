"""States of the target against its own forward, and files of states: completed, refused, read."""

import pytest
import torch
from transformers import DynamicCache

from hf_longspec.generation.cache import CACHE_NAME
from hf_longspec.generation.target_modules import LayerInputs, TargetParts, last_full_layer
from hf_longspec.training.row_noise import anchor_offset_positions
from hf_longspec.training.target_states import TargetPass
from tests.generation.tiny_models import ATTENTION
from tests.robustness.enumeration import build
from tests.robustness.shrunk_configs import VOCAB_SIZE
from tests.rounding import rounding
from tests.tiny_targets import EOS_TOKEN_ID, tiny_prompts, tiny_target

LENGTH = 37
LAYERS = 3  # of gemma3; the others have two


def close(found, expected):
    torch.testing.assert_close(found, expected, **rounding(expected, layers=LAYERS))


def explicit(target, tokens, positions, layer):
    """Keys, values and hidden states under an explicit 4-D mask."""
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
        input_ids=tokens, position_ids=positions, attention_mask=mask, **{CACHE_NAME: cache}
    ).last_hidden_state
    return cache.layers[layer].keys, cache.layers[layer].values, hidden


# plain, windowed layers with a softcap, layers without rotation, and sinks
@pytest.mark.parametrize(("name", "chunk_size"), [("llama", 10), ("gemma2", 10), ("cohere2", None), ("gpt_oss", 10)])
def test_positions_with_a_jump_are_one_text(name, chunk_size):
    target = tiny_target(name)
    tokens, _ = tiny_prompts(target.config.vocab_size, [LENGTH] * 2)
    tokens[:, 20] = EOS_TOKEN_ID  # two documents; the second attends to the first
    positions = anchor_offset_positions(LENGTH, [0, 2000], anchors=4)
    states = TargetPass(target, chunk_size, None, 1)(tokens, positions)
    keys, values, hidden = explicit(target, tokens, positions, 1)
    close(states.keys, keys)
    close(states.values, values)
    close(states.hidden, hidden)
    assert not (states.keys.requires_grad or states.values.requires_grad or states.hidden.requires_grad)
    logits = target(input_ids=tokens, position_ids=positions, **{CACHE_NAME: DynamicCache()}).logits
    close(TargetParts(target, 1).head(states.hidden), logits)


@pytest.mark.parametrize(("name", "chunk_size"), [("qwen3_5_text", None), ("qwen3_5_text", 10), ("falcon_h1", None)])
def test_states_of_targets_with_recurrent_layers(name, chunk_size):
    target, layer = build(name), 3
    tokens, _ = tiny_prompts(VOCAB_SIZE - 1, [LENGTH] * 2)
    assert last_full_layer(target.config) == layer
    states = TargetPass(target, chunk_size, None, layer)(tokens)
    cache = DynamicCache(config=target.config)
    with torch.no_grad(), LayerInputs(target, True) as caught:
        hidden = target.model(input_ids=tokens, **{CACHE_NAME: cache}).last_hidden_state
    close(TargetPass(target, chunk_size)(tokens).hidden, caught.hidden)
    close(states.keys, cache.layers[layer].keys)
    close(states.values, cache.layers[layer].values)
    close(states.hidden, hidden)


@pytest.mark.parametrize(("name", "chunk_size"), [*((name, 10) for name in ATTENTION), ("deepseek_v3", None)])
def test_hidden_states_are_the_input_of_the_norm(name, chunk_size):
    target = tiny_target(name)
    tokens, _ = tiny_prompts(target.config.vocab_size, [LENGTH] * 2)
    tokens[:, 20] = EOS_TOKEN_ID  # two documents; the second attends to the first
    with torch.no_grad(), LayerInputs(target, True) as caught:
        target(tokens)
    found = TargetPass(target, chunk_size)(tokens)
    close(found.hidden, caught.hidden)
    assert found.keys is None and not found.hidden.requires_grad


def test_layers_that_forget_the_chunk_before_run_whole_rows():
    with pytest.raises(ValueError, match="target_chunk_size=10: the Mamba-1 layers of JambaForCausalLM begin anew"):
        TargetPass(build("jamba"), 10)


def test_a_store_is_completed_after_an_interruption_and_refused_with_other_facts(make_trainer, tokens, heads, tmp_path):
    rows = [{"input_ids": tokens[start : start + length]} for start, length in ((0, 33), (50, 20), (100, 9))]
    folder, settings = tmp_path / "kv", {"target_kv_dir": str(tmp_path / "kv"), "max_steps": 1}
    make_trainer(dataset=rows, **settings).train()
    kept, lost = folder / "row-00000000.safetensors", folder / "row-00000001.safetensors"
    content, written = lost.read_bytes(), kept.stat().st_mtime_ns
    lost.unlink()
    make_trainer(dataset=rows, **settings).train()
    assert lost.read_bytes() == content
    assert kept.stat().st_mtime_ns == written
    others = [{"input_ids": row["input_ids"] + 1} for row in rows]
    for name, dataset, change in (
        ("loss", rows, {"loss": "ce"}),
        ("anchors", rows, {"anchors": 2}),
        ("first_row", others, {}),
        ("num_rows", rows[:2], {}),
        ("states", rows, {"model": heads}),
    ):
        with pytest.raises(ValueError, match=f"target_kv_dir=.* {name}="):
            make_trainer(dataset=dataset, **settings, **change).train()
