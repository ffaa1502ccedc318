# Published with a draft by hf_longspec, Apache-2.0.
"""Attention of N queries to a long prefix, cut into splits that run side by side.

    out[b, h, n] = softmax(q . k_j over the slots j < lengths[b]) v_j, one partial result per split; triton_combine.py
    merges them
    never materialized: a mask; repeated keys; scores, unless they are asked for
    reference: reference.py::prefix_attention

The G = H // K query heads that share a key head are G * N rows of one program, so that a key is read once for all of
them. Lengths are read on the device: the grid covers the capacity of the cache, and a split behind the prefix, or
before the window, leaves at once.

Scores (SpecAttn) belong to two nodes, the first and the last of each row of the batch. Rows are ordered such that those
two come first, so that one program has them all in its tile.
"""

from __future__ import annotations

import torch

from .attention_backends_triton_config import TileConfig, prefix_config
from .attention_backends_triton_runtime import jit, launching_on, shared_memory, tl, upcast
from .attention_backends_triton_softmax import LN_2, add_block, finish, score_factors, scores_of

NO_SCORES, SUMMED_SCORES, ROW_SCORES = range(3)


@jit()
def node_of_row(row, last, GROUPS: tl.constexpr):
    """The node of a row: node 0, the last one, then the others; GROUPS rows each."""
    node = row // GROUPS
    swapped = tl.maximum(last, 1)  # last = 0 swaps node 1 with itself
    return tl.where(node == 1, swapped, tl.where(node == swapped, 1, node))


@jit()
def store_summed(score, products, slot, is_slot, node, last, tile, is_row):
    """`q . k` [rows, keys] of node 0 and of the last node, summed; a lone node counts twice, as in scores.py."""
    if tile == 0:
        times = tl.where(node == 0, 1.0, 0.0) + tl.where(node == last, 1.0, 0.0)
        summed = tl.sum(products * tl.where(is_row, times, 0.0)[:, None], 0)  # [keys]
        tl.store(score + slot, summed, mask=is_slot)


@jit()
def store_rows(score, scores, slot, is_slot, row, node, last, tile, is_row, slots, GROUPS: tl.constexpr):
    """Scores [rows, keys] of node 0 and of the last node, one by one: [2, G, S]."""
    if tile == 0:
        where = is_row[:, None] & is_slot[None, :]
        logits = scores * LN_2
        of_first = score + (row % GROUPS).to(tl.int64)[:, None] * slots + slot[None, :]
        tl.store(of_first, logits, mask=where & (node == 0)[:, None])
        of_last = of_first + GROUPS * slots.to(tl.int64)
        tl.store(of_last, logits, mask=where & (node == last)[:, None])


@jit(do_not_specialize=["nodes", "slots", "parts", "window"])
def prefix_kernel(
    query,  # [B, H, N, D]
    key,  # [B, K, S, D]
    value,  # [B, K, S, Dv]
    lengths,  # [B]
    positions,  # [B, N], with HAS_WINDOW
    last_node,  # [B], with SCORES
    out,  # [B, H, N, parts, Dv], float32
    lse,  # [B, H, N, parts], float32, base 2
    score,  # [B, K, S] or [B, K, 2, G, S], float32, with SCORES
    stride_qb,
    stride_qh,
    stride_qn,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_vb,
    stride_vh,
    stride_vs,
    kv_heads,
    nodes,
    slots,
    parts,
    window,
    scale,
    cap,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    SCORES: tl.constexpr,  # 0: none, 1: summed, 2: per row
    UPCAST: tl.constexpr,
):
    tile, split = tl.program_id(0), tl.program_id(1)
    # int64: a batch row of a long cache starts beyond 2^31 numbers
    batch = (tl.program_id(2) // kv_heads).to(tl.int64)
    kv_head = (tl.program_id(2) % kv_heads).to(tl.int64)

    row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)  # [rows]
    is_row = row < nodes * GROUPS
    last = tl.load(last_node + batch).to(tl.int32) if SCORES else 0  # unmasked: one number per batch row
    node = node_of_row(row, last, GROUPS) if SCORES else row // GROUPS
    head = kv_head * GROUPS + row % GROUPS
    state = ((batch * kv_heads * GROUPS + head) * nodes + node) * parts + split  # [rows], int64

    length = tl.load(lengths + batch).to(tl.int32)  # unmasked: one number per batch row
    length = tl.minimum(length, slots)
    first = split * SPLIT_KEYS
    stop = tl.minimum(first + SPLIT_KEYS, length)
    seen_from = 0
    if HAS_WINDOW:
        position = tl.load(positions + batch * nodes + node, mask=is_row, other=0).to(tl.int32)
        row_from = position - window + 1  # [rows]
        seen_from = tl.maximum(tl.min(tl.where(is_row, row_from, slots)), 0)
        if SCORES == 0:  # scores are for all slots
            first = tl.maximum(first, seen_from // BLOCK_KEYS * BLOCK_KEYS)
    if first >= stop:
        tl.store(lse + state, float("-inf"), mask=is_row)
        return

    dim, value_dim, offset = tl.arange(0, BLOCK_SIZE), tl.arange(0, BLOCK_VALUE), tl.arange(0, BLOCK_KEYS)
    q_base = query + batch * stride_qb + head * stride_qh + node * stride_qn
    is_query = is_row[:, None] & (dim < SIZE)[None, :]
    q = tl.load(q_base[:, None] + dim[None, :], mask=is_query, other=0.0)  # [rows, D]
    if UPCAST:
        q = q.to(tl.float32)
    k_base = key + batch * stride_kb + kv_head * stride_kh
    v_base = value + batch * stride_vb + kv_head * stride_vh

    acc = tl.zeros([BLOCK_ROWS, BLOCK_VALUE], tl.float32)
    highest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    for start in range(first, stop, BLOCK_KEYS):
        start64 = tl.cast(start, tl.int64)
        slot = start + offset  # [keys]
        is_slot = slot < stop
        k_tile = k_base + start64 * stride_ks + offset[:, None] * stride_ks
        k = tl.load(k_tile + dim[None, :], mask=is_slot[:, None] & (dim < SIZE)[None, :], other=0.0)
        # what no row sees may be NaN, and 0 * NaN is NaN
        is_value = is_slot & (slot >= seen_from)
        v_tile = v_base + start64 * stride_vs + offset[:, None] * stride_vs
        v = tl.load(v_tile + value_dim[None, :], mask=is_value[:, None] & (value_dim < VALUE_SIZE)[None, :], other=0.0)
        if UPCAST:
            k, v = k.to(tl.float32), v.to(tl.float32)
        products, scores = scores_of(q, k, scale, cap, HAS_SOFTCAP)  # [rows, keys]
        if SCORES == 1:
            store_summed(
                score + (batch * kv_heads + kv_head) * slots, products, slot, is_slot, node, last, tile, is_row
            )
        if SCORES == 2:
            of_head = score + (batch * kv_heads + kv_head) * 2 * GROUPS * slots
            store_rows(of_head, scores, slot, is_slot, row, node, last, tile, is_row, slots, GROUPS)
        visible = is_slot[None, :]
        if HAS_WINDOW:
            visible = visible & (slot[None, :] >= row_from[:, None])
        acc, highest, total = add_block(acc, highest, total, tl.where(visible, scores, float("-inf")), v)

    acc, row_lse = finish(acc, highest, total)
    where = is_row[:, None] & (value_dim < VALUE_SIZE)[None, :]
    tl.store(out + state[:, None] * VALUE_SIZE + value_dim[None, :], acc, mask=where)
    tl.store(lse + state, row_lse, mask=is_row)


def number_of_splits(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    """How many partial results `launch_prefix` writes: by the capacity of the cache, not by what is in it."""
    return -(-key.shape[2] // _config(query, key, value).split_keys)


def launch_prefix(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    scaling: float,
    positions: torch.Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    last_node: torch.Tensor | None = None,
    score: torch.Tensor | None = None,
) -> None:
    """Fill the first `number_of_splits` parts of the partial results; see reference.py for the other arguments.

    Args:
        out (`torch.Tensor` of shape `(B, H, N, parts, Dv)`): Written where a part sees anything. float32.
        lse (`torch.Tensor` of shape `(B, H, N, parts)`): Log-sum-exp in base 2, -inf where it sees nothing. float32.
        last_node (`torch.LongTensor` of shape `(B,)`, *optional*): Index of every row's last node. With `score`.
        score (`torch.Tensor` of shape `(B, K, S)` or `(B, K, 2, G, S)`, *optional*):
            Written in the slots below `lengths[b]`, whether a window hides them or not. The first shape: `q . k` of
            node 0 and of the last node, summed over the two and over the heads of the group. The second: the scores as
            they enter the softmax (scaled and capped), one by one. float32.
    """
    (batch, heads, nodes, size), (kv_heads, slots) = query.shape, key.shape[1:3]
    config, groups = _config(query, key, value), heads // kv_heads
    scale, cap = score_factors(scaling, softcap)
    mode = NO_SCORES if score is None else SUMMED_SCORES if score.dim() == 3 else ROW_SCORES
    grid = (-(-groups * nodes // config.block_rows), number_of_splits(query, key, value), batch * kv_heads)
    if 0 in grid:
        return
    with launching_on(query):
        prefix_kernel[grid](
            query,
            key,
            value,
            lengths,
            lengths if positions is None else positions,
            lengths if last_node is None else last_node,
            out,
            lse,
            lse if score is None else score,
            *query.stride()[:3],
            *key.stride()[:3],
            *value.stride()[:3],
            kv_heads,
            nodes,
            slots,
            out.shape[3],
            sliding_window or 0,
            scale,
            cap,
            GROUPS=groups,
            SIZE=size,
            VALUE_SIZE=value.shape[3],
            BLOCK_ROWS=config.block_rows,
            BLOCK_KEYS=config.block_keys,
            BLOCK_SIZE=config.block_size,
            BLOCK_VALUE=config.block_value,
            SPLIT_KEYS=config.split_keys,
            HAS_WINDOW=sliding_window is not None,
            HAS_SOFTCAP=softcap is not None,
            SCORES=mode,
            UPCAST=upcast(query),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )


def _config(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> TileConfig:
    rows = query.shape[1] // key.shape[1] * query.shape[2]
    return prefix_config(rows, query.shape[3], value.shape[3], query.element_size(), shared_memory(query.device))
