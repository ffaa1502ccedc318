"""The Triton kernels of attention: over splits of the prefix and the tree, and their merge.

    out[b, h, n] = softmax(q . k_j) v_j        lse[b, h, n] = log2 sum_j 2^score_j        over the keys j of one part

`attention_kernel` writes such partial results, and `combine_kernel` merges all parts and the sinks in one pass.
Keys and values are never gathered or repeated, there is no mask of the prefix, and scores are not written unless they
are asked for; `reduce_scores_kernel` makes one score per entry of them. docs/architecture.md has an overview.

The G = H // K query heads that share a key head are G * N rows of one program, so that a key is read once for all of
them. Row r is node r // G of head r % G of its group. Softmax runs over keys that arrive block by block: a program
keeps for each row the highest score so far, the sum of the weights relative to it, and the weighted sum of the values.
Scores are in base 2 (multiplied by log2 e beforehand), because exp2 is one instruction.

They are tested in Triton's interpreter and on a GPU, and compiled for sm_80, sm_89, sm_90 and sm_100.
"""

# Postponed annotations: `tl.constexpr` does not exist without triton.
from __future__ import annotations

import math

from .config import jit, tl

# Kernels get these as defaults of parameters: Triton compares globals that a kernel reads in every launch of it.
LOG2_E, LN_2 = math.log2(math.e), math.log(2.0)


@jit(do_not_specialize=["stride_mb", "stride_mh", "stride_mn", "nodes", "keys", "slots", "splits", "window"])
def attention_kernel(
    query,  # [B, H, N, D]
    key,  # [B, K, S, D]
    value,  # [B, K, S, Dv]
    lengths,  # [B], with PREFIX
    positions,  # [B, N], with HAS_WINDOW
    last_node,  # [B], with SCORES
    mask,  # [B, H, N, M], uint8 or floating point, with TREE
    partial,  # float32: outputs [B, H, N, parts, Dv], then lse [B, H, N, parts] in base 2
    score,  # [B, K, S] or [B, K, 2, G, S], float32, with SCORES; base 2 if per row
    stride_qb,
    stride_qh,
    stride_qn,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_vb,
    stride_vh,
    stride_vs,
    stride_mb,
    stride_mh,
    stride_mn,
    stride_mm,
    kv_heads,
    nodes,
    keys,
    slots,
    splits,
    window,
    scale,
    cap,
    lowest,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    TREE_KEYS: tl.constexpr,
    TREE_STAGES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    SHORTEST_SPLIT: tl.constexpr,
    PREFIX: tl.constexpr,
    TREE: tl.constexpr,  # 0: none, 1: a mask of bytes, 2: an additive mask
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    SCORES: tl.constexpr,  # 0: none, 1: summed, 2: per row
    UPCAST: tl.constexpr,
    LOG2_E: tl.constexpr = LOG2_E,
):
    """Attend a tile of rows to one part of the keys: a split of the prefix, or with TREE, as part 0, the tree.

    The prefix is the slots below `lengths[b]`, read on the device. It is cut into about `splits` splits, whose length
    follows from it alone. A part without keys returns at once; those come last, as the part is the slowest index.
    The tree is M keys under an explicit mask. With PREFIX they are the nodes where verification staged them, in the
    slots from `lengths[b]` on.
    """
    tile, part, parts = tl.program_id(0), tl.program_id(2), tl.num_programs(2)
    # int64: a batch row of a long cache starts beyond 2^31 numbers
    batch = (tl.program_id(1) // kv_heads).to(tl.int64)
    kv_head = (tl.program_id(1) % kv_heads).to(tl.int64)

    row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)  # [rows]
    is_row = row < nodes * GROUPS
    last = tl.load(last_node + batch).to(tl.int32) if SCORES else 0  # unmasked: one number per batch row
    node = node_of_row(row, last, GROUPS) if SCORES else row // GROUPS
    head = kv_head * GROUPS + row % GROUPS
    state = ((batch * kv_heads * GROUPS + head) * nodes + node) * parts + part  # [rows], int64
    lse = partial + tl.num_programs(1).to(tl.int64) * GROUPS * nodes * parts * VALUE_SIZE

    length, first, stop, end, seen_from = 0, 0, 0, 0, 0
    if PREFIX:
        length = tl.load(lengths + batch).to(tl.int32)  # unmasked: one number per batch row
        stop = tl.minimum(length, slots)
        begin = 0
        if HAS_WINDOW:
            position = tl.load(positions + batch * nodes + node, mask=is_row, other=0).to(tl.int32)
            row_from = position - window + 1  # [rows]
            seen_from = tl.maximum(tl.min(tl.where(is_row, row_from, slots)), 0)
            if SCORES == 0:  # scores are for all slots
                begin = seen_from // BLOCK_KEYS * BLOCK_KEYS
        blocks = (stop - begin) // (splits * BLOCK_KEYS)
        split_keys = tl.maximum(blocks * BLOCK_KEYS, SHORTEST_SPLIT)
        first = begin + (part - (TREE > 0)) * split_keys
        stop = tl.minimum(first + split_keys, stop)
    if TREE > 0 and part == 0:
        end = tl.minimum(keys, slots - length)
        first = stop
    if first >= stop and end <= 0:
        tl.store(lse + state, float("-inf"), mask=is_row)
        return

    dim, value_dim = tl.arange(0, BLOCK_SIZE), tl.arange(0, BLOCK_VALUE)
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
    if PREFIX:
        offset = tl.arange(0, BLOCK_KEYS)
        for start in range(first, stop, BLOCK_KEYS):
            start64 = tl.cast(start, tl.int64)
            slot = start + offset  # [keys]
            is_slot = slot < stop
            k_tile = k_base + start64 * stride_ks + offset[:, None] * stride_ks
            k = tl.load(k_tile + dim[None, :], mask=is_slot[:, None] & (dim < SIZE)[None, :], other=0.0)
            # what no row sees may be NaN, and 0 * NaN is NaN
            is_value = (is_slot & (slot >= seen_from))[:, None] & (value_dim < VALUE_SIZE)[None, :]
            v_tile = v_base + start64 * stride_vs + offset[:, None] * stride_vs
            v = tl.load(v_tile + value_dim[None, :], mask=is_value, other=0.0)
            if UPCAST:
                k, v = k.to(tl.float32), v.to(tl.float32)
            products, scores = scores_of(q, k, scale, cap, HAS_SOFTCAP)  # [rows, keys]
            if SCORES == 1:
                of_head = score + (batch * kv_heads + kv_head) * slots
                store_summed(of_head, products, slot, is_slot, node, last, tile, is_row)
            if SCORES == 2:
                of_head = score + (batch * kv_heads + kv_head) * 2 * GROUPS * slots
                store_rows(of_head, scores, slot, is_slot, row, node, last, tile, is_row, slots, GROUPS)
            visible = is_slot[None, :]
            if HAS_WINDOW:
                visible = visible & (slot[None, :] >= row_from[:, None])
            acc, highest, total = add_block(acc, highest, total, tl.where(visible, scores, float("-inf")), v)
    if TREE:
        column_offset = tl.arange(0, TREE_KEYS)
        staged = tl.cast(length, tl.int64)
        m_base = mask + batch * stride_mb + head * stride_mh + node * tl.cast(stride_mn, tl.int64)  # [rows]
        for start in tl.range(0, end, TREE_KEYS, num_stages=TREE_STAGES):
            start64 = tl.cast(start, tl.int64)
            column = start + column_offset  # [keys]
            is_cell = is_row[:, None] & (column < end)[None, :]
            m_tile = m_base[:, None] + start64 * stride_mm + column_offset[None, :] * stride_mm
            if TREE == 2:
                bias = tl.load(m_tile, mask=is_cell, other=float("-inf")).to(tl.float32)
                visible = bias > lowest
            else:
                visible = tl.load(m_tile, mask=is_cell, other=0) != 0
            # what no row sees may be NaN, and 0 * NaN is NaN
            is_seen = (tl.max(visible.to(tl.int32), 0) > 0)[:, None]  # [keys, 1]
            k_tile = k_base + (staged + start64) * stride_ks + column_offset[:, None] * stride_ks
            k = tl.load(k_tile + dim[None, :], mask=is_seen & (dim < SIZE)[None, :], other=0.0)
            v_tile = v_base + (staged + start64) * stride_vs + column_offset[:, None] * stride_vs
            v = tl.load(v_tile + value_dim[None, :], mask=is_seen & (value_dim < VALUE_SIZE)[None, :], other=0.0)
            if UPCAST:
                k, v = k.to(tl.float32), v.to(tl.float32)
            _, scores = scores_of(q, k, scale, cap, HAS_SOFTCAP)  # [rows, keys]
            if TREE == 2:
                scores += tl.where(visible, bias, 0.0) * LOG2_E
            acc, highest, total = add_block(acc, highest, total, tl.where(visible, scores, float("-inf")), v)

    acc, row_lse = finish(acc, highest, total)
    where = is_row[:, None] & (value_dim < VALUE_SIZE)[None, :]
    tl.store(partial + state[:, None] * VALUE_SIZE + value_dim[None, :], acc, mask=where)
    tl.store(lse + state, row_lse, mask=is_row)


@jit(do_not_specialize=["states", "nodes", "parts"])
def combine_kernel(
    partial,  # float32: outputs [B, H, N, parts, Dv], not read where lse is -inf; lse [B, H, N, parts] in base 2
    sinks,  # [H], with HAS_SINKS
    merged,  # [B, N, H, Dv]
    merged_lse,  # [B, H, N], float32, natural
    states,
    heads,
    nodes,
    parts,
    VALUE_SIZE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_STATES: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    LOG2_E: tl.constexpr = LOG2_E,
    LN_2: tl.constexpr = LN_2,
):
    """Merge the parts of several results, and their sinks:

    lse = log sum_p exp(lse_p) (+ exp(sink))        out = sum_p exp(lse_p - lse) out_p
    """
    state = tl.program_id(0).to(tl.int64) * BLOCK_STATES + tl.arange(0, BLOCK_STATES)  # [states]
    is_state = state < states
    head = state // nodes % heads
    lse = partial + tl.cast(states, tl.int64) * parts * VALUE_SIZE
    value_dim, offset = tl.arange(0, BLOCK_VALUE), tl.arange(0, BLOCK_PARTS)
    is_value = value_dim < VALUE_SIZE
    acc = tl.zeros([BLOCK_STATES, BLOCK_VALUE], tl.float32)
    if HAS_SINKS:  # a logit without a value
        highest = tl.load(sinks + head, mask=is_state, other=0.0).to(tl.float32) * LOG2_E
        total = tl.full([BLOCK_STATES], 1.0, tl.float32)
    else:
        highest = tl.full([BLOCK_STATES], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_STATES], tl.float32)
    for start in range(0, parts, BLOCK_PARTS):
        part = start + offset
        index = state[:, None] * parts + part[None, :]  # [states, parts]
        is_part = is_state[:, None] & (part < parts)[None, :]
        part_lse = tl.load(lse + index, mask=is_part, other=float("-inf"))
        where = (part_lse > float("-inf"))[:, :, None] & is_value[None, None, :]
        cell = index[:, :, None] * VALUE_SIZE + value_dim[None, None, :]
        part_out = tl.load(partial + cell, mask=where, other=0.0)  # [states, parts, Dv]
        new = tl.maximum(highest, tl.max(part_lse, 1))
        shift = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp2(part_lse - shift[:, None])  # [states, parts]
        decay = tl.exp2(highest - shift)
        acc = acc * decay[:, None] + tl.sum(part_out * weights[:, :, None], 1)
        total = total * decay + tl.sum(weights, 1)
        highest = new
    acc, row_lse = finish(acc, highest, total)
    row = (state // nodes // heads * nodes + state % nodes) * heads + head  # [states], as (B, N, H)
    place = merged + row[:, None] * VALUE_SIZE + value_dim[None, :]
    tl.store(place, acc.to(merged.dtype.element_ty), mask=is_state[:, None] & is_value[None, :])
    tl.store(merged_lse + state, row_lse * LN_2, mask=is_state)


@jit(do_not_specialize=["nodes", "slots"])
def reduce_scores_kernel(
    rows,  # [B * L, ROWS, S], float32; with WEIGHTS [B * L, ROWS / 2 G, 2, G, S], base 2
    lse,  # [B, H, N], float32, natural, with WEIGHTS
    last_node,  # [B], with WEIGHTS
    lengths,  # [B]
    score,  # [B * L, S], float32
    nodes,
    slots,
    LISTS: tl.constexpr,  # L: scores of a batch row, one, or one for each of its key heads
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    WEIGHTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    LOG2_E: tl.constexpr = LOG2_E,
):
    """Sum the scores of several rows, slot by slot; with WEIGHTS their attention probabilities, exp(score - lse).

    Slots from `lengths[b]` on are neither read nor written.
    """
    of_list = tl.program_id(1).to(tl.int64)
    batch = of_list // LISTS
    stop = tl.minimum(tl.load(lengths + batch).to(tl.int32), slots)  # unmasked: one number per batch row
    first = tl.program_id(0) * BLOCK_SLOTS
    if first >= stop:
        return
    slot = first + tl.arange(0, BLOCK_SLOTS)  # [slots]
    is_slot = slot < stop
    last = tl.load(last_node + batch).to(tl.int64) if WEIGHTS else 0  # unmasked: one number per batch row
    total = tl.zeros([BLOCK_SLOTS], tl.float32)
    for start in range(0, ROWS, BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)  # [rows]
        is_row = row < ROWS
        number = of_list * ROWS + row  # among the rows of all batch rows
        where = is_row[:, None] & is_slot[None, :]
        values = tl.load(rows + number[:, None] * slots + slot[None, :], mask=where, other=0.0)
        if WEIGHTS:
            head = number // (2 * GROUPS) * GROUPS + number % GROUPS  # of all batch rows
            node = tl.where(number // GROUPS % 2 == 0, 0, last)  # the first and the last one
            row_lse = tl.load(lse + head * nodes + node, mask=is_row, other=0.0)
            values = tl.where(where, tl.exp2(values - (row_lse * LOG2_E)[:, None]), 0.0)
        total += tl.sum(values, 0)
    tl.store(score + of_list * slots + slot, total, mask=is_slot)


def score_factors(scaling: float, softcap: float | None) -> tuple[float, float]:
    """Return `(scale, cap)` such that `scores_of` yields scores in base 2."""
    return (scaling * math.log2(math.e), 0.0) if softcap is None else (scaling / softcap, softcap * math.log2(math.e))


@jit()
def scores_of(query, key, scale, cap, HAS_SOFTCAP: tl.constexpr, LOG2_E: tl.constexpr = LOG2_E):
    """Return raw products `q . k` and scores in base 2, both [rows, keys], of `query` [rows, D] and `key` [keys, D]."""
    products = tl.dot(query, tl.trans(key), input_precision="ieee")  # tf32, the default, has 10 bits
    scores = products * scale
    if HAS_SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), which needs no device library; exp overflows to inf, and gives 1
        scores = cap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E)) + 1.0))
    return products, scores


@jit()
def add_block(acc, highest, total, scores, value):
    """Add a block: scores [rows, keys] (-inf: not seen) and values [keys, Dv]. Return acc, highest, total."""
    new = tl.maximum(highest, tl.max(scores, 1))
    # a row that has seen nothing yet: -inf - -inf would be NaN
    shift = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(highest - shift)
    total = total * decay + tl.sum(weights, 1)
    acc = tl.dot(weights.to(value.dtype), value, acc * decay[:, None], input_precision="ieee")
    return acc, new, total


@jit()
def finish(acc, highest, total):
    """Return output [rows, Dv] and its log-sum-exp in base 2 [rows]; 0 and -inf for a row that saw nothing."""
    some = total > 0.0
    divisor = tl.where(some, total, 1.0)
    lse = tl.where(some, highest + tl.log2(divisor), float("-inf"))
    return acc / divisor[:, None], lse


@jit()
def node_of_row(row, last, GROUPS: tl.constexpr):
    """Return the node of a row. Node 0 and the last one come first, so that one program has both in its tile."""
    node = row // GROUPS
    swapped = tl.maximum(last, 1)  # last = 0 swaps node 1 with itself
    return tl.where(node == 1, swapped, tl.where(node == swapped, 1, node))


@jit()
def store_summed(score, products, slot, is_slot, node, last, tile, is_row):
    """Store `q . k` [rows, keys] of node 0 and of the last node, summed; a lone node counts twice, as in scores.py."""
    if tile == 0:
        times = tl.where(node == 0, 1.0, 0.0) + tl.where(node == last, 1.0, 0.0)
        summed = tl.sum(products * tl.where(is_row, times, 0.0)[:, None], 0)  # [keys]
        tl.store(score + slot, summed, mask=is_slot)


@jit()
def store_rows(score, scores, slot, is_slot, row, node, last, tile, is_row, slots, GROUPS: tl.constexpr):
    """Store scores [rows, keys] of node 0 and of the last node, one by one: [2, G, S], in base 2."""
    if tile == 0:
        where = is_row[:, None] & is_slot[None, :]
        of_first = score + (row % GROUPS).to(tl.int64)[:, None] * slots + slot[None, :]
        tl.store(of_first, scores, mask=where & (node == 0)[:, None])
        of_last = of_first + GROUPS * slots.to(tl.int64)
        tl.store(of_last, scores, mask=where & (node == last)[:, None])
