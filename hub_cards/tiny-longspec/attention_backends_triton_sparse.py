# Published with a draft by hf_longspec, Apache-2.0.
"""Sparse attention in Triton: N queries against chosen key slots, read where they lie in the cache.

    out = softmax(score) v        lse = log sum exp(score)        over the chosen slots; see reference.py
    never materialized: a copy of the chosen keys and values; repeated heads; more scores than one tile

The chosen slots are split into parts of a fixed length, one program each, and a second kernel merges the parts by their
log-sum-exp. They have not been run on a GPU: they are tested in Triton's interpreter and compiled for sm_80, sm_90 and
sm_100.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from .attention_backends_registry import AttentionCall

try:
    import triton
    import triton.language as tl
except ImportError:  # an extra; nothing below is called without it
    triton = None

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_SIZE = 256

# A fixed length, not a fixed number: the order of summation depends on neither batch nor capacity. 128: one row of 8
# key/value heads and 2,300 chosen slots (7 % of 32K) makes 144 programs, for 132 multiprocessors. Not measured.
SPLIT_SLOTS = 128
# Parts that the merging kernel loads at a time.
BLOCK_PARTS = 16

# A published draft brings a copy of this file, older or newer. An op of the same name would become the copy's here too.
NAMESPACE = re.sub(r"\W", "_", __name__)


def _jit(**options: Any) -> Callable[[Any], Any]:
    return (lambda function: function) if triton is None else triton.jit(**options)


@_jit(do_not_specialize=["nodes", "slots"])  # a tree or a selection of another size is no reason to compile again
def _split_kernel(
    query,
    key,
    value,
    indices,
    counts,
    out_parts,
    lse_parts,
    scaling,
    softcap,
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
    GROUPS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """One part of the chosen slots for one row, one key/value head and a tile of its queries.

    Rows of a tile are the queries of the group: row r is node r // GROUPS of head r % GROUPS.
    """
    part = tl.program_id(0)
    # int64: a row of a long cache times its stride passes 2**31
    batch = (tl.program_id(1) // kv_heads).to(tl.int64)
    kv_head = (tl.program_id(1) % kv_heads).to(tl.int64)
    row = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_row = row < nodes * GROUPS
    node = (row // GROUPS).to(tl.int64)
    head = kv_head * GROUPS + row % GROUPS
    column, value_column = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)

    query_at = query + batch * stride_qb + head * stride_qh + node * stride_qn
    q = tl.load(  # [BLOCK_M, BLOCK_D]
        query_at[:, None] + column[None, :] * stride_qd, mask=in_row[:, None] & (column < D)[None, :], other=0.0
    )
    if UPCAST:
        q = q.to(tl.float32)
    key_at = key + batch * stride_kb + kv_head * stride_kh + column[:, None] * stride_kd
    value_at = value + batch * stride_vb + kv_head * stride_vh + value_column[None, :] * stride_vd
    index_at = indices + batch * stride_ib + kv_head * stride_ih

    count = tl.load(counts + batch * stride_cb)  # unmasked: one number per row
    count = tl.minimum(count, slots)
    first = part * SPLIT
    last = tl.minimum(first + SPLIT, count).to(tl.int32)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for start in range(first, last, BLOCK_N):
        place = start + tl.arange(0, BLOCK_N)
        used = place < last
        slot = tl.load(index_at + place.to(tl.int64) * stride_it, mask=used, other=0).to(tl.int64)
        k = tl.load(  # [BLOCK_D, BLOCK_N]
            key_at + slot[None, :] * stride_ks, mask=(column < D)[:, None] & used[None, :], other=0.0
        )
        v = tl.load(  # [BLOCK_N, BLOCK_DV]
            value_at + slot[:, None] * stride_vs, mask=used[:, None] & (value_column < DV)[None, :], other=0.0
        )
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        # ieee: float32 products in tf32 would be off by 3e-4
        score = tl.dot(q, k, input_precision="ieee") * scaling  # [BLOCK_M, BLOCK_N]
        if SOFTCAP:  # tanh(x) = 2 sigmoid(2x) - 1; tl has no tanh of its own
            score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)
        score = tl.where(used[None, :], score * 1.4426950408889634, float("-inf"))  # log2(e): exp2 is the fast one
        new_highest = tl.maximum(highest, tl.max(score, 1))
        weight = tl.exp2(score - new_highest[:, None])
        rescale = tl.exp2(highest - new_highest)
        total = total * rescale + tl.sum(weight, 1)
        mixed = mixed * rescale[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        highest = new_highest

    seen = total > 0.0
    divisor = tl.where(seen, total, 1.0)
    lse = tl.where(seen, (highest + tl.log2(divisor)) * 0.6931471805599453, float("-inf"))  # ln(2)
    # contiguous buffers with shapes (parts, B, H, N) and (parts, B, H, N, DV)
    heads = kv_heads * GROUPS
    written = ((part * (tl.num_programs(1) // kv_heads) + batch) * heads + head) * nodes + node
    tl.store(lse_parts + written, lse, mask=in_row)
    # a part without slots is told by its lse; only the first one may be the result itself
    in_row = in_row & ((first < last) | (part == 0))
    out = mixed / divisor[:, None]
    tl.store(
        out_parts + written[:, None] * DV + value_column[None, :],
        out.to(out_parts.dtype.element_ty),
        mask=in_row[:, None] & (value_column < DV)[None, :],
    )


@_jit(do_not_specialize=["parts", "rows"])
def _merge_kernel(
    out_parts, lse_parts, out, lse, parts, rows, DV: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_DV: tl.constexpr
):
    """The parts of one query of one head, merged. `out_parts` is only read where `lse_parts` is not -inf."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_DV)
    highest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    mixed = tl.zeros([BLOCK_DV], tl.float32)
    for start in range(0, parts, BLOCK_P):
        part = start + tl.arange(0, BLOCK_P)
        place = part.to(tl.int64) * rows + row
        part_lse = tl.load(lse_parts + place, mask=part < parts, other=float("-inf"))  # [BLOCK_P]
        new_highest = tl.maximum(highest, tl.max(part_lse, 0))
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)  # -inf - -inf would be NaN
        weight = tl.exp(part_lse - base)
        rescale = tl.exp(highest - base)
        part_out = tl.load(  # [BLOCK_P, BLOCK_DV]
            out_parts + place[:, None] * DV + column[None, :],
            mask=(part_lse > float("-inf"))[:, None] & (column < DV)[None, :],
            other=0.0,
        )
        total = total * rescale + tl.sum(weight, 0)
        mixed = mixed * rescale + tl.sum(weight[:, None] * part_out, 0)
        highest = new_highest
    seen = total > 0.0
    divisor = tl.where(seen, total, 1.0)
    merged_lse = tl.where(seen, highest + tl.log(divisor), float("-inf"))
    tl.store(lse + row + tl.arange(0, 1), merged_lse)  # unmasked: one number per program
    tl.store(out + row * DV + column, (mixed / divisor).to(out.dtype.element_ty), mask=column < DV)


# The interpreter multiplies the bit patterns of bfloat16 and truncates what it stores in it: see `_launch`.
INTERPRETED = triton is not None and not isinstance(_split_kernel, triton.runtime.JITFunction)


def tiles(size: int, dtype: torch.dtype) -> dict[str, int]:
    """Tile sizes and warps for keys or values of `size` numbers.

    Not measured. These are the largest for which no architecture spills registers: 32 query rows spill 8 bytes in 16
    bits, and 4 warps up to 6 KB in float32, whose products run without matrix units. A drafting step has one query, so
    that 16 rows hold a group of 16 heads.
    """
    if dtype == torch.float32:
        return {"BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 8, "num_stages": 2}
    return {"BLOCK_M": 16, "BLOCK_N": 64 if size <= 128 else 32, "num_warps": 4, "num_stages": 2}


def _launch(
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
    upcast = INTERPRETED and query.dtype == torch.bfloat16
    dtype = torch.float32 if upcast else value.dtype
    parts = max(1, triton.cdiv(slots, SPLIT_SLOTS))
    sizes = (parts, batch, heads, nodes)
    out_parts = query.new_empty((*sizes, value_size), dtype=dtype if parts == 1 else torch.float32)
    lse_parts = query.new_empty(sizes, dtype=torch.float32)
    if lse_parts.numel() == 0:
        return out_parts[0].to(value.dtype), lse_parts[0]
    config = tiles(max(size, value_size), query.dtype)
    index_strides = (indices.stride(0), indices.stride(1) if indices.shape[1] > 1 else 0, indices.stride(2))
    strides = (*query.stride(), *key.stride(), *value.stride(), *index_strides, counts.stride(0))
    with torch.cuda.device_of(query):  # Triton launches on the current device, whose tensors these need not be
        _split_kernel[(parts, batch * kv_heads, triton.cdiv(groups * nodes, config["BLOCK_M"]))](
            *(query, key, value, indices, counts, out_parts, lse_parts),
            *(scaling, softcap or 1.0, *strides, kv_heads, nodes, slots),
            GROUPS=groups,
            D=size,
            DV=value_size,
            SOFTCAP=softcap is not None,
            UPCAST=upcast,
            SPLIT=SPLIT_SLOTS,
            BLOCK_D=_block(size),
            BLOCK_DV=_block(value_size),
            **config,
        )
        out, lse = (out_parts[0], lse_parts[0]) if parts == 1 else _merge(out_parts, lse_parts, dtype)
    return out.to(value.dtype), lse


def _merge(out_parts: torch.Tensor, lse_parts: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The parts `(parts, B, H, N, Dv)` and `(parts, B, H, N)` as one.

    One launch. The same in torch (a maximum, exponentials, two sums, a division, a mask) is six or more, in every layer
    of every drafting step, for numbers that are a few percent of what the first kernel reads.
    """
    out, lse = out_parts.new_empty(out_parts.shape[1:], dtype=dtype), torch.empty_like(lse_parts[0])
    size = out.shape[-1]
    arguments = (out_parts, lse_parts, out, lse, lse_parts.shape[0], lse.numel())
    _merge_kernel[(lse.numel(),)](*arguments, DV=size, BLOCK_P=BLOCK_PARTS, BLOCK_DV=_block(size), num_warps=4)
    return out, lse


def _block(size: int) -> int:
    """The power of two that holds `size` numbers. A product of tiles wants 16 or more."""
    block: int = max(16, triton.next_power_of_2(size))
    return block


_attend = torch.library.custom_op(f"{NAMESPACE}::attend", _launch, mutates_args=())


@_attend.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    indices: torch.Tensor,
    counts: torch.Tensor,
    scaling: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = query.shape[:3]
    return value.new_empty((*shape, value.shape[3])), query.new_empty(shape, dtype=torch.float32)


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
    they are, whatever their strides. Call [`why_not`] first.
    """
    state: tuple[torch.Tensor, torch.Tensor] = _attend(query, key, value, indices, counts, scaling, softcap)
    return state


def why_not(call: AttentionCall) -> str | None:
    """`None`, or why [`sparse_attention`] cannot take this kind of call. Windows are the selection's affair."""
    if triton is None:
        return "triton is not installed: pip install triton"
    if call.device.type != "cuda" and not INTERPRETED:
        return f"device is {call.device.type}, expected cuda"
    if call.dtype not in DTYPES:
        return f"dtype is {call.dtype}, expected one of {', '.join(str(dtype) for dtype in DTYPES)}"
    if max(call.head_dim, call.value_dim) > MAX_SIZE:
        return f"head_dim is {call.head_dim} and value_dim {call.value_dim}, expected at most {MAX_SIZE}"
    return None
