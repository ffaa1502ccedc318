"""The definition of every attention function of a backend, and a slow backend of these functions for tests.

Every backend has these three functions with these signatures and must return the same results. They all take

    query (B, H, N, D)        key (B, K, S, D)        value (B, K, S, Dv)
    scaling: factor of the scores        softcap, optional: scores become softcap * tanh(scores / softcap)

and return `(out, lse)` of shapes `(B, H, N, Dv)` and `(B, H, N)`, `out` in the dtype of the values, `lse` in float32
(float64 for float64 input):

    out[b, h, n] = sum_j softmax_j(score) v_j        lse[b, h, n] = log sum_j exp(score_j)        (natural logarithm)
    score_j = softcap(scaling * q.k_j), over the keys j that query n may see

and `out` 0, `lse` -inf for a query that sees nothing. Keys and values that no query sees may hold anything, NaN
included: in a preallocated cache the slots after the prefix do. Query head h reads key/value head h // (H // K).

B batch, S key slots, N queries, M tree keys, H query heads, K key/value heads, D and Dv sizes of a key and a value.
"""

import torch

from hf_longspec.attention_backends import interface
from hf_longspec.attention_backends.registry import AttentionBackend, register_backend


def prefix_attention(query, key, value, lengths, *, scaling, positions=None, sliding_window=None, softcap=None):
    """N queries see the slots below `lengths[b]`, a [`SeqLens`] with numbers on the device and, if known, on the host.

    With `sliding_window`, query n sees slot j only if `positions[b, n] - j < sliding_window`; positions are `(B, N)`.
    """
    slots = torch.arange(key.shape[2], device=key.device)
    visible = (slots < lengths.on(key.device)[:, None])[:, None, :].expand(-1, query.shape[2], -1)  # [B, N, S]
    if sliding_window is not None:
        visible = visible & (positions[:, :, None] - slots < sliding_window)
    return tree_attention(query, key, value, visible, scaling=scaling, softcap=softcap)


def tree_attention(query, key, value, mask, *, scaling, softcap=None):
    """N queries see those of M keys where the mask `(B, N, M)`, `(B, 1, N, M)` or `(B, H, N, M)` is true.

    A floating point mask is added to the scores; its -inf, or the lowest number of its dtype, hides the key.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    mask = mask[:, None] if mask.dim() == 3 else mask
    visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
    seen = visible.any(dim=1).any(dim=1)[:, None, :, None]  # [B, 1, M, 1]
    groups = query.shape[1] // key.shape[1]
    key = key.to(dtype).masked_fill(~seen, 0.0).repeat_interleave(groups, dim=1)
    value_ = value.to(dtype).masked_fill(~seen, 0.0).repeat_interleave(groups, dim=1)
    scores = query.to(dtype) @ key.transpose(2, 3) * scaling  # [B, H, N, M]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask.dtype != torch.bool:
        scores = scores + mask
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = (scores - lse[..., None]).masked_fill(~visible, -torch.inf).exp()
    return (weights @ value_).to(value.dtype), lse


def causal_attention(query, key, value, *, scaling, sliding_window=None, softcap=None):
    """Query n is position `S - N + n` and sees the positions up to its own, or the last `sliding_window` of them."""
    batch, _, nodes, _ = query.shape
    length = key.shape[2]
    slots = torch.arange(length, device=key.device)
    distance = slots[length - nodes :, None] - slots  # [N, S]
    visible = (distance >= 0) if sliding_window is None else (distance >= 0) & (distance < sliding_window)
    return tree_attention(query, key, value, visible.expand(batch, -1, -1), scaling=scaling, softcap=softcap)


REFERENCE_BACKEND = register_backend(
    AttentionBackend(
        name="hf_longspec_reference",
        prefix_attention=prefix_attention,
        tree_attention=tree_attention,
        causal_attention=causal_attention,
        why_not=lambda call: None,
    )
)
interface.register(REFERENCE_BACKEND)
