# Published with a draft by hf_longspec, Apache-2.0.
"""Hybrid tree attention on CPU in as few calls of torch as possible: on a small model they are what a step costs.

Up to DENSE_KEYS keys, prefix and tree together are one call with a mask; beyond, the prefix is one without. What a mask
needs is computed once per step and kept in `memo`.
"""

from typing import Any

import torch

from .attention_backends_masks import PositionMask, additive_mask
from .attention_backends_merge import AttentionState, merge_attention_states
from .attention_backends_slots import shared_length, window_holds_all
from .attention_backends_torch_fused import fused_attention
from .attention_backends_torch_packed import one_head, pack, pack_mask, unpack

# One masked call against two calls and a merge, 5 nodes, H=8, K=2, D=32, float32: 146 against 168 microseconds at 1,024
# keys, 456 against 461 at 4,096, 2,151 against 1,985 at 16,384.
DENSE_KEYS = 4096


def hybrid_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
    *,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    host_lengths: tuple[int, ...] | None,
    memo: dict[Any, Any],
) -> AttentionState | None:
    """Attention of N staged nodes to the prefix and to each other.

    Args:
        query (`torch.Tensor` of shape `(B, H, N, D)`): Queries of the nodes.
        key (`torch.Tensor` of shape `(B, K, S, D)`): Prefix in the slots below `lengths[b]`, nodes from there on.
        value (`torch.Tensor` of shape `(B, K, S, Dv)`): Likewise.
        mask (`torch.BoolTensor` of shape `(B, N, N)`): Tree mask, the window included.
        positions (`torch.LongTensor` of shape `(B, N)`): Absolute positions, at least `lengths`.
        scaling (`float`): Factor of the scores.
        sliding_window (`int`, *optional*): Window in positions.
        softcap (`float`, *optional*): Softcap of the scores.
        sinks (`torch.Tensor` of shape `(H,)`, *optional*): Sink logits.
        lengths (`torch.LongTensor` of shape `(B,)`, *optional*): Prefix lengths, for backends that do not read them.
        host_lengths (`tuple[int, ...]`, *optional*): Prefix lengths.
        memo (`dict`): Kept for the layers of one step.

    Returns:
        `(out, lse)` of shapes `(B, H, N, Dv)` and `(B, H, N)`, sinks included; or None: compute the parts one by one.
    """
    if host_lengths is None:
        return None
    length, nodes = shared_length(host_lengths), mask.shape[-1]
    if softcap is not None or length is None or not query.is_cpu:
        return None
    start = 0 if sliding_window is None else max(0, length - sliding_window + 1)
    dense = length + nodes - start <= DENSE_KEYS
    unmasked = sliding_window is None or window_holds_all(sliding_window, length, nodes)
    if not dense and not unmasked:
        return None
    kv_heads = key.shape[1]
    name = ("torch_hybrid", start, dense, sliding_window, query.dtype, query.shape[1] // kv_heads)
    packed_mask = memo.get(name)
    if packed_mask is None:
        additive = additive_mask(mask, query.dtype)
        if dense:
            edge = PositionMask(positions, start, sliding_window, causal=False, dtype=query.dtype)(0, length - start)
            additive = torch.cat([edge[:, 0], additive], dim=-1)
        packed_mask = memo[name] = pack_mask(additive, query, kv_heads)
    packed = pack(query, kv_heads)
    first = start if dense else length
    own = one_head(key, first, length + nodes), one_head(value, first, length + nodes)
    # a node sees itself: no row of the mask hides everything
    state = fused_attention(packed, *own, packed_mask, scaling=scaling, hides_all=False)
    if not dense:
        before = one_head(key, 0, length), one_head(value, 0, length)
        state = merge_attention_states([fused_attention(packed, *before, scaling=scaling), state])
    state = unpack(state, query.shape)
    return state if sinks is None else merge_attention_states([state], sinks)
