"""What is random about a row of training: its gap and its offset."""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from .documents import IGNORED
from .positions import anchor_offset_positions, check_length


class RowNoise:
    """Draws a gap and an offset for every row of a step.

    One generator, seeded with the run's seed and the number of the step, draws for all rows of the step. Each process
    takes those of its rows, by their number in the step. So a resumed run draws what an unbroken run draws, no two
    rows share a draw, and how the step is divided over processes and accumulation changes nothing.

    Args:
        seed (`int`): Seed of the run.
        gaps (`Sequence[int]`): Smallest and largest gap, drawn uniformly.
        position_limit (`int`, *optional*): Positions that the target has.
        max_offset (`int`, *optional*): Largest offset, drawn uniformly from 0 on; at most what the target has.

    Raises:
        ValueError: If gaps or offsets have no bounds that they could be drawn between.
    """

    def __init__(self, seed: int, gaps: Sequence[int], position_limit: int | None, max_offset: int | None):
        if len(gaps) != 2 or not 1 <= gaps[0] <= gaps[1]:
            raise ValueError(
                f"noise_range={list(gaps)}: expected the smallest and the largest gap, the smallest at least 1, such "
                "as [1, 5] for a tree of depth 5."
            )
        if position_limit is None and max_offset is None:
            raise ValueError(
                "the target's configuration has no max_position_embeddings, so offsets have no range: set max_offset."
            )
        self.seed = seed
        self.gaps = int(gaps[0]), int(gaps[1])
        self.position_limit = position_limit
        self.max_offset = max_offset

    def draw(self, step: int, total: int, rows: Sequence[int], lengths: Sequence[int]) -> tuple[list[int], list[int]]:
        """Gaps and offsets of some rows of a step.

        Args:
            step (`int`): Number of the step.
            total (`int`): Rows of the step in all processes.
            rows (`Sequence[int]`): Numbers of the wanted rows among them.
            lengths (`Sequence[int]`): Tokens of the wanted rows.
        """
        generator = torch.Generator().manual_seed(mixed(self.seed, step))
        table = torch.rand(total, 2, generator=generator, dtype=torch.float64)[list(rows)].tolist()
        low, high = self.gaps
        gaps = [low + int(share * (high - low + 1)) for share, _ in table]
        offsets = [int(share * (self.room(length) + 1)) for (_, share), length in zip(table, lengths, strict=True)]
        return gaps, offsets

    def room(self, length: int) -> int:
        """Largest offset of a row of `length` tokens.

        Raises:
            ValueError: If the target has fewer positions.
        """
        check_length(length, self.position_limit)
        if self.position_limit is None:
            return self.max_offset or 0
        room = self.position_limit - length
        return room if self.max_offset is None else min(room, self.max_offset)


def mixed(*numbers: int) -> int:
    """One seed of several numbers, without the regularities of sums and products."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=7).digest())


def with_noise(batch: dict[str, Any], gaps: list[int], offsets: list[int], anchors: int) -> dict[str, Any]:
    """A batch with `gaps`, `position_ids` (unless it has them already) and labels without those that no key precedes.

    Args:
        batch (`dict[str, Any]`): With `input_ids` and `labels` `(B, L)`.
        gaps (`list[int]`): One per row.
        offsets (`list[int]`): One per row.
        anchors (`int`): Places that offsets do not move.
    """
    positions = batch.get("position_ids")  # rows of a KV store are bound to theirs
    if positions is None:
        positions = anchor_offset_positions(batch["input_ids"].shape[1], offsets, anchors)
    return {**batch, "gaps": gaps, "position_ids": positions, "labels": without_keyless(batch["labels"], gaps)}


def without_keyless(labels: torch.Tensor, gaps: list[int]) -> torch.Tensor:
    """Labels `(B, L)` without those predicted at places that see no key of the target: the first `gap` of a row.

    >>> without_keyless(torch.tensor([[5, 6, 7, 8]]), [2]).tolist()
    [[-100, -100, -100, 8]]
    """
    places = torch.arange(labels.shape[1], device=labels.device)
    # place t predicts the label at t + 1
    return labels.masked_fill(places <= torch.tensor(gaps, device=labels.device)[:, None], IGNORED)
