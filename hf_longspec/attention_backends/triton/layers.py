"""Triton kernels for what a decoder layer computes between its matrix products and its attention.

- `add_norm`: a residual sum and the RMS norm of it, which are about eight launches of torch;
- `rotate_and_write`: the rotary embedding of queries and keys, and the write of keys and values to the cache, about
  fourteen;
- `silu_mul`: the activation of a gated MLP, two.

They round where the modules of transformers do: every result of an operation has the dtype of the model, and a norm
computes in float32 up to the factor of its weight. `generation/fused_layers.py` chooses the modules. The kernels have
not been run on a GPU: they are tested in Triton's interpreter and compiled for sm_80, sm_90 and sm_100.
"""

from __future__ import annotations

import torch

from .config import OPTIONS, jit, power_of_two, tl
from .launch import launching_on

# Products are rounded before they are added, as by separate operations.
ROUNDED = OPTIONS | {"enable_fp_fusion": False}
# Numbers of one program of `silu_mul`, and of one warp of a norm.
BLOCK, NUMBERS_PER_WARP = 1024, 512


@jit()
def _norm_kernel(
    hidden,  # [rows, size]
    residual,  # [rows, size], with HAS_RESIDUAL
    weight,  # [size]
    normed,  # [rows, size]
    total,  # [rows, size], with HAS_RESIDUAL
    size,
    epsilon,
    BLOCK_SIZE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """Add the residual to a row, and normalize the sum."""
    column = tl.arange(0, BLOCK_SIZE)
    is_column = column < size
    place = tl.program_id(0).to(tl.int64) * size + column
    x = tl.load(hidden + place, mask=is_column, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual + place, mask=is_column, other=0.0).to(tl.float32)
        rounded = x.to(total.dtype.element_ty)
        tl.store(total + place, rounded, mask=is_column)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / size + epsilon)
    rounded = (x * scale).to(normed.dtype.element_ty).to(tl.float32)
    w = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    tl.store(normed + place, (rounded * w).to(normed.dtype.element_ty), mask=is_column)


@jit(do_not_specialize=["count"])
def _silu_kernel(gate, up, out, count, BLOCK: tl.constexpr):
    """Multiply silu(gate) by `up`, number by number."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_number = place < count
    x = tl.load(gate + place, mask=is_number, other=0.0).to(tl.float32)
    activated = (x / (1.0 + tl.exp(-x))).to(out.dtype.element_ty).to(tl.float32)
    y = tl.load(up + place, mask=is_number, other=0.0).to(tl.float32)
    tl.store(out + place, (activated * y).to(out.dtype.element_ty), mask=is_number)


@jit(do_not_specialize=["nodes", "stride_slot_b", "stride_cos_b", "stride_cos_n", "stride_sin_b", "stride_sin_n"])
def _rotate_kernel(
    query,  # [B, H, N, D], rotated in place
    key,  # [B, K, N, D]
    value,  # [B, K, N, Dv]
    cos,  # [B, N, D]
    sin,  # [B, N, D]
    keys,  # [B, K, S, D]
    values,  # [B, K, S, Dv]
    slots,  # [B, N]
    stride_qb,
    stride_qh,
    stride_qn,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_cos_b,
    stride_cos_n,
    stride_sin_b,
    stride_sin_n,
    stride_ksb,
    stride_ksh,
    stride_kss,
    stride_vsb,
    stride_vsh,
    stride_vss,
    stride_slot_b,
    nodes,
    heads,
    HALF: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    """Rotate one head of one node, H query heads before K key heads; write a key and its value to their slot."""
    batch, node = (tl.program_id(0) // nodes).to(tl.int64), (tl.program_id(0) % nodes).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    of_cos, of_sin = cos + batch * stride_cos_b + node * stride_cos_n, sin + batch * stride_sin_b + node * stride_sin_n
    if head < heads:
        vector = query + batch * stride_qb + head * stride_qh + node * stride_qn
        rotate_vector(vector, vector, of_cos, of_sin, HALF, BLOCK_HALF)
    else:
        kv_head = head - heads
        slot = tl.load(slots + batch * stride_slot_b + node).to(tl.int64)  # unmasked: every node has a slot
        source = key + batch * stride_kb + kv_head * stride_kh + node * stride_kn
        target = keys + batch * stride_ksb + kv_head * stride_ksh + slot * stride_kss
        rotate_vector(source, target, of_cos, of_sin, HALF, BLOCK_HALF)
        dim = tl.arange(0, BLOCK_VALUE)
        source = value + batch * stride_vb + kv_head * stride_vh + node * stride_vn
        target = values + batch * stride_vsb + kv_head * stride_vsh + slot * stride_vss
        tl.store(target + dim, tl.load(source + dim, mask=dim < VALUE_SIZE, other=0.0), mask=dim < VALUE_SIZE)


@jit()
def rotate_vector(source, target, cos, sin, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """Write `x * cos + rotate_half(x) * sin` of one vector, which may be done in place."""
    dim = tl.arange(0, BLOCK_HALF)
    is_dim = dim < HALF
    first = tl.load(source + dim, mask=is_dim, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + dim, mask=is_dim, other=0.0).to(tl.float32)
    first_cos = tl.load(cos + dim, mask=is_dim, other=0.0).to(tl.float32)
    second_cos = tl.load(cos + HALF + dim, mask=is_dim, other=0.0).to(tl.float32)
    first_sin = tl.load(sin + dim, mask=is_dim, other=0.0).to(tl.float32)
    second_sin = tl.load(sin + HALF + dim, mask=is_dim, other=0.0).to(tl.float32)
    tl.debug_barrier()  # every thread has read before one writes to the same vector
    dtype = target.dtype.element_ty
    first_out = (first * first_cos).to(dtype).to(tl.float32) - (second * first_sin).to(dtype).to(tl.float32)
    second_out = (second * second_cos).to(dtype).to(tl.float32) + (first * second_sin).to(dtype).to(tl.float32)
    tl.store(target + dim, first_out.to(dtype), mask=is_dim)
    tl.store(target + HALF + dim, second_out.to(dtype), mask=is_dim)


def add_norm(
    hidden: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the RMS norm of `hidden + residual` times `weight`, and the sum.

    Args:
        hidden (`torch.Tensor` of shape `(..., size)`): One term, and the sum if there is no `residual`.
        residual (`torch.Tensor`, *optional*): The other one, of the same shape and dtype.
        weight (`torch.Tensor` of shape `(size,)`): Factors, of the same dtype.
        epsilon (`float`): Added to the mean of the squares.
    """
    hidden, residual = hidden.contiguous(), None if residual is None else residual.contiguous()
    normed, size = torch.empty_like(hidden), hidden.shape[-1]
    total = hidden if residual is None else torch.empty_like(hidden)
    block = power_of_two(size)
    with launching_on(hidden):
        _norm_kernel[(hidden.numel() // size,)](
            *(hidden, hidden if residual is None else residual, weight, normed, total, size, epsilon),
            BLOCK_SIZE=block,
            HAS_RESIDUAL=residual is not None,
            num_warps=min(16, max(1, block // NUMBERS_PER_WARP)),
            **ROUNDED,
        )
    return normed, total


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up`, for tensors of the same shape and dtype."""
    gate, up = gate.contiguous(), up.contiguous()
    out, count = torch.empty_like(gate), gate.numel()
    with launching_on(gate):
        _silu_kernel[(-(-count // BLOCK),)](gate, up, out, count, BLOCK=BLOCK, num_warps=4, **ROUNDED)
    return out


def rotate_and_write(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Rotate queries in place, and write rotated keys and their values to a cache.

    Args:
        query (`torch.Tensor` of shape `(B, H, N, D)`): Not expanded: no two entries share memory.
        key (`torch.Tensor` of shape `(B, K, N, D)`): Left as it is.
        value (`torch.Tensor` of shape `(B, K, N, Dv)`): Likewise.
        cos (`torch.Tensor` of shape `(B or 1, N, D)`): Both halves of every vector hold the same factors.
        sin (`torch.Tensor` of shape `(B or 1, N, D)`): Likewise.
        keys (`torch.Tensor` of shape `(B, K, S, D)`): Buffer of the cache.
        values (`torch.Tensor` of shape `(B, K, S, Dv)`): Likewise.
        slots (`torch.LongTensor` of shape `(N,)` or `(B, N)`): Slot of every node, the same for all rows or not.

    The last stride of every tensor is 1. All have the dtype of the buffers.
    """
    (batch, heads, nodes, size), value_size = query.shape, value.shape[3]
    cos, sin = cos.expand(batch, -1, -1), sin.expand(batch, -1, -1)
    strides = (x.stride()[:3] for x in (query, key, value))
    of_buffers = (x.stride()[:3] for x in (keys, values))
    with launching_on(query):
        _rotate_kernel[(batch * nodes, heads + key.shape[1])](
            *(query, key, value, cos, sin, keys, values, slots),
            *(stride for three in strides for stride in three),
            *(*cos.stride()[:2], *sin.stride()[:2]),
            *(stride for three in of_buffers for stride in three),
            *(slots.stride(0) if slots.dim() == 2 else 0, nodes, heads),
            HALF=size // 2,
            VALUE_SIZE=value_size,
            BLOCK_HALF=power_of_two(size // 2),
            BLOCK_VALUE=power_of_two(value_size),
            num_warps=1,
            **ROUNDED,
        )
