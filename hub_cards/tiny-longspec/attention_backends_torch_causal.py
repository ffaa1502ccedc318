# Published with a draft by hf_longspec, Apache-2.0.
"""Causal attention with torch alone, in memory linear in the number of keys."""

import torch

from .attention_backends_masks import PositionMask
from .attention_backends_merge import AttentionState, concatenate, merge_attention_states
from .attention_backends_torch_fused import can_fuse, fused_attention
from .attention_backends_torch_packed import attend_all, attend_masked

# No mask and no scores exist for more queries than this. 512 queries against a window of 4,096 compute 12 % more scores
# than the window has.
BLOCK_QUERIES = 512


def causal_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> AttentionState:
    """The last N of S positions against all S, causally; see reference.py."""
    nodes, length = query.shape[2], key.shape[2]
    if sliding_window is not None and sliding_window >= length:
        sliding_window = None
    if nodes == 1:  # the last position sees everything, or the last window
        first = 0 if sliding_window is None else length - sliding_window
        return attend_all(query, key, value, first, length, scaling=scaling, softcap=softcap)
    if sliding_window is not None or softcap is not None or not can_fuse(query, value):
        return _attend_query_blocks(query, key, value, sliding_window, scaling, softcap)
    before = length - nodes
    own = fused_attention(query, key[:, :, before:], value[:, :, before:], scaling=scaling, is_causal=True)
    if before == 0:
        return own
    return merge_attention_states([attend_all(query, key, value, 0, before, scaling=scaling), own])


def _attend_query_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sliding_window: int | None,
    scaling: float,
    softcap: float | None,
) -> AttentionState:
    """Each block of queries against the keys that any of them sees."""
    nodes, length = query.shape[2], key.shape[2]
    blocks = []
    for row in range(0, nodes, BLOCK_QUERIES):
        queries = query[:, :, row : row + BLOCK_QUERIES]
        first = length - nodes + row  # position of the first query of the block
        stop = first + queries.shape[2]
        start = 0 if sliding_window is None else max(0, first - sliding_window + 1)
        positions = torch.arange(first, stop, device=query.device)[None]
        mask = PositionMask(positions, start, sliding_window, causal=True, dtype=query.dtype)
        keys, values = key[:, :, start:stop], value[:, :, start:stop]
        blocks.append(attend_masked(queries, keys, values, mask, scaling=scaling, softcap=softcap))
    return concatenate(blocks, dim=2)
