# Published with a draft by hf_longspec, Apache-2.0.
"""Sparse attention in Triton: N queries against chosen key slots, read where they lie in the cache.

    out = softmax(score) v        lse = log sum exp(score)        over the chosen slots; see reference.py
    never materialized: a copy of the chosen keys and values; repeated heads; more scores than one tile

The chosen slots are split into parts of a fixed length, one program each; triton_combine.py merges the parts. Neither
has been run on a GPU: they are tested in Triton's interpreter and compiled for sm_80, sm_90 and sm_100.
"""

from __future__ import annotations

import torch

from .attention_backends_triton_combine import launch_combine
from .attention_backends_triton_config import SMALLEST_TILE, power_of_two
from .attention_backends_triton_runtime import LIBRARY, jit, launching_on, tl, upcast
from .attention_backends_triton_softmax import add_block, finish, score_factors, scores_of

# A fixed length, not a fixed number: the order of summation depends on neither batch nor capacity. 128: one row of 8
# key/value heads and 2,300 chosen slots (7 % of 32K) makes 144 programs, for 132 multiprocessors. Not measured.
SPLIT_SLOTS = 128


@jit(do_not_specialize=["nodes", "slots", "parts"])  # a tree or a selection of another size is no reason to recompile
def sparse_kernel(
    query,  # [B, H, N, D]
    key,  # [B, K, S, D]
    value,  # [B, K, S, Dv]
    indices,  # [B, K, T]
    counts,  # [B]
    out,  # [B, H, N, parts, Dv], float32
    lse,  # [B, H, N, parts], float32, base 2
    stride_qb,
    stride_qh,
    stride_qn,
    stride_qd,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_kd,
    stride_vb,
    stride_vh,
    stride_vs,
    stride_vd,
    stride_ib,
    stride_ih,
    stride_it,
    stride_cb,
    kv_heads,
    nodes,
    slots,
    parts,
    scale,
    cap,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One part of the chosen slots for one row of the batch, one key head and a tile of its queries.

    Row r of the tile is node r // GROUPS of head r % GROUPS.
    """
    tile, part = tl.program_id(0), tl.program_id(1)
    # int64: a row of a long cache times its stride passes 2**31
    batch = (tl.program_id(2) // kv_heads).to(tl.int64)
    kv_head = (tl.program_id(2) % kv_heads).to(tl.int64)
    row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)  # [rows]
    is_row = row < nodes * GROUPS
    node = (row // GROUPS).to(tl.int64)
    head = kv_head * GROUPS + row % GROUPS
    state = ((batch * kv_heads * GROUPS + head) * nodes + node) * parts + part  # [rows], int64

    count = tl.load(counts + batch * stride_cb).to(tl.int32)  # unmasked: one number per batch row
    first = part * SPLIT
    stop = tl.minimum(first + SPLIT, tl.minimum(count, slots))
    if first >= stop:
        tl.store(lse + state, float("-inf"), mask=is_row)
        return

    dim, value_dim, offset = tl.arange(0, BLOCK_SIZE), tl.arange(0, BLOCK_VALUE), tl.arange(0, BLOCK_KEYS)
    q_base = query + batch * stride_qb + head * stride_qh + node * stride_qn
    is_query = is_row[:, None] & (dim < SIZE)[None, :]
    q = tl.load(q_base[:, None] + dim[None, :] * stride_qd, mask=is_query, other=0.0)  # [rows, D]
    if UPCAST:
        q = q.to(tl.float32)
    k_base = key + batch * stride_kb + kv_head * stride_kh + dim[None, :] * stride_kd
    v_base = value + batch * stride_vb + kv_head * stride_vh + value_dim[None, :] * stride_vd
    i_base = indices + batch * stride_ib + kv_head * stride_ih

    acc = tl.zeros([BLOCK_ROWS, BLOCK_VALUE], tl.float32)
    highest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    for start in range(first, stop, BLOCK_KEYS):
        place = start + offset  # [keys]
        used = place < stop
        slot = tl.load(i_base + place.to(tl.int64) * stride_it, mask=used, other=0).to(tl.int64)
        is_key = used[:, None] & (dim < SIZE)[None, :]
        k = tl.load(k_base + slot[:, None] * stride_ks, mask=is_key, other=0.0)  # [keys, D]
        is_value = used[:, None] & (value_dim < VALUE_SIZE)[None, :]
        v = tl.load(v_base + slot[:, None] * stride_vs, mask=is_value, other=0.0)  # [keys, Dv]
        if UPCAST:
            k, v = k.to(tl.float32), v.to(tl.float32)
        _, scores = scores_of(q, k, scale, cap, HAS_SOFTCAP)  # [rows, keys]
        acc, highest, total = add_block(acc, highest, total, tl.where(used[None, :], scores, float("-inf")), v)

    acc, row_lse = finish(acc, highest, total)
    where = is_row[:, None] & (value_dim < VALUE_SIZE)[None, :]
    tl.store(out + state[:, None] * VALUE_SIZE + value_dim[None, :], acc, mask=where)
    tl.store(lse + state, row_lse, mask=is_row)


def tiles(size: int, itemsize: int) -> dict[str, int]:
    """Tile sizes and warps for keys or values of `size` numbers of `itemsize` bytes.

    Not measured. These are the largest for which no architecture spills registers: 32 query rows spill 8 bytes in 16
    bits, and 4 warps up to 6 KB in float32, whose products run without matrix units. A drafting step has one query, so
    that 16 rows hold a group of 16 heads.
    """
    if itemsize == 4:
        return {"BLOCK_ROWS": 16, "BLOCK_KEYS": 32, "num_warps": 8, "num_stages": 2}
    return {"BLOCK_ROWS": 16, "BLOCK_KEYS": 64 if size <= 128 else 32, "num_warps": 4, "num_stages": 2}


@torch.library.custom_op(f"{LIBRARY}::triton_sparse_attention", mutates_args=())
def sparse_op(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    indices: torch.Tensor,
    counts: torch.Tensor,
    scaling: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both kernels; shapes as in reference.py."""
    (batch, heads, nodes, size), (_, kv_heads, _, value_size) = query.shape, value.shape
    groups, slots = heads // kv_heads, indices.shape[2]
    parts = max(1, -(-slots // SPLIT_SLOTS))
    shape = (batch, heads, nodes, parts)
    out = query.new_empty(*shape, value_size, dtype=torch.float32)
    lse = query.new_empty(shape, dtype=torch.float32)
    config = tiles(max(size, value_size), query.element_size())
    scale, cap = score_factors(scaling, softcap)
    index_strides = (indices.stride(0), indices.stride(1) if indices.shape[1] > 1 else 0, indices.stride(2))
    strides = (*query.stride(), *key.stride(), *value.stride(), *index_strides, counts.stride(0))
    grid = (-(-groups * nodes // config["BLOCK_ROWS"]), parts, batch * kv_heads)
    if 0 not in grid:
        with launching_on(query):
            sparse_kernel[grid](
                *(query, key, value, indices, counts, out, lse),
                *(*strides, kv_heads, nodes, slots, parts, scale, cap),
                GROUPS=groups,
                SIZE=size,
                VALUE_SIZE=value_size,
                BLOCK_SIZE=max(SMALLEST_TILE, power_of_two(size)),
                BLOCK_VALUE=max(SMALLEST_TILE, power_of_two(value_size)),
                SPLIT=SPLIT_SLOTS,
                HAS_SOFTCAP=softcap is not None,
                UPCAST=upcast(query),
                **config,
            )
    return launch_combine(out, lse, value)


@sparse_op.register_fake
def _(query, key, value, indices, counts, scaling, softcap) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, nodes, _ = query.shape
    out = value.new_empty(batch, nodes, heads, value.shape[3]).transpose(1, 2)
    return out, query.new_empty(batch, heads, nodes, dtype=torch.float32)


def sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    indices: torch.Tensor,
    counts: torch.Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """N queries against chosen key slots; see reference.py.

    Nothing is copied or read back: slots and counts are read on the device, and keys and values are taken from where
    they are, whatever their strides.
    """
    state: tuple[torch.Tensor, torch.Tensor] = sparse_op(query, key, value, indices, counts, scaling, softcap)
    return state
