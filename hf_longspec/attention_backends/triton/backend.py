"""The backend of Triton kernels for CUDA: `hf_longspec_triton`, if triton is installed.

A step is two launches per layer for any batch size: splits of the prefix with the tree, and one pass that merges them.
A third one sums scores where they are asked for. None reads a number back from the device.
"""

from typing import Any

import torch

from ..lengths import SeqLens
from ..registry import AttentionBackend, AttentionCall, AttentionState, register_backend, why_not_dtype
from ..torch_backend import causal_attention, short_buffer, with_unit_stride
from .config import INTERPRETED, largest_rows
from .launch import DTYPES, gpu_of, hybrid_op, scored_op, tree_op, why_not_device

MAX_SIZE = 256


def prefix_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: SeqLens,
    *,
    scaling: float,
    positions: torch.Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> AttentionState:
    """Attend N queries to the committed prefix. Lengths are read on the device."""
    inputs = _inputs(query, key, value, lengths, None, positions, sliding_window)
    return hybrid_op(*inputs, None, None, scaling, sliding_window, softcap)


def hybrid_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: SeqLens,
    mask: torch.Tensor,
    positions: torch.Tensor,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    memo: dict[Any, Any] | None = None,
) -> AttentionState:
    """Attend N staged nodes to the prefix and each other; see torch_backend.py. Lengths are read on the device."""
    inputs = _inputs(query, key, value, lengths, mask, positions, sliding_window)
    return hybrid_op(*inputs, mask, sinks, scaling, sliding_window, softcap)


def attention_with_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: SeqLens,
    last_node: torch.Tensor,
    *,
    scaling: float,
    mask: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    weights: bool = False,
    per_layer: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Attend as above, and compute the scores that SpecAttn selects by from the same pass over the keys.

    Args:
        last_node (`torch.LongTensor` of shape `(B,)`): Index of every row's last node.
        mask (`torch.BoolTensor` of shape `(B, N, N)`, *optional*): With it, the staged nodes are attended to as well.
        weights (`bool`, *optional*, defaults to `False`): Attention probabilities instead of products.
        per_layer (`bool`, *optional*, defaults to `False`): The sum over all key heads.

    Returns:
        `(out, lse, scores)`; float32 scores `(B, K, S)`, `(B, 1, S)` with `per_layer`, for the slots below
        `lengths[b]`, whether a window hides them or not; what is after them is arbitrary. By default `q . k` summed
        over node 0, the last node and the group's heads: Eq. 3 of the paper, [`ScoreCapture`]'s `score="logits"`. With
        `weights`, the same sum of attention probabilities.

        None if a group has more than 32 heads (16 with vectors above 128, 8 in float32), because both nodes have to fit
        in one program.
    """
    groups = query.shape[1] // key.shape[1]
    if 2 * groups > largest_rows(query.shape[3], value.shape[3], query.element_size(), gpu_of(query.device)):
        return None
    inputs = _inputs(query, key, value, lengths, mask, positions, sliding_window)
    last_node = last_node.to(query.device)
    return scored_op(*inputs, mask, sinks, last_node, scaling, sliding_window, softcap, weights, per_layer)


def why_not(call: AttentionCall) -> str | None:
    """Return None, or the reason for refusing: the dtype, a vector above 256 numbers, or the device."""
    if (reason := why_not_dtype(call, DTYPES)) is not None:
        return reason
    if max(call.head_dim, call.value_dim) > MAX_SIZE:
        return f"head_dim is {call.head_dim} and value_dim {call.value_dim}, expected at most {MAX_SIZE}"
    return why_not_device(call.device)


def _inputs(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: SeqLens,
    mask: torch.Tensor | None,
    positions: torch.Tensor | None,
    sliding_window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return queries, keys, values, lengths and positions as the kernels read them."""
    if lengths.longest is not None:
        stop = lengths.longest + (0 if mask is None else mask.shape[-1])
        if stop > key.shape[2]:
            raise short_buffer(0, stop, key.shape[2])
    positions = None if sliding_window is None or positions is None else positions.contiguous()
    query, key, value = with_unit_stride(query, key, value)
    return query, key, value, lengths.on(query.device).contiguous(), positions


# Above the torch backend where it runs compiled; interpreted, in tests, only for those who ask for it by name.
TRITON_BACKEND = register_backend(
    AttentionBackend(
        name="hf_longspec_triton",
        prefix_attention=prefix_attention,
        tree_attention=tree_op,
        causal_attention=causal_attention,
        why_not=why_not,
        hybrid_attention=hybrid_attention,
        attention_with_scores=attention_with_scores,
    ),
    priority=None if INTERPRETED else 20,
)
