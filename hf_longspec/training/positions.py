"""Positions of rows: how many there are, and long ones in short rows."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel


def anchor_offset_positions(length: int, offsets: Sequence[int], anchors: int) -> torch.Tensor:
    """Positions of rows whose first `anchors` places stay where they are and whose rest is moved by an offset.

    The first tokens of a text attract attention at every length; anchored, they remain at the positions where the
    target knows them, while the others take positions that short rows would never reach.

    Args:
        length (`int`): Places of a row.
        offsets (`Sequence[int]`): One per row, at least 0.
        anchors (`int`): Places that are not moved.

    Returns:
        `torch.LongTensor` of shape `(B, length)`.

    Source: LongSpec (https://huggingface.co/papers/2502.17421), section 3.2, Anchor-Offset Indices.

    >>> anchor_offset_positions(6, [0, 100], anchors=2).tolist()
    [[0, 1, 2, 3, 4, 5], [0, 1, 102, 103, 104, 105]]
    """
    places = torch.arange(length)
    return places + torch.tensor(offsets)[:, None] * (places >= anchors)


def position_limit(target: PreTrainedModel) -> int | None:
    """Positions that a target has, if its configuration says so."""
    return getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)


def check_length(length: int, limit: int | None) -> None:
    """Refuse a row of `length` tokens if a target has fewer positions.

    Raises:
        ValueError: With both numbers.
    """
    if limit is not None and length > limit:
        raise ValueError(
            f"a row has {length} tokens, and the target has {limit} positions (max_position_embeddings): set "
            "max_length, or cut the rows."
        )
