"""Merging attention over parts of the keys.

Softmax over a union of key sets needs from each part only its output and the log of its denominator:

    lse = log(sum_p exp(lse_p))        out = sum_p exp(lse_p - lse) * out_p

An attention sink is a logit without a value: it enters the denominator once, whatever the number of parts.
"""

from collections.abc import Sequence

import torch

AttentionState = tuple[torch.Tensor, torch.Tensor]


def merge_attention_states(parts: Sequence[AttentionState], sinks: torch.Tensor | None = None) -> AttentionState:
    """Merge attention over disjoint key sets into attention over their union.

    Args:
        parts (sequence of `(out, lse)`):
            `out` of shape `(B, H, N, Dv)`, `lse` of shape `(B, H, N)`, natural logarithm. A part in which a query sees
            nothing has `out` 0 and `lse` -inf there.
        sinks (`torch.Tensor` of shape `(H,)`, *optional*):
            Sink logits, added once to the denominator.

    Returns:
        `(out, lse)`: `out` in the dtype of the parts, 0 where no part sees anything; `lse` with the sinks included.
        Computed in float32, or in float64 for float64 parts.

    Raises:
        ValueError: If `parts` is empty.
    """
    if not parts:
        raise ValueError("parts is empty, expected at least one (out, lse). See nothing_visible for an empty part.")
    (out, lse), *others = parts
    dtype = out.dtype
    for other_out, other_lse in others:
        # sigmoid(b - a) = exp(b) / (exp(a) + exp(b)); NaN from -inf - -inf, where neither part sees anything
        weight = (other_lse - lse).sigmoid_().nan_to_num_(0.0)
        # float32: the parts are rounded already, and a weight rounded to bfloat16 as well would double the error
        out = torch.lerp(out.to(lse.dtype), other_out.to(lse.dtype), weight.unsqueeze(-1))
        lse = torch.logaddexp(lse, other_lse)
    if sinks is not None:
        sinks = sinks.to(lse.dtype)[:, None]
        out = out * (lse - sinks).sigmoid_().unsqueeze(-1)
        lse = torch.logaddexp(lse, sinks)
    return out.to(dtype), lse


def nothing_visible(query: torch.Tensor, value: torch.Tensor) -> AttentionState:
    """Return the state of queries `(B, H, N, D)` that see no key: `out` 0, `lse` -inf. Merging it changes nothing."""
    shape = query.shape[:3]
    lse = query.new_full(shape, -torch.inf, dtype=torch.promote_types(query.dtype, torch.float32))
    return value.new_zeros((*shape, value.shape[3])), lse


def concatenate(states: Sequence[AttentionState], dim: int) -> AttentionState:
    """Concatenate states of different rows (`dim` 0) or queries (`dim` 2)."""
    if len(states) == 1:
        return states[0]
    return torch.cat([out for out, _ in states], dim=dim), torch.cat([lse for _, lse in states], dim=dim)
