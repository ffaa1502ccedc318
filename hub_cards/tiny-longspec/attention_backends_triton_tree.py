# Published with a draft by hf_longspec, Apache-2.0.
"""Attention of N queries to M keys under an explicit mask: the nodes of a draft tree among themselves.

    out[b, h, n] = softmax(q . k_j over the keys j that mask[b, h, n] shows) v_j, as one part for triton_combine.py
    never materialized: scores; gathered or repeated keys
    reference: reference.py::tree_attention

The nodes' keys are read where verification staged them, in the slots of the cache from `lengths[b]` on, or from tensors
of their own.
"""

from __future__ import annotations

import torch

from .attention_backends_triton_config import tree_config
from .attention_backends_triton_runtime import jit, launching_on, shared_memory, tl, upcast
from .attention_backends_triton_softmax import LOG2_E, add_block, finish, score_factors, scores_of


@jit(do_not_specialize=["stride_mb", "stride_mh", "stride_mn", "nodes", "keys", "slots", "parts", "part"])
def tree_kernel(
    query,  # [B, H, N, D]
    key,  # [B, K, S, D]
    value,  # [B, K, S, Dv]
    mask,  # [B, H, N, M], uint8 or floating point
    lengths,  # [B], with IN_CACHE
    out,  # [B, H, N, parts, Dv], float32
    lse,  # [B, H, N, parts], float32, base 2
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
    parts,
    part,
    scale,
    cap,
    lowest,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    IN_CACHE: tl.constexpr,
    ADDITIVE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    # int64: a batch row of a long cache starts beyond 2^31 numbers
    batch = (tl.program_id(1) // kv_heads).to(tl.int64)
    kv_head = (tl.program_id(1) % kv_heads).to(tl.int64)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)  # [rows]
    is_row = row < nodes * GROUPS
    node = row // GROUPS
    head = kv_head * GROUPS + row % GROUPS
    state = ((batch * kv_heads * GROUPS + head) * nodes + node) * parts + part  # [rows], int64

    dim, value_dim, offset = tl.arange(0, BLOCK_SIZE), tl.arange(0, BLOCK_VALUE), tl.arange(0, BLOCK_KEYS)
    q_base = query + batch * stride_qb + head * stride_qh + node * stride_qn
    is_query = is_row[:, None] & (dim < SIZE)[None, :]
    q = tl.load(q_base[:, None] + dim[None, :], mask=is_query, other=0.0)  # [rows, D]
    if UPCAST:
        q = q.to(tl.float32)
    staged = tl.load(lengths + batch).to(tl.int64) if IN_CACHE else 0  # unmasked: one number per batch row
    k_base = key + batch * stride_kb + kv_head * stride_kh + staged * stride_ks
    v_base = value + batch * stride_vb + kv_head * stride_vh + staged * stride_vs
    m_base = mask + batch * stride_mb + head * stride_mh + node * tl.cast(stride_mn, tl.int64)  # [rows]
    end = tl.minimum(keys, slots - staged)

    acc = tl.zeros([BLOCK_ROWS, BLOCK_VALUE], tl.float32)
    highest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    for start in range(0, end, BLOCK_KEYS):
        start64 = tl.cast(start, tl.int64)
        column = start + offset  # [keys]
        is_cell = is_row[:, None] & (column < end)[None, :]
        m_tile = m_base[:, None] + start64 * stride_mm + offset[None, :] * stride_mm
        if ADDITIVE:
            bias = tl.load(m_tile, mask=is_cell, other=float("-inf")).to(tl.float32)
            visible = bias > lowest
        else:
            visible = tl.load(m_tile, mask=is_cell, other=0) != 0
        # what no row sees may be NaN, and 0 * NaN is NaN
        is_seen = tl.max(visible.to(tl.int32), 0) > 0  # [keys]
        k_tile = k_base + start64 * stride_ks + offset[:, None] * stride_ks
        k = tl.load(k_tile + dim[None, :], mask=is_seen[:, None] & (dim < SIZE)[None, :], other=0.0)
        v_tile = v_base + start64 * stride_vs + offset[:, None] * stride_vs
        v = tl.load(v_tile + value_dim[None, :], mask=is_seen[:, None] & (value_dim < VALUE_SIZE)[None, :], other=0.0)
        if UPCAST:
            k, v = k.to(tl.float32), v.to(tl.float32)
        _, scores = scores_of(q, k, scale, cap, HAS_SOFTCAP)  # [rows, keys]
        if ADDITIVE:
            scores += tl.where(visible, bias, 0.0) * LOG2_E
        acc, highest, total = add_block(acc, highest, total, tl.where(visible, scores, float("-inf")), v)

    acc, row_lse = finish(acc, highest, total)
    where = is_row[:, None] & (value_dim < VALUE_SIZE)[None, :]
    tl.store(out + state[:, None] * VALUE_SIZE + value_dim[None, :], acc, mask=where)
    tl.store(lse + state, row_lse, mask=is_row)


def launch_tree(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    lengths: torch.Tensor | None = None,
) -> None:
    """Fill the last part of the partial results; see reference.py for the other arguments.

    Args:
        out (`torch.Tensor` of shape `(B, H, N, parts, Dv)`): The last part is written. float32.
        lse (`torch.Tensor` of shape `(B, H, N, parts)`): Likewise; log-sum-exp in base 2. float32.
        lengths (`torch.LongTensor` of shape `(B,)`, *optional*): The M keys are the slots from `lengths[b]` on.
    """
    (batch, heads, nodes, size), (kv_heads, slots) = query.shape, key.shape[1:3]
    sizes = (heads // kv_heads * nodes, size, value.shape[3], query.element_size())
    config = tree_config(*sizes, shared_memory(query.device))
    scale, cap = score_factors(scaling, softcap)
    mask, lowest = _readable(mask)
    mask = (mask[:, None] if mask.dim() == 3 else mask).expand(batch, heads, -1, -1)
    grid = (-(-sizes[0] // config.block_rows), batch * kv_heads)
    if 0 in grid:
        return
    with launching_on(query):
        tree_kernel[grid](
            query,
            key,
            value,
            mask,
            mask if lengths is None else lengths,
            out,
            lse,
            *query.stride()[:3],
            *key.stride()[:3],
            *value.stride()[:3],
            *mask.stride(),
            kv_heads,
            nodes,
            mask.shape[3],
            slots,
            out.shape[3],
            out.shape[3] - 1,
            scale,
            cap,
            lowest,
            GROUPS=heads // kv_heads,
            SIZE=size,
            VALUE_SIZE=value.shape[3],
            BLOCK_ROWS=config.block_rows,
            BLOCK_KEYS=config.block_keys,
            BLOCK_SIZE=config.block_size,
            BLOCK_VALUE=config.block_value,
            IN_CACHE=lengths is not None,
            ADDITIVE=mask.dtype != torch.uint8,
            HAS_SOFTCAP=softcap is not None,
            UPCAST=upcast(query),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )


def _readable(mask: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The mask as bytes or floating point, and the number that hides a key: the lowest of its dtype, or -inf."""
    if mask.dtype == torch.bool:
        return mask.view(torch.uint8), 0.0
    lowest = torch.finfo(mask.dtype).min
    if mask.dtype == torch.float64:
        return mask.float(), max(lowest, torch.finfo(torch.float32).min)
    return mask, lowest
