"""Attention with gradients: for fine-tuning a model on this implementation, and for training a draft on whole texts.

`differentiable_attention` is the path of `interface.py` when a gradient or dropout is wanted. The backends return a
log-sum-exp, for which the fused ops have no gradient. This path costs the memory of ordinary attention.

`windowed_attention` and `shifted_attention` attend over whole texts without a mask of the text's size, on any fused
attention with causal masks. Queries and outputs are `(B, H, L, D)`, keys and values `(B, K, L, D)`.
"""

from collections.abc import Sequence

import torch
from torch.nn.functional import dropout as drop
from torch.nn.functional import pad, scaled_dot_product_attention


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
    """Compute attention with gradients; other arguments as in `AttentionBackend`.

    Args:
        mask (`torch.Tensor` of shape `(B, 1 or H, N, S)`, *optional*): Boolean or additive, everything included.
        causal (`bool`): Without a mask: query n is position `S - N + n` and sees no later one.
        sliding_window (`int`, *optional*): Without a mask: each query sees the last `sliding_window` positions.
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
    groups = query.shape[1] // key.shape[1]
    products = query @ key.repeat_interleave(groups, dim=1).transpose(2, 3)
    scores = products.to(torch.promote_types(query.dtype, torch.float32)) * scaling  # [B, H, N, S]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    visible = None
    if mask is not None:
        visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
        scores = scores if mask.dtype == torch.bool else scores + mask
        # not -inf: softmax of a row of -inf is NaN, forward and backward
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    if sinks is not None:
        column = sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(scores.shape[0], -1, nodes, 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(dim=-1)[..., :length]
    if visible is not None:
        weights = weights.masked_fill(~visible, 0.0)
    return drop(weights, dropout).to(value.dtype) @ value.repeat_interleave(groups, dim=1)


def windowed_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int) -> torch.Tensor:
    """Compute causal attention in which each position sees the last `window` positions, its own included.

    The text is cut into blocks of `window` positions. A block sees itself and the previous block, so memory and time
    grow with the length, not with its square.

    Args:
        window (`int`): Number of positions that a query sees.
    """
    length = query.shape[2]
    if length <= window:
        return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    blocks = -(-length // window)
    rest = blocks * window - length
    query, key, value = (pad(states, (0, 0, 0, rest)) for states in (query, key, value))
    key_blocks, value_blocks = (_blocks(states, window) for states in (key, value))
    # each block after its predecessor; that of a text's first block is wrong and hidden
    keys, values = (torch.cat([states.roll(1, 0), states], dim=2) for states in (key_blocks, value_blocks))
    position = torch.arange(window, device=query.device)[:, None] + window
    seen = torch.arange(2 * window, device=query.device)
    mask = ((seen <= position) & (seen > position - window)).repeat(blocks, 1, 1)  # [blocks, window, 2 * window]
    mask[0, :, :window] = False
    mask = mask[:, None].repeat(query.shape[0], 1, 1, 1)
    out = scaled_dot_product_attention(_blocks(query, window), keys, values, attn_mask=mask, enable_gqa=True)
    out = out.unflatten(0, (-1, blocks)).transpose(1, 2).flatten(2, 3)
    return out[:, :, :length]


def shifted_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, gaps: Sequence[int]) -> torch.Tensor:
    """Compute attention in which the query at position t of row b sees the keys at positions up to `t - gaps[b]`.

    This is Flash Noisy Training (LongSpec, https://huggingface.co/papers/2502.17421, section 3.2). Without the
    first queries and the last keys it is ordinary causal attention, which any flash kernel computes.

    Args:
        gaps (`Sequence[int]`): One per row, at least 0. The first queries see no key and get zeros.
    """
    length, rows = query.shape[2], []
    for row, gap in enumerate(gaps):
        gap = min(gap, length)
        one = slice(row, row + 1)
        shifted = scaled_dot_product_attention(
            query[one, :, gap:],
            key[one, :, : length - gap],
            value[one, :, : length - gap],
            is_causal=True,
            enable_gqa=True,
        )
        rows.append(pad(shifted, (0, 0, gap, 0)))
    return torch.cat(rows)


def _blocks(states: torch.Tensor, size: int) -> torch.Tensor:
    """Reshape `(B, H, L, D)` to `(B * L / size, H, size, D)`."""
    return states.unflatten(2, (-1, size)).transpose(1, 2).flatten(0, 1)
