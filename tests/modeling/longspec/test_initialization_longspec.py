"""First weights that are copied from the target: each sub-layer computes what that of the target does."""

import pytest
import torch
from torch.testing import assert_close

from hf_longspec import LongSpecDraftModel
from hf_longspec.modeling.longspec.initialization_longspec import OUTPUT_SCALE
from tests.tiny_targets import tiny_target

FEED_FORWARD_NORMS = {"llama": "post_attention_layernorm", "gemma2": "pre_feedforward_layernorm"}


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen2"])
def test_sublayers_compute_what_those_of_the_target_do(name):
    """The norms of gemma2 multiply by 1 plus their weight, and the projections of qwen2 have biases."""
    target = tiny_target(name)
    draft = LongSpecDraftModel.from_target(target, init_from_target=True)
    block, layers = draft.block, target.model.layers
    first, read, last = layers[0], layers[draft.config.kv_layer], layers[-1]
    if name == "gemma2":  # whose layers with a window are not those that the draft reads
        first = next(layer for layer, kind in zip(layers, target.config.layer_types, strict=True) if "full" in kind)
    states = torch.randn(2, 5, target.config.hidden_size)
    with torch.no_grad():
        normed, of_target = block.input_layernorm(states), first.input_layernorm(states)
        for projection in ("q_proj", "k_proj", "v_proj"):
            own, other = getattr(block.self_attn, projection), getattr(first.self_attn, projection)
            assert_close(own(normed), other(of_target))
        query = block.cross_attn.q_proj(block.post_self_attention_layernorm(states))
        assert_close(query, read.self_attn.q_proj(read.input_layernorm(states)))
        heads = torch.randn(2, 5, first.self_attn.o_proj.in_features)
        assert_close(block.self_attn.o_proj(heads), first.self_attn.o_proj(heads))
        weight = target.model.norm.weight + (name == "gemma2")
        scale = OUTPUT_SCALE * weight / weight.abs().mean()
        assert_close(block.cross_attn.o_proj(heads), scale * read.self_attn.o_proj(heads))
        norm = getattr(last, FEED_FORWARD_NORMS.get(name, "post_attention_layernorm"))
        fed = block.mlp(block.post_cross_attention_layernorm(states))
        assert_close(fed, scale * last.mlp(norm(states)))


def test_norms_of_heads_become_part_of_the_projections():
    """On inputs with a mean square of 1, the heads of queries and keys have the size that the norm of qwen3 gives."""
    target = tiny_target("qwen3")
    draft = LongSpecDraftModel.from_target(target, init_from_target=True)
    states = torch.nn.functional.rms_norm(torch.randn(4000, target.config.hidden_size), [target.config.hidden_size])
    attention, own = target.model.layers[0].self_attn, draft.block.self_attn
    with torch.no_grad():
        for projection, own_projection, norm in (
            (attention.q_proj, own.q_proj, attention.q_norm),
            (attention.k_proj, own.k_proj, attention.k_norm),
        ):
            heads, own_heads = (
                layer(states).unflatten(-1, (-1, own.head_dim)) for layer in (projection, own_projection)
            )
            assert_close(own_heads.pow(2).mean(), norm(heads).pow(2).mean(), rtol=0.1, atol=0)
            assert torch.cosine_similarity(norm(heads), own_heads, dim=-1).min() > 0.999


def test_a_target_without_such_layers_is_refused():
    with pytest.raises(ValueError, match="init_from_target=True: no layer of Phi3ForCausalLM"):
        LongSpecDraftModel.from_target(tiny_target("phi3"), init_from_target=True)
