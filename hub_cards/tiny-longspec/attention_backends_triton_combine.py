# Published with a draft by hf_longspec, Apache-2.0.
"""Partial attention results, put together: all splits of the prefix, the tree and the sinks in one pass.

lse = log sum_p exp(lse_p) (+ exp(sink))        out = sum_p exp(lse_p - lse) out_p
reference: merge.py
"""

from __future__ import annotations

import torch

from .attention_backends_triton_config import power_of_two
from .attention_backends_triton_runtime import jit, launching_on, output_dtype, tl
from .attention_backends_triton_softmax import LN_2, LOG2_E, finish

# One result per program: a verification has hundreds of them. The parts of a result are read 16 at a time.
BLOCK_STATES = 1
BLOCK_PARTS = 16


@jit(do_not_specialize=["states", "nodes", "parts"])
def combine_kernel(
    out,  # [B, H, N, parts, Dv], float32; not read where lse is -inf
    lse,  # [B, H, N, parts], float32, base 2
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
):
    state = tl.program_id(0).to(tl.int64) * BLOCK_STATES + tl.arange(0, BLOCK_STATES)  # [states]
    is_state = state < states
    head = state // nodes % heads
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
        part_out = tl.load(out + cell, mask=where, other=0.0)  # [states, parts, Dv]
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
    states = batch * heads * nodes
    if states:
        with launching_on(out):
            combine_kernel[(-(-states // BLOCK_STATES),)](
                out,
                lse,
                lse if sinks is None else sinks,
                merged,
                merged_lse,
                states,
                heads,
                nodes,
                parts,
                VALUE_SIZE=size,
                BLOCK_VALUE=power_of_two(size),
                BLOCK_STATES=BLOCK_STATES,
                BLOCK_PARTS=BLOCK_PARTS,
                HAS_SINKS=sinks is not None,
                num_warps=4,
            )
    return merged.to(value.dtype).transpose(1, 2), merged_lse
