# Published with a draft by hf_longspec, Apache-2.0.
"""Attention that can be trained through, for a model that is loaded with this implementation and then fine-tuned.

The backends return a log-sum-exp, for which the fused ops have no gradient. This path costs the memory of ordinary
attention and is taken only when a gradient or dropout is wanted.
"""

import torch
from torch.nn.functional import dropout as drop
from torch.nn.functional import scaled_dot_product_attention


def differentiable_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    causal: bool,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Attention with gradients.

    Args:
        query (`torch.Tensor` of shape `(B, H, N, D)`): Queries.
        key (`torch.Tensor` of shape `(B, K, S, D)`): Keys.
        value (`torch.Tensor` of shape `(B, K, S, Dv)`): Values.
        mask (`torch.Tensor` of shape `(B, 1 or H, N, S)`, *optional*): Boolean or additive, everything included.
        causal (`bool`): Without a mask: query n is position `S - N + n` and sees no later one.
        scaling (`float`): Factor of the scores.
        sliding_window (`int`, *optional*): Without a mask: each query sees the last `sliding_window` positions.
        softcap (`float`, *optional*): Scores become `softcap * tanh(scores / softcap)`.
        sinks (`torch.Tensor` of shape `(H,)`, *optional*): Sink logits.
        dropout (`float`, *optional*, defaults to 0.0): Dropout probability of the weights.

    Returns:
        `torch.Tensor` of shape `(B, H, N, Dv)`, 0 for queries that see nothing.
    """
    nodes, length = query.shape[2], key.shape[2]
    plain = mask is None and softcap is None and sinks is None
    if plain and (not causal or (nodes == length and (sliding_window is None or sliding_window >= length))):
        return scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=causal, scale=scaling, enable_gqa=True
        )
    if mask is None and causal:
        distance = torch.arange(length - nodes, length, device=query.device)[:, None]
        distance = distance - torch.arange(length, device=query.device)
        mask = distance >= 0 if sliding_window is None else (distance >= 0) & (distance < sliding_window)
    weights = _weights(query, key, mask, scaling, softcap, sinks)
    groups = query.shape[1] // value.shape[1]
    return drop(weights, dropout).to(value.dtype) @ value.repeat_interleave(groups, dim=1)


def _weights(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention weights `(B, H, N, S)` in float32 or better."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = (query @ key.transpose(2, 3)).to(torch.promote_types(query.dtype, torch.float32)) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    visible = None
    if mask is not None:
        visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
        scores = scores if mask.dtype == torch.bool else scores + mask
        # not -inf: softmax of a row of -inf is NaN, forward and backward
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    if sinks is not None:
        column = sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        weights = torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return weights if visible is None else weights.masked_fill(~visible, 0.0)
