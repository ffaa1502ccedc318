"""Partial attention results, put together: all splits of the prefix, the tree and the sinks in one pass.

    lse = log sum_p exp(lse_p) (+ exp(sink))        out = sum_p exp(lse_p - lse) out_p
    reference: merge.py
"""

from __future__ import annotations

import torch

from .triton_config import power_of_two
from .triton_runtime import jit, launching_on, output_dtype, tl
from .triton_softmax import LN_2, LOG2_E

BLOCK_PARTS = 16


@jit(do_not_specialize=["nodes", "parts"])
def combine_kernel(
    out,  # [B, H, N, parts, Dv], float32; not read where lse is -inf
    lse,  # [B, H, N, parts], float32, base 2
    sinks,  # [H], with HAS_SINKS
    merged,  # [B, N, H, Dv]
    merged_lse,  # [B, H, N], float32, natural
    heads,
    nodes,
    parts,
    VALUE_SIZE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    state = tl.program_id(0).to(tl.int64)
    head = state // nodes % heads
    value_dim, offset = tl.arange(0, BLOCK_VALUE), tl.arange(0, BLOCK_PARTS)
    acc = tl.zeros([BLOCK_VALUE], tl.float32)
    one = tl.arange(0, 1)
    if HAS_SINKS:  # a logit without a value
        highest = tl.load(sinks + head + one, mask=one < 1).to(tl.float32) * LOG2_E
        total = tl.full([1], 1.0, tl.float32)
    else:
        highest = tl.full([1], float("-inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
    for start in range(0, parts, BLOCK_PARTS):
        part = start + offset
        part_lse = tl.load(lse + state * parts + part, mask=part < parts, other=float("-inf"))
        is_value = (part_lse > float("-inf"))[:, None] & (value_dim < VALUE_SIZE)[None, :]
        where = (state * parts + part)[:, None] * VALUE_SIZE + value_dim[None, :]
        part_out = tl.load(out + where, mask=is_value, other=0.0)  # [parts, Dv]
        new = tl.maximum(highest, tl.max(part_lse, 0))
        shift = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp2(part_lse - shift)  # [parts]
        decay = tl.exp2(highest - shift)
        acc = acc * decay + tl.sum(part_out * weights[:, None], 0)
        total = total * decay + tl.sum(weights, 0)
        highest = new
    some = total > 0.0
    divisor = tl.where(some, total, 1.0)
    row = (state // nodes // heads * nodes + state % nodes) * heads + head
    dtype = merged.dtype.element_ty
    tl.store(merged + row * VALUE_SIZE + value_dim, (acc / divisor).to(dtype), mask=value_dim < VALUE_SIZE)
    natural = tl.where(some, (highest + tl.log2(divisor)) * LN_2, float("-inf"))
    tl.store(merged_lse + state + one, natural, mask=one < 1)


def launch_combine(
    out: torch.Tensor, lse: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge partial results.

    Args:
        out (`torch.Tensor` of shape `(B, H, N, parts, Dv)`): Partial outputs; not read where `lse` is -inf. float32.
        lse (`torch.Tensor` of shape `(B, H, N, parts)`): Log-sum-exp in base 2. float32.
        value (`torch.Tensor`): Its dtype is that of the result.
        sinks (`torch.Tensor` of shape `(H,)`, *optional*): Sink logits.

    Returns:
        `(out, lse)` of shapes `(B, H, N, Dv)`, `(B, N, H, Dv)` in memory as a model needs it next, and `(B, H, N)`.
    """
    batch, heads, nodes, parts, size = out.shape
    merged = torch.empty(batch, nodes, heads, size, dtype=output_dtype(value), device=value.device)
    merged_lse = torch.empty(batch, heads, nodes, dtype=torch.float32, device=value.device)
    if merged.numel():
        with launching_on(out):
            combine_kernel[(batch * heads * nodes,)](
                out,
                lse,
                lse if sinks is None else sinks,
                merged,
                merged_lse,
                heads,
                nodes,
                parts,
                VALUE_SIZE=size,
                BLOCK_VALUE=power_of_two(size),
                BLOCK_PARTS=BLOCK_PARTS,
                HAS_SINKS=sinks is not None,
                num_warps=4,
            )
    return merged.to(value.dtype).transpose(1, 2), merged_lse
