"""Other ways to compute the same attention, which our kernels are compared with.

A baseline that is not installed, or does not run on the device, raises [`Skip`], which becomes a `skipped` line.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from benchmarks.gpu_device import Skip
from benchmarks.random_inputs import DeviceAttention, Layer
from hf_longspec.attention_backends.merge import AttentionState, merge_attention_states
from hf_longspec.attention_backends.torch_backend import tree_attention
from hf_longspec.attention_backends.torch_fused import one_head, pack, unpack

FLEX_NODES = 17

Attend = Callable[[Layer], torch.Tensor]


class NotInstalled(Skip):
    """The package of a baseline is missing; reported once."""


# Computes less than the others, and so is a bound instead of a competitor.
LOWER_BOUND = "flash, no mask (lower bound)"


def hf_masked(case: DeviceAttention) -> Attend:
    """Transformers' `sdpa`: keys repeated for every query head, under a 4-D mask; for a lone node without one."""
    group = case.heads // case.layers[0][0].shape[1]
    module: Any = SimpleNamespace(num_key_value_groups=group, is_causal=False, training=False)
    mask = None if case.tree.num_nodes == 1 else block_mask(case)

    def attend(layer: Layer) -> torch.Tensor:
        keys, values = _written(case, layer)
        out = sdpa_attention_forward(module, case.query, keys, values, mask, scaling=case.scaling)[0]
        return out.transpose(1, 2)

    return attend


def flash_and_tree(case: DeviceAttention) -> Attend:
    """Torch's flash kernel on the prefix, plain products on the tree, merged."""

    def attend(layer: Layer) -> torch.Tensor:
        prefix = flash(case.query, *_prefix(case, layer), case.scaling)
        return merge_attention_states([prefix, _tree(case, layer)])[0]

    return attend


def packed_flash_and_tree(case: DeviceAttention) -> Attend:
    """The same with the query heads of a group packed into rows, so that keys are read once for all of them."""

    def attend(layer: Layer) -> torch.Tensor:
        keys, values = (one_head(part, 0, case.lengths[0]) for part in layer)
        packed = flash(pack(case.query, layer[0].shape[1]), keys, values, case.scaling)
        return merge_attention_states([unpack(packed, case.query.shape), _tree(case, layer)])[0]

    return attend


def flash_only(case: DeviceAttention) -> Attend:
    """Torch's fused attention to all slots without any mask."""

    def attend(layer: Layer) -> torch.Tensor:
        keys, values = _written(case, layer)
        return scaled_dot_product_attention(case.query, keys, values, scale=case.scaling, enable_gqa=True)

    return attend


def compiled_flex(case: DeviceAttention) -> Attend:
    """Torch's flex_attention under a block mask; compiled on a GPU, as it is meant to be used."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    length, mask, nodes = case.lengths[0], case.tree.mask[0], case.tree.num_nodes
    device = case.query.device
    if device.type == "cuda" and (nodes != FLEX_NODES or len(case.lengths) > 1):
        raise Skip(f"compiled anew for every case, which takes long: timed for {FLEX_NODES} nodes and one row")

    def visible(batch: Any, head: Any, node: Any, slot: Any) -> Any:
        return (slot < length) | mask[node, (slot - length).clamp(0, nodes - 1)]

    blocks = create_block_mask(visible, None, None, nodes, length + nodes, device=str(device))
    function = torch.compile(flex_attention, dynamic=False) if device.type == "cuda" else flex_attention

    def attend(layer: Layer) -> torch.Tensor:
        keys, values = _written(case, layer)
        out: Any = function(case.query, keys, values, block_mask=blocks, scale=case.scaling, enable_gqa=True)
        return out

    return attend


def flashinfer_masked(case: DeviceAttention) -> Attend:
    """FlashInfer's prefill kernel with a custom mask; it takes one row at a time."""
    try:
        import flashinfer
    except ImportError as error:
        raise NotInstalled("flashinfer is not installed") from error
    if len(case.lengths) > 1:
        raise Skip("flashinfer's custom mask is for a single row")
    mask = block_mask(case)[0, 0].contiguous()
    query = case.query[0].transpose(0, 1).contiguous()

    def attend(layer: Layer) -> torch.Tensor:
        keys, values = (part[0] for part in _written(case, layer))
        out = flashinfer.single_prefill_with_kv_cache(
            query, keys, values, custom_mask=mask, kv_layout="HND", sm_scale=case.scaling
        )
        found: torch.Tensor = out.transpose(0, 1)[None]
        return found

    return attend


def xformers_tree(case: DeviceAttention) -> Attend:
    """xformers' tree attention: the same split into prefix and tree, with its own kernels."""
    try:
        from xformers.ops.fmha.attn_bias import BlockDiagonalPaddedKeysMask
        from xformers.ops.tree_attention import tree_attention as xformers_attention
    except ImportError as error:
        raise NotInstalled("xformers is not installed") from error
    nodes, kv_heads = case.tree.num_nodes, case.layers[0][0].shape[1]
    own = torch.zeros(nodes, nodes, device=case.query.device, dtype=case.query.dtype)
    own.masked_fill_(~case.tree.mask[0], -torch.inf)
    batch, heads = case.query.shape[:2]
    sizes = {"q_seqlen": [nodes] * batch, "kv_seqlen": list(case.lengths)}
    before = BlockDiagonalPaddedKeysMask.from_seqlens(**sizes, kv_padding=case.lengths[0])
    query = case.query.transpose(1, 2).unflatten(2, (kv_heads, heads // kv_heads))

    def heads_last(part: torch.Tensor) -> torch.Tensor:
        return part.transpose(1, 2)[:, :, :, None].expand(-1, -1, -1, heads // kv_heads, -1)

    def attend(layer: Layer) -> torch.Tensor:
        cached, staged = _prefix(case, layer), _nodes(case, layer)
        out = xformers_attention(query, *map(heads_last, staged), *map(heads_last, cached), own, before)
        found: torch.Tensor = out.flatten(2, 3).transpose(1, 2)
        return found

    return attend


BASELINES: dict[str, Callable[[DeviceAttention], Attend]] = {
    "transformers sdpa, repeated keys and mask": hf_masked,
    "torch flash + tree": flash_and_tree,
    "torch flash, packed + tree": packed_flash_and_tree,
    LOWER_BOUND: flash_only,
    "flex_attention": compiled_flex,
    "flashinfer": flashinfer_masked,
    "xformers tree attention": xformers_tree,
}


def flash(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> AttentionState:
    """Torch's flash kernel over all keys, `(B, H, N, D)` and `(B, K, S, D)`, with its log-sum-exp."""
    if query.device.type == "cpu":
        state: AttentionState = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, 0.0, False, scale=scaling
        )
        return state
    inputs = (part.transpose(1, 2) for part in (query, keys, values))
    lengths = query.shape[2], keys.shape[2]
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *inputs, None, None, *lengths, 0.0, False, False, scale=scaling
    )
    return out.transpose(1, 2), lse


def block_mask(case: DeviceAttention) -> torch.Tensor:
    """`(B, 1, N, prefix + N)`, for rows of one length."""
    batch, nodes = len(case.lengths), case.tree.num_nodes
    seen = torch.ones(batch, nodes, case.lengths[0], dtype=torch.bool, device=case.query.device)
    return torch.cat([seen, case.tree.mask], dim=2)[:, None]


def _tree(case: DeviceAttention, layer: Layer) -> AttentionState:
    return tree_attention(case.query, *_nodes(case, layer), case.tree.mask, scaling=case.scaling)


def _written(case: DeviceAttention, layer: Layer) -> Layer:
    return layer[0][:, :, : case.end], layer[1][:, :, : case.end]


def _prefix(case: DeviceAttention, layer: Layer) -> Layer:
    return layer[0][:, :, : case.lengths[0]], layer[1][:, :, : case.lengths[0]]


def _nodes(case: DeviceAttention, layer: Layer) -> Layer:
    return layer[0][:, :, case.lengths[0] : case.end], layer[1][:, :, case.lengths[0] : case.end]
