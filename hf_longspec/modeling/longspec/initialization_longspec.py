"""First weights of a LongSpec block, copied from layers of its target instead of drawn at random.

The self-attention reads embeddings, and is copied from the first layer of the kind of the KV layer. The queries of the
cross-attention look for keys of the KV layer, and are copied from it. The SwiGLU is that of the last layer. What these
two add is made small, as the target has a norm before its head and the draft has none.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ...generation.target_modules import attention_layers, attention_of, decoder_of, final_norm_of, layer_at

logger = logging.get_logger(__name__)

# About what the final norm multiplies the sum of all layers by: 1/20 for SmolLM2-135M, 1/23 for the bundled target.
# After 100 steps of 1,024 tokens the loss of a draft of the bundled target was 0.80, without the factor 1.65, and 1.38
# with random weights.
OUTPUT_SCALE = 0.05
# Names of the norm before a feed-forward layer, the most specific first.
FEED_FORWARD_NORMS = ("pre_feedforward_layernorm", "post_attention_layernorm")


@torch.no_grad()
def copy_layers(block: Any, target: PreTrainedModel, kv_layer: int) -> None:
    """Copy what layers of the target have in the shapes of the block; the rest keeps its weights.

    Raises:
        ValueError: If nothing can be copied, for example from quantized weights.
    """
    config, decoder, norm = target.config.get_text_config(decoder=True), decoder_of(target), final_norm_of(target)
    kinds, scale = getattr(config, "layer_types", None), torch.ones(config.hidden_size)
    if getattr(norm, "weight", None) is not None:
        scale = _scale_of(norm).cpu().float()
    scale = OUTPUT_SCALE * scale / scale.abs().mean()
    first = min(layer for layer in attention_layers(decoder) if not kinds or kinds[layer] == kinds[kv_layer])
    copied = _copy_attention(block.self_attn, block.input_layernorm, target, first, torch.ones(()))
    if block.cross_attn is not None:
        copied += _copy_attention(block.cross_attn, block.post_self_attention_layernorm, target, kv_layer, scale)
    last = layer_at(target, config.num_hidden_layers - 1)
    if _copy(block.mlp, getattr(last, "mlp", None), "down_proj", scale):
        copied += 1
        norms = (getattr(last, name, None) for name in FEED_FORWARD_NORMS)
        _copy_norm(block.post_cross_attention_layernorm, next((norm for norm in norms if norm is not None), None))
    if not copied:
        raise ValueError(
            f"init_from_target=True: no layer of {type(target).__name__} has linear layers of the draft's shapes, in "
            "floating point and under the usual names, such as q_proj. Leave it out."
        )
    logger.info("%d of the draft's sub-layers begin with weights of the target.", copied)


def _copy_attention(own: Any, own_norm: nn.RMSNorm, target: PreTrainedModel, layer: int, scale: torch.Tensor) -> int:
    attention = attention_of(decoder_of(target), layer)
    if not _copy(own, attention, "o_proj", scale):
        return 0
    for name in ("q", "k"):
        weight = getattr(norm := getattr(attention, f"{name}_norm", None), "weight", None)
        if hasattr(own, f"{name}_proj") and weight is not None and weight.dim() == 1:
            _fold_norm(getattr(own, f"{name}_proj"), norm)
    _copy_norm(own_norm, getattr(layer_at(target, layer), "input_layernorm", None))
    return 1


def _copy(own: nn.Module, other: Any, output: str, scale: torch.Tensor) -> bool:
    """Copy all linear layers of a sub-layer, the outputs of `output` times `scale`; none if one does not fit."""
    pairs = [(name, layer, getattr(other, name, None)) for name, layer in own.named_children() if name.endswith("proj")]
    if not all(_fits(layer, source) for _, layer, source in pairs):
        return False
    for name, layer, source in pairs:
        assert isinstance(layer, nn.Linear) and isinstance(source, nn.Linear)
        layer.weight.copy_(source.weight)
        if name == output:
            layer.weight.mul_(scale.to(layer.weight)[..., None])
        if layer.bias is not None and source.bias is not None:
            layer.bias.copy_(source.bias)
    return True


def _fits(layer: Any, source: Any) -> bool:
    weight: Any = getattr(source, "weight", None)
    if not isinstance(source, nn.Linear) or weight.is_meta or hasattr(weight, "placements"):
        return False
    return bool(weight.shape == layer.weight.shape and weight.dtype in (torch.float32, torch.bfloat16, torch.float16))


def _copy_norm(own: nn.RMSNorm, norm: Any) -> None:
    """Copy what a norm multiplies by, if there is one: its weight, or 1 plus its weight."""
    if getattr(norm, "weight", None) is not None:
        own.weight.copy_(_scale_of(norm))


def _scale_of(norm: Any) -> torch.Tensor:
    """Return what a norm multiplies each value by."""
    signs = 1 - 2 * (
        torch.arange(len(norm.weight), device=norm.weight.device) % 2
    )  # their mean is 0, that of squares 1
    signs = signs.to(norm.weight.dtype)
    return (norm(signs) - norm(-signs)) / 2 * signs


def _fold_norm(projection: nn.Linear, norm: Any) -> None:
    """Scale a projection as a norm of its outputs, such as those of a head, does for inputs with a mean square of 1."""
    groups = projection.weight.unflatten(0, (-1, len(norm.weight)))
    size = groups.pow(2).sum(-1).mean(-1).sqrt()[:, None, None]
    projection.weight.copy_((groups / size * _scale_of(norm).to(groups)[:, None]).flatten(0, 1))


def has_biases(target: PreTrainedModel) -> bool:
    """Return whether the query projections of the target have biases."""
    projections = (getattr(layer, "q_proj", None) for layer in attention_layers(target).values())
    return any(getattr(projection, "bias", None) is not None for projection in projections)
