"""Triton kernels for what a decoder layer computes between its matrix products and its attention.

- `add_norm`: a residual sum and the RMS norm of it, which are about eight launches of torch;
- `rotate`: the rotary embedding of queries and keys, about ten, and the write of keys and values to the cache, two;
- `gated`: the activation of a gate and its product with another tensor, two;
- `delta_rule`: one node of the gated delta rule (https://huggingface.co/papers/2412.06464), eight in float32.

They round where the operations of torch do: every result has the dtype of the model. Norms and states are computed in
float32.
`generation/compiled/fused_layers.py` decides where they run. They are tested in Triton's interpreter, and compiled for
sm_80, sm_90 and sm_100.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .config import OPTIONS, jit, power_of_two, tl
from .launch import launching_on

# Products are rounded before they are added, as by separate operations.
ROUNDED = OPTIONS | {"enable_fp_fusion": False}
# Numbers of one program of `gated`, and of one warp of a norm.
BLOCK, NUMBERS_PER_WARP = 1024, 512
# Numbers of a state that one program of `delta_rule` has in its registers: 32 in each of 128 threads.
STATE_BLOCK = 4096
# What `gated` multiplies with, as the kernel numbers it.
ACTIVATIONS = {"silu": 0, "sigmoid": 1, "gelu": 2, "gelu_tanh": 3}


class NormForm(NamedTuple):
    """How an RMS norm applies its weight."""

    offset: int  # added to the weight
    late: bool  # whether the result is rounded after the product with the weight only, or before it as well


class RotaryForm(NamedTuple):
    """Which numbers of a vector are rotated together, and by which factors."""

    numbers: int  # numbers of a vector for every cosine: 1, or 2 if both numbers of a pair have the same one
    interleaved: bool  # whether neighbours are a pair, or numbers of both halves of the rotated part
    step: int  # distance of the cosines of two pairs


NORM_FORMS = (NormForm(0, False), NormForm(0, True), NormForm(1, True))
# llama, and phi3 with a part of every vector; glm4; cohere2; gpt_oss
ROTARY_FORMS = (RotaryForm(1, False, 1), RotaryForm(1, True, 1), RotaryForm(1, True, 2), RotaryForm(2, False, 1))


@jit()
def _norm_kernel(
    hidden,  # [rows, size]
    residual,  # [rows, size], with HAS_RESIDUAL
    weight,  # [size]
    normed,  # [rows, size]
    total,  # [rows, size], with HAS_RESIDUAL
    size,
    stride,  # of the rows of `hidden`; other rows lie side by side
    epsilon,
    BLOCK_SIZE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    OFFSET: tl.constexpr,
    LATE: tl.constexpr,
):
    """Add the residual to a row, and normalize the sum."""
    column = tl.arange(0, BLOCK_SIZE)
    is_column = column < size
    row = tl.program_id(0).to(tl.int64)
    place = row * size + column
    x = tl.load(hidden + row * stride + column, mask=is_column, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual + place, mask=is_column, other=0.0).to(tl.float32)
        rounded = x.to(total.dtype.element_ty)
        tl.store(total + place, rounded, mask=is_column)
        x = rounded.to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / size + epsilon)
    if not LATE:
        x = x.to(normed.dtype.element_ty).to(tl.float32)
    w = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32) + OFFSET
    tl.store(normed + place, (x * w).to(normed.dtype.element_ty), mask=is_column)


@jit(do_not_specialize=["count", "size", "stride_gate", "stride_up"])
def _gated_kernel(
    gate,  # [rows, size]
    up,  # [rows, size]
    out,  # [rows, size]
    count,
    size,
    stride_gate,
    stride_up,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Multiply activation(gate) by `up`, number by number."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_number = place < count
    row, column = place // size, place % size
    x = tl.load(gate + row * stride_gate + column, mask=is_number, other=0.0).to(tl.float32)
    if ACTIVATION == 0:
        x = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == 1:
        x = 1.0 / (1.0 + tl.exp(-x))
    elif ACTIVATION == 2:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:  # (1 + tanh(y)) / 2 is the logistic function of 2 y
        x = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    x = x.to(out.dtype.element_ty).to(tl.float32)
    y = tl.load(up + row * stride_up + column, mask=is_number, other=0.0).to(tl.float32)
    tl.store(out + place, (x * y).to(out.dtype.element_ty), mask=is_number)


@jit(do_not_specialize=["nodes", "stride_slot_b", "stride_cos_b", "stride_cos_n", "stride_sin_b", "stride_sin_n"])
def _rotate_kernel(
    query,  # [B, H, N, D]
    rotated,  # [B, H, N, D]
    key,  # [B, K, N, D]
    keys,  # [B, K, S, D]
    value,  # [B, K, N, Dv], with WRITES
    values,  # [B, K, S, Dv], with WRITES
    cos,  # [B, N, factors]
    sin,  # [B, N, factors]
    slots,  # [B, N], with WRITES; else a key's slot is its node
    stride_qb,
    stride_qh,
    stride_qn,
    stride_rb,
    stride_rh,
    stride_rn,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_ksb,
    stride_ksh,
    stride_kss,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_vsb,
    stride_vsh,
    stride_vss,
    stride_cos_b,
    stride_cos_n,
    stride_sin_b,
    stride_sin_n,
    stride_slot_b,
    nodes,
    heads,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    STEP: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    WRITES: tl.constexpr,
):
    """Rotate one head of one node, H query heads before K key heads; write a key and its value to their slot."""
    batch, node = (tl.program_id(0) // nodes).to(tl.int64), (tl.program_id(0) % nodes).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    of_cos, of_sin = cos + batch * stride_cos_b + node * stride_cos_n, sin + batch * stride_sin_b + node * stride_sin_n
    if head < heads:
        source = query + batch * stride_qb + head * stride_qh + node * stride_qn
        target = rotated + batch * stride_rb + head * stride_rh + node * stride_rn
        rotate_vector(source, target, of_cos, of_sin, PAIRS, INTERLEAVED, STEP, SIZE, BLOCK_PAIRS, BLOCK_REST)
    else:
        kv_head = head - heads
        slot = node
        if WRITES:
            slot = tl.load(slots + batch * stride_slot_b + node).to(tl.int64)  # unmasked: every node has a slot
            dim = tl.arange(0, BLOCK_VALUE)
            source = value + batch * stride_vb + kv_head * stride_vh + node * stride_vn
            target = values + batch * stride_vsb + kv_head * stride_vsh + slot * stride_vss
            tl.store(target + dim, tl.load(source + dim, mask=dim < VALUE_SIZE, other=0.0), mask=dim < VALUE_SIZE)
        source = key + batch * stride_kb + kv_head * stride_kh + node * stride_kn
        target = keys + batch * stride_ksb + kv_head * stride_ksh + slot * stride_kss
        rotate_vector(source, target, of_cos, of_sin, PAIRS, INTERLEAVED, STEP, SIZE, BLOCK_PAIRS, BLOCK_REST)


@jit()
def rotate_vector(
    source,
    target,
    cos,
    sin,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    STEP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Write one vector with its pairs rotated and its rest unchanged. Products have the dtype of their factors."""
    pair = tl.arange(0, BLOCK_PAIRS)
    is_pair = pair < PAIRS
    if INTERLEAVED:
        first_at, second_at = 2 * pair, 2 * pair + 1
    else:
        first_at, second_at = pair, pair + PAIRS
    first = tl.load(source + first_at, mask=is_pair, other=0.0).to(tl.float32)
    second = tl.load(source + second_at, mask=is_pair, other=0.0).to(tl.float32)
    c = tl.load(cos + pair * STEP, mask=is_pair, other=0.0).to(tl.float32)
    s = tl.load(sin + pair * STEP, mask=is_pair, other=0.0).to(tl.float32)
    dtype = cos.dtype.element_ty
    first_out = (first * c).to(dtype).to(tl.float32) - (second * s).to(dtype).to(tl.float32)
    second_out = (second * c).to(dtype).to(tl.float32) + (first * s).to(dtype).to(tl.float32)
    tl.store(target + first_at, first_out.to(target.dtype.element_ty), mask=is_pair)
    tl.store(target + second_at, second_out.to(target.dtype.element_ty), mask=is_pair)
    if SIZE > 2 * PAIRS:
        rest = 2 * PAIRS + tl.arange(0, BLOCK_REST)
        tl.store(target + rest, tl.load(source + rest, mask=rest < SIZE, other=0.0), mask=rest < SIZE)


@jit()
def _delta_kernel(
    state,  # [B, H, Dk, Dv]
    query,  # [B, 1, H // GROUPS, Dk]
    key,  # [B, 1, H // GROUPS, Dk]
    value,  # [B, 1, H, Dv]
    decay,  # [B, 1, H, Dk]
    beta,  # [B, 1, H]
    out,  # [B, 1, H, Dv]
    last,  # [B, H, Dk, Dv]
    stride_sb,
    stride_sh,
    stride_sk,
    stride_sv,
    stride_qb,
    stride_qh,
    stride_qd,
    stride_kb,
    stride_kh,
    stride_kd,
    stride_vb,
    stride_vh,
    stride_vd,
    stride_gb,
    stride_gh,
    stride_gd,
    stride_bb,
    stride_bh,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    EPSILON: tl.constexpr,
):
    """Take a node into some columns of the state of one head, and read these with its query."""
    batch, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row, column = tl.arange(0, BLOCK_SIZE), tl.program_id(2) * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE)
    is_row, is_column = row < SIZE, column < VALUE_SIZE
    is_number, group = is_row[:, None] & is_column[None, :], head // GROUPS
    place = batch * stride_sb + head * stride_sh + row[:, None] * stride_sk + column[None, :] * stride_sv
    s = tl.load(state + place, mask=is_number, other=0.0)
    q = tl.load(query + batch * stride_qb + group * stride_qh + row * stride_qd, mask=is_row, other=0.0).to(tl.float32)
    k = tl.load(key + batch * stride_kb + group * stride_kh + row * stride_kd, mask=is_row, other=0.0).to(tl.float32)
    g = tl.load(decay + batch * stride_gb + head * stride_gh + row * stride_gd, mask=is_row, other=0.0).to(tl.float32)
    source = value + batch * stride_vb + head * stride_vh
    v = tl.load(source + column * stride_vd, mask=is_column, other=0.0).to(tl.float32)
    b = tl.load(beta + batch * stride_bb + head * stride_bh).to(tl.float32)  # unmasked: every head has one
    if EPSILON > 0.0:
        q = q * tl.rsqrt(tl.sum(q * q, 0) + EPSILON)
        k = k * tl.rsqrt(tl.sum(k * k, 0) + EPSILON)
    s = s * tl.exp(g)[:, None]
    s += k[:, None] * ((v - tl.sum(s * k[:, None], 0)) * b)[None, :]
    read = tl.sum(s * q[:, None], 0) * SIZE**-0.5
    vector = batch * tl.num_programs(1) + head
    tl.store(out + vector * VALUE_SIZE + column, read.to(out.dtype.element_ty), mask=is_column)
    place = (vector * SIZE + row[:, None]) * VALUE_SIZE + column[None, :]
    tl.store(last + place, s, mask=is_number)


def add_norm(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    form: NormForm,
    residual: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the RMS norm of `hidden`, or of `hidden + residual`, which is written to `total`.

    Args:
        hidden (`torch.Tensor` of shape `(..., size)`): One term.
        weight (`torch.Tensor` of shape `(size,)`): Factors, of the same dtype.
        epsilon (`float`): Added to the mean of the squares.
        residual (`torch.Tensor`, *optional*): The other term, contiguous as `hidden` is then.
        total (`torch.Tensor`, *optional*): Likewise.
    """
    size, normed = hidden.shape[-1], torch.empty_like(hidden)
    if hidden.stride(-1) == 1 and hidden.stride() == normed.stride():  # rows side by side, in any order
        stride = size
    else:
        normed, hidden = hidden.new_empty(hidden.shape), _rows(hidden)
        stride = hidden.stride(0)
    block = power_of_two(size)
    with launching_on(hidden):
        _norm_kernel[(normed.numel() // size,)](
            *(hidden, hidden if residual is None else residual, weight, normed, hidden if total is None else total),
            *(size, stride, epsilon),
            BLOCK_SIZE=block,
            HAS_RESIDUAL=residual is not None,
            OFFSET=form.offset,
            LATE=form.late,
            num_warps=min(16, max(1, block // NUMBERS_PER_WARP)),
            **ROUNDED,
        )
    return normed


def gated(activation: str, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return `activation(gate) * up` for tensors of the same shape and dtype; see `ACTIVATIONS`."""
    out, size, count = gate.new_empty(gate.shape), gate.shape[-1], gate.numel()
    gate, up = _rows(gate), _rows(up)
    with launching_on(gate):
        _gated_kernel[(-(-count // BLOCK),)](
            *(gate, up, out, count, size, gate.stride(0), up.stride(0)),
            ACTIVATION=ACTIVATIONS[activation],
            BLOCK=BLOCK,
            num_warps=4,
            **ROUNDED,
        )
    return out


def rotate(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    form: RotaryForm,
    rotated: torch.Tensor,
    keys: torch.Tensor,
    written: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Rotate queries and keys; write values, too, if keys go to a cache.

    Args:
        query (`torch.Tensor` of shape `(B, H, N, D)`): Left as it is.
        key (`torch.Tensor` of shape `(B, K, N, D)`): Likewise.
        cos (`torch.Tensor` of shape `(B or 1, N or 1, factors)`): In the dtype of the queries, or in float32.
        sin (`torch.Tensor` of shape `(B or 1, N or 1, factors)`): Likewise.
        rotated (`torch.Tensor` of shape `(B, H, N, D)`): Gets the queries.
        keys (`torch.Tensor` of shape `(B, K, N or S, D)`): Gets the keys: N rows, or the buffer of a cache.
        written (`tuple`, *optional*): Values `(B, K, N, Dv)`, their buffer `(B, K, S, Dv)`, and the slot of every node
            in both buffers, `(N,)` or `(B, N)`.

    The last stride of every tensor is 1.
    """
    batch, heads, nodes, size = query.shape
    value, values, slots = written or (key, keys, cos)
    cos, sin = cos.expand(batch, nodes, -1), sin.expand(batch, nodes, -1)
    pairs = cos.shape[-1] * form.numbers // 2
    with launching_on(query):
        _rotate_kernel[(batch * nodes, heads + key.shape[1])](
            *(query, rotated, key, keys, value, values, cos, sin, slots),
            *(stride for x in (query, rotated, key, keys, value, values) for stride in x.stride()[:3]),
            *(*cos.stride()[:2], *sin.stride()[:2]),
            *(slots.stride(0) if slots.dim() == 2 else 0, nodes, heads),
            PAIRS=pairs,
            INTERLEAVED=form.interleaved,
            STEP=form.step,
            SIZE=size,
            VALUE_SIZE=value.shape[-1],
            BLOCK_PAIRS=power_of_two(pairs),
            BLOCK_REST=power_of_two(size - 2 * pairs),
            BLOCK_VALUE=power_of_two(value.shape[-1]),
            WRITES=written is not None,
            num_warps=1,
            **ROUNDED,
        )


def delta_rule(
    state: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    epsilon: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output `(B, 1, H, Dv)` of the gated delta rule, and the state after one node. Nothing is written to.

    Args:
        state (`torch.Tensor` of shape `(B, H, Dk, Dv)`): In float32, all others in any dtype.
        query (`torch.Tensor` of shape `(B, 1, H / groups, Dk)`): Neighbouring heads of values share one.
        key (`torch.Tensor` of shape `(B, 1, H / groups, Dk)`): Likewise.
        value (`torch.Tensor` of shape `(B, 1, H, Dv)`): What the state shall return for the key.
        decay (`torch.Tensor` of shape `(B, 1, H)` or `(B, 1, H, Dk)`): Logarithms.
        beta (`torch.Tensor` of shape `(B, 1, H)`): Step sizes.
        epsilon (`float`, *optional*): Added to the squared norms by which queries and keys are divided, if they are.
    """
    rows, heads, size, width = state.shape
    out, last = query.new_empty(rows, 1, heads, width), state.new_empty(state.shape)
    block = power_of_two(size)
    block_value = min(power_of_two(width), max(1, STATE_BLOCK // block))
    decay = decay.reshape(rows, 1, heads, -1).expand(-1, -1, -1, size)
    with launching_on(state):
        _delta_kernel[(rows, heads, -(-width // block_value))](
            *(state, query, key, value, decay, beta, out, last, *state.stride()),
            *(stride for x in (query, key, value, decay, beta) for stride in (x.stride(0), *x.stride()[2:])),
            GROUPS=heads // query.shape[2],
            SIZE=size,
            VALUE_SIZE=width,
            BLOCK_SIZE=block,
            BLOCK_VALUE=block_value,
            EPSILON=epsilon or 0.0,
            num_warps=4,
            **OPTIONS,
        )
    return out, last


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Return `(rows, size)` with a last stride of 1, a view if there is one."""
    flat = x.flatten(0, -2)
    return flat if flat.stride(-1) == 1 else flat.contiguous()
