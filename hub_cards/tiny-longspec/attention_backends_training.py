# Published with a draft by hf_longspec, Apache-2.0.
"""Attention over whole texts with gradients: what training a draft needs, without a mask of the text's size.

Both functions take grouped heads and run on any fused attention that knows causal masks.
"""

from collections.abc import Sequence

import torch
from torch.nn.functional import pad, scaled_dot_product_attention


def windowed_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int) -> torch.Tensor:
    """Causal attention in which each place sees the last `window` places, its own included.

    The text is cut into blocks of `window` places; a block sees itself and the block before, so memory and time grow
    with the length, not with its square.

    Args:
        query (`torch.Tensor` of shape `(B, H, L, D)`): Queries.
        key (`torch.Tensor` of shape `(B, K, L, D)`): Keys.
        value (`torch.Tensor` of shape `(B, K, L, D)`): Values.
        window (`int`): Places that a query sees.

    Returns:
        `torch.Tensor` of shape `(B, H, L, D)`.
    """
    length = query.shape[2]
    if length <= window:
        return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    blocks = -(-length // window)
    rest = blocks * window - length
    query, key, value = (pad(states, (0, 0, 0, rest)) for states in (query, key, value))
    query_blocks = _blocks(query, window)
    key_blocks, value_blocks = (_with_previous(_blocks(states, window)) for states in (key, value))
    mask = _band(blocks, window, query.device).repeat(query.shape[0], 1, 1, 1)
    out = scaled_dot_product_attention(query_blocks, key_blocks, value_blocks, attn_mask=mask, enable_gqa=True)
    out = out.unflatten(0, (-1, blocks)).transpose(1, 2).flatten(2, 3)
    return out[:, :, :length]


def shifted_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, gaps: Sequence[int]) -> torch.Tensor:
    """Attention in which the query at place t of row b sees the keys at places up to `t - gaps[b]`.

    This is Flash Noisy Training (LongSpec, https://huggingface.co/papers/2502.17421, section 3.2): dropping the first
    queries and the last keys leaves an ordinary causal attention, so that any flash kernel computes it.

    Args:
        query (`torch.Tensor` of shape `(B, H, L, D)`): Queries.
        key (`torch.Tensor` of shape `(B, K, L, D)`): Keys.
        value (`torch.Tensor` of shape `(B, K, L, D)`): Values.
        gaps (`Sequence[int]`): One per row, at least 0.

    Returns:
        `torch.Tensor` of shape `(B, H, L, D)`; zeros where a query sees no key.
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
    """`(B, H, L, D)` to `(B * L / size, H, size, D)`."""
    return states.unflatten(2, (-1, size)).transpose(1, 2).flatten(0, 1)


def _with_previous(blocks: torch.Tensor) -> torch.Tensor:
    """Each block behind its predecessor; the mask hides what is the predecessor of a text's first block."""
    return torch.cat([blocks.roll(1, 0), blocks], dim=2)


def _band(blocks: int, window: int, device: torch.device) -> torch.Tensor:
    """`(blocks, 1, window, 2 * window)`: which of its own block's and the previous block's places each place sees."""
    place = torch.arange(window, device=device)[:, None] + window
    seen = torch.arange(2 * window, device=device)
    mask = ((seen <= place) & (seen > place - window)).repeat(blocks, 1, 1)
    mask[0, :, :window] = False
    return mask[:, None]
