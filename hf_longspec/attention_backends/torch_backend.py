"""The backend that needs only torch: `hf_longspec_torch`. Keys are never repeated, and a prefix gets no mask.

Prefixes of different lengths are cut to size and computed row by row; equal ones in one call on a slice of the cache.
The fused op (torch_fused.py) has no softcap, and on CUDA no mask. Such calls are plain matrix products over blocks of
keys, which are merged by log-sum-exp as they come; at most BLOCK_KEYS keys have scores at a time. These products run
in float32 (float64 for float64 input). On CPU a small bfloat16 product is 15 times slower than the float32 one (250
against 17 microseconds for 68 x 32 by 32 x 68, torch 2.13, AMD EPYC with AVX2), and scores rounded to bfloat16 would
cost accuracy.
"""

from functools import partial
from typing import Any

import torch

from .lengths import SeqLens
from .merge import AttentionState, concatenate, merge_attention_states, nothing_visible
from .registry import (
    WINDOW_WITHOUT_POSITIONS,
    AttentionBackend,
    AttentionFunction,
    register_backend,
    why_not_dtype,
)
from .torch_fused import (
    KeyMask,
    additive_mask,
    can_fuse,
    explicit_mask,
    fused_attention,
    hybrid_attention,
    one_head,
    pack,
    pack_mask,
    position_mask,
    unpack,
)

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# No mask and no scores exist for more queries than this. 512 queries against a window of 4,096 compute 12 % more scores
# than the window has.
BLOCK_QUERIES = 512

# The scores of 17 nodes x 32 heads are 4 MB. In shorter blocks, calling the ops costs more than they do.
BLOCK_KEYS = 2048


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
    """Attend N queries to the committed prefix.

    Lengths that the host does not know are read back. Where that would break a graph, all slots are read under a mask.
    """
    if sliding_window is not None and positions is None:
        raise ValueError(WINDOW_WITHOUT_POSITIONS.format(sliding_window))
    if not lengths.host:
        if torch.compiler.is_compiling():
            mask = prefix_mask(lengths.on(key.device), key.shape[2], query.shape[2], positions, sliding_window)
            return _attend_packed(query, key, value, 0, key.shape[2], mask, scaling=scaling, softcap=softcap)
        lengths = SeqLens(lengths.on(key.device).tolist())
    window = None if sliding_window is None or positions is None else (positions, sliding_window)
    if lengths.shared is not None:
        return _attend_prefix(query, key, value, lengths.shared, window, scaling, softcap)
    rows = []
    for b, length in enumerate(lengths.host):
        row = slice(b, b + 1)
        own = None if window is None else (window[0][row], window[1])
        rows.append(_attend_prefix(query[row], key[row], value[row], length, own, scaling, softcap))
    return concatenate(rows, dim=0)


def tree_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
) -> AttentionState:
    """Attend N queries to M keys under an explicit mask."""
    mask = mask[:, None] if mask.dim() == 3 else mask
    blocks = []
    for row in range(0, max(1, query.shape[2]), BLOCK_QUERIES):
        rows = slice(row, row + BLOCK_QUERIES)
        visible = explicit_mask(mask[:, :, rows], query.dtype)
        blocks.append(_attend_keys(query[:, :, rows], key, value, visible, scaling=scaling, softcap=softcap))
    return concatenate(blocks, dim=2)


def causal_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> AttentionState:
    """Attend the last N of S positions to all S, causally. Memory is linear in S."""
    nodes, length = query.shape[2], key.shape[2]
    if sliding_window is not None and sliding_window >= length:
        sliding_window = None
    if nodes == 1:  # the last position sees everything, or the last window
        first = 0 if sliding_window is None else length - sliding_window
        return _attend_packed(query, key, value, first, length, scaling=scaling, softcap=softcap)
    before = length - nodes
    if sliding_window is None and softcap is None and can_fuse(query, value):
        own = fused_attention(query, key[:, :, before:], value[:, :, before:], scaling=scaling, is_causal=True)
        if before == 0:
            return own
        return merge_attention_states([_attend_packed(query, key, value, 0, before, scaling=scaling), own])
    blocks = []
    for row in range(0, nodes, BLOCK_QUERIES):  # each block attends to the keys that any of its queries sees
        queries = query[:, :, row : row + BLOCK_QUERIES]
        first = before + row  # position of the first query of the block
        stop = first + queries.shape[2]
        start = 0 if sliding_window is None else max(0, first - sliding_window + 1)
        positions = torch.arange(first, stop, device=query.device)[None]
        mask = position_mask(positions, start, sliding_window, causal=True, dtype=query.dtype)
        keys, values = key[:, :, start:stop], value[:, :, start:stop]
        blocks.append(_attend_keys(queries, keys, values, mask, scaling=scaling, softcap=softcap))
    return concatenate(blocks, dim=2)


def attention_to_copies(prefix_attention: AttentionFunction) -> AttentionFunction:
    """Return a `sparse_attention` that copies the chosen slots and attends to the copies."""

    def sparse_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        indices: torch.Tensor,
        counts: torch.Tensor,
        **options: Any,
    ) -> AttentionState:
        slots = indices.expand(-1, key.shape[1], -1)[..., None]  # [B, K, T, 1]
        chosen = (cached.gather(2, slots.expand(-1, -1, -1, cached.shape[3])) for cached in (key, value))
        return prefix_attention(query, *chosen, SeqLens(None, counts), **options)

    return sparse_attention


def prefix_mask(
    lengths: torch.Tensor, slots: int, nodes: int, positions: torch.Tensor | None, sliding_window: int | None
) -> torch.Tensor:
    """Return the boolean mask `(B, N, slots)` of N = `nodes` queries over prefixes of `lengths` `(B,)`."""
    places = torch.arange(slots, device=lengths.device)
    seen = (places < lengths[:, None])[:, None].expand(-1, nodes, -1)
    if sliding_window is None or positions is None:
        return seen
    return seen & (positions[:, :, None] - places < sliding_window)


def _attend_prefix(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    length: int,
    window: tuple[torch.Tensor, int] | None,
    scaling: float,
    softcap: float | None,
) -> AttentionState:
    """Attend rows of one length. Of a window `(positions, size)`, only keys that some queries do not see get a mask."""
    if window is None:
        return _attend_packed(query, key, value, 0, length, scaling=scaling, softcap=softcap)
    positions, size = window
    start, inner = _window_bounds(positions, size, length)
    parts = []
    if inner < length:
        parts.append(_attend_packed(query, key, value, inner, length, scaling=scaling, softcap=softcap))
    if start < inner:
        mask = position_mask(positions, start, size, causal=False, dtype=query.dtype)
        edge = key[:, :, start:inner], value[:, :, start:inner]
        parts.append(_attend_keys(query, *edge, mask, scaling=scaling, softcap=softcap))
    return merge_attention_states(parts) if parts else nothing_visible(query, value)


def _window_bounds(positions: torch.Tensor, sliding_window: int, length: int) -> tuple[int, int]:
    """Return the first slot that any query sees, and the first slot that all queries see."""
    if positions.is_cpu and not torch.compiler.is_compiling():
        seen = [position for row in positions.tolist() for position in row]
        first, last = min(seen), max(seen)
        return min(length, max(0, first - sliding_window + 1)), min(length, max(0, last - sliding_window + 1))
    # Reading positions would wait for the device in every layer, or break a graph. They are length - 1 at least; how
    # far they go stays unknown, so the whole window gets a mask.
    return max(0, length - sliding_window), length


def _attend_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    start: int,
    stop: int,
    mask: torch.Tensor | None = None,
    *,
    scaling: float,
    softcap: float | None = None,
) -> AttentionState:
    """Attend few queries, with packed heads, to keys `start` to `stop`, all or under a mask `(B, N, stop - start)`."""
    if softcap is not None or not can_fuse(query, value, masked=mask is not None):
        visible = None if mask is None else explicit_mask(mask[:, None], query.dtype)
        keys, values = key[:, :, start:stop], value[:, :, start:stop]
        return _attend_keys(query, keys, values, visible, scaling=scaling, softcap=softcap)
    kv_heads = key.shape[1]
    packed_mask = None if mask is None else pack_mask(additive_mask(mask, query.dtype), query, kv_heads)
    seen = one_head(key, start, stop), one_head(value, start, stop)
    return unpack(fused_attention(pack(query, kv_heads), *seen, packed_mask, scaling=scaling), query.shape)


def _attend_keys(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: KeyMask | None,
    *,
    scaling: float,
    softcap: float | None,
) -> AttentionState:
    """Attend to all keys `(B, K, M, D)`, or to those that a mask leaves.

    This is one call if the fused op takes the mask, and otherwise matrix products over blocks of keys.
    """
    length = key.shape[2]
    if mask is not None and softcap is None and can_fuse(query, value, masked=True):
        return fused_attention(query, key, value, mask(0, length), scaling=scaling)
    state = nothing_visible(query, value)
    if length == 0 or query.numel() == 0:
        return state
    scaled = query.to(state[1].dtype) * scaling
    blocks = [(0, length)]
    if not torch.compiler.is_compiling():  # the number of blocks would be compiled in, and with it the length
        blocks = [(start, min(start + BLOCK_KEYS, length)) for start in range(0, length, BLOCK_KEYS)]
    for start, stop in blocks:
        keys, values = (x[:, :, start:stop].to(scaled.dtype) for x in (key, value))
        part = _attend_block(scaled, keys, values, None if mask is None else mask(start, stop), softcap)
        state = part if start == 0 else merge_attention_states([state, part])
    return state[0].to(value.dtype), state[1]


def _attend_block(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, softcap: float | None
) -> AttentionState:
    (batch, heads, nodes, size), kv_heads = query.shape, key.shape[1]
    packed = query.reshape(batch, kv_heads, -1, size)  # the query heads of a key head are just more rows
    scores = (packed @ key.transpose(2, 3)).view(batch, heads, nodes, -1)
    if softcap is not None:
        scores = (scores / softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores = scores + mask
    lse = torch.logsumexp(scores, dim=-1)
    shift = lse if mask is None else lse.masked_fill(lse == -torch.inf, 0.0)
    weights = (scores - shift[..., None]).exp_()
    out = weights.view(batch, kv_heads, heads // kv_heads * nodes, -1) @ value
    return out.view(batch, heads, nodes, -1), lse


TORCH_BACKEND = register_backend(
    AttentionBackend(
        name="hf_longspec_torch",
        prefix_attention=prefix_attention,
        tree_attention=tree_attention,
        sparse_attention=attention_to_copies(prefix_attention),  # reads `counts` back
        causal_attention=causal_attention,
        why_not=partial(why_not_dtype, dtypes=DTYPES),
        hybrid_attention=hybrid_attention,
    ),
    priority=10,
)
