# Published with a draft by hf_longspec, Apache-2.0.
"""Attention by plain matrix products over blocks of keys: what no fused op does, on any device.

    never materialized: scores of more than BLOCK_KEYS keys; repeated keys or values
    the blocks of keys are merged by log-sum-exp as they come (merge.py)

Everything is computed in float32 (float64 for float64 input): on CPU a small bfloat16 product is 15 times slower than
the float32 one (250 against 17 microseconds for 68 x 32 by 32 x 68, torch 2.13, AMD EPYC with AVX2), and scores rounded
to bfloat16 would cost accuracy.
"""

import torch

from .attention_backends_masks import KeyMask
from .attention_backends_merge import AttentionState, merge_attention_states, nothing_visible

BLOCK_KEYS = (
    2048  # the scores of 17 nodes x 32 heads are 4 MB; in shorter blocks calling the ops costs more than they do
)


def blockwise_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: KeyMask | None = None,
    *,
    scaling: float,
    softcap: float | None = None,
) -> AttentionState:
    """Attention of all queries to all keys, or to those a mask leaves.

    Args:
        query (`torch.Tensor` of shape `(B, H, N, D)`): Queries.
        key (`torch.Tensor` of shape `(B, K, M, D)`): Keys.
        value (`torch.Tensor` of shape `(B, K, M, Dv)`): Values.
        mask (`Callable`, *optional*):
            `mask(start, stop)` is the additive mask of those keys, `(B or 1, H or 1, N, stop - start)`.
        scaling (`float`): Factor of the scores.
        softcap (`float`, *optional*): Scores become `softcap * tanh(scores / softcap)`.

    Returns:
        `(out, lse)` of shapes `(B, H, N, Dv)` and `(B, H, N)`.
    """
    length = key.shape[2]
    state = nothing_visible(query, value)
    if length == 0 or query.numel() == 0:
        return state
    scaled = query.to(state[1].dtype) * scaling
    if torch.compiler.is_compiling():  # the number of blocks would be compiled in, and with it the length
        keys, values = key.to(scaled.dtype), value.to(scaled.dtype)
        out, lse = _attend_block(scaled, keys, values, None if mask is None else mask(0, length), softcap)
        return out.to(value.dtype), lse
    for start in range(0, length, BLOCK_KEYS):
        stop = min(start + BLOCK_KEYS, length)
        keys, values = (x[:, :, start:stop].to(scaled.dtype) for x in (key, value))
        part = _attend_block(scaled, keys, values, None if mask is None else mask(start, stop), softcap)
        state = part if start == 0 else merge_attention_states([state, part])
    return state[0].to(value.dtype), state[1]


def _attend_block(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, softcap: float | None
) -> AttentionState:
    (batch, heads, nodes, size), kv_heads = query.shape, key.shape[1]
    packed = query.reshape(batch, kv_heads, -1, size)  # the query heads of a key head are just more rows
    scores = (packed @ key.transpose(2, 3)).view(batch, heads, nodes, -1)
    if softcap is not None:
        scores = (scores / softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores = scores + mask
    lse = torch.logsumexp(scores, dim=-1)
    shift = lse if mask is None else lse.masked_fill(lse == -torch.inf, 0.0)
    weights = (scores - shift[..., None]).exp_()
    out = weights.view(batch, kv_heads, heads // kv_heads * nodes, -1) @ value
    return out.view(batch, heads, nodes, -1), lse
