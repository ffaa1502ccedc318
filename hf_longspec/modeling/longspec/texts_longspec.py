"""LongSpec drafts on whole texts, for training: both attentions of the block as torch computes them best.

Source: LongSpec (https://huggingface.co/papers/2502.17421), section 3.2.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from ...generation.target_modules import TargetParts


def forward_on_texts(
    draft: Any,
    input_ids: torch.LongTensor,
    position_ids: torch.LongTensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    gaps: list[int],
    parts: TargetParts,
) -> torch.Tensor:
    """Return the input `(B, L, hidden)` of the target's head on whole texts, for training.

    Keys and values `(B, K, L, D)` are those of the target's KV layer for these tokens, and gaps the distances, at
    least 1, of each row's queries to their newest visible key. The first `gaps[b]` places of a row attend to no
    key of the target and must not contribute to the loss.
    """
    hidden = parts.embed(input_ids).to(draft.block.input_layernorm.weight.dtype)
    rotary = parts.rotary(position_ids, hidden)

    def attend_self(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return windowed_attention(query, key, value, draft.config.window)

    def attend_target(query: torch.Tensor) -> torch.Tensor:
        return shifted_attention(query, keys.to(query.dtype), values.to(query.dtype), gaps)

    return draft.block(hidden, rotary, parts, attend_self, attend_target)


def windowed_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int) -> torch.Tensor:
    """Compute causal attention in which each position sees the last `window` positions, its own included.

    The text is cut into blocks of `window` positions. A block sees itself and the previous block, so memory and time
    grow with the length, not with its square.
    """
    length = query.shape[2]
    if length <= window:
        return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    blocks = -(-length // window)
    padding = blocks * window - length
    query, key, value = (pad(states, (0, 0, 0, padding)) for states in (query, key, value))
    key_blocks, value_blocks = (_blocks(states, window) for states in (key, value))
    # each block after its predecessor; that of a text's first block is wrong and hidden
    keys, values = (torch.cat([states.roll(1, 0), states], dim=2) for states in (key_blocks, value_blocks))
    position = torch.arange(window, device=query.device)[:, None] + window
    key_position = torch.arange(2 * window, device=query.device)
    mask = ((key_position <= position) & (key_position > position - window)).repeat(
        blocks, 1, 1
    )  # [blocks, window, 2 * window]
    mask[0, :, :window] = False
    mask = mask[:, None].repeat(query.shape[0], 1, 1, 1)
    out = scaled_dot_product_attention(_blocks(query, window), keys, values, attn_mask=mask, enable_gqa=True)
    out = out.unflatten(0, (-1, blocks)).transpose(1, 2).flatten(2, 3)
    return out[:, :, :length]


def shifted_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, gaps: Sequence[int]) -> torch.Tensor:
    """Compute attention in which the query at position t of row b sees the keys at positions up to `t - gaps[b]`.

    This is Flash Noisy Training (LongSpec, https://huggingface.co/papers/2502.17421, section 3.2). Without the
    first queries, which get zeros, and the last keys it is ordinary causal attention, which any flash kernel computes.
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
