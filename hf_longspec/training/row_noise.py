"""What is drawn for every row of a training step: gaps, and the offsets of positions (Anchor-Offset Indices).

Source: LongSpec (https://huggingface.co/papers/2502.17421), section 3.2.
"""

import hashlib
from bisect import bisect
from collections.abc import Sequence
from itertools import accumulate

import torch

# Assumed share of drafted tokens that are accepted, for gaps drawn by the chance that their level is reached.
ACCEPTED = 0.6


class RowNoise:
    """Draws a gap and an offset for every row of a step.

    A generator that is seeded with the run's seed and the number of the step draws for all rows of the step. Each
    process uses the draws of its own rows, by their index in the step. So a resumed run draws the same as an
    uninterrupted one, no two rows share a draw, and the result does not depend on how a step is divided over processes
    and gradient accumulation. Offsets are drawn uniformly from 0 to `max_offset`, within `position_limit`.
    """

    def __init__(
        self,
        seed: int,
        gaps: Sequence[int],
        position_limit: int | None,
        max_offset: int | None,
        distribution: str = "uniform",
    ):
        if len(gaps) != 2 or not 1 <= gaps[0] <= gaps[1]:
            raise ValueError(
                f"noise_range={list(gaps)}: expected the smallest gap, at least 1, and the largest, such as [1, 5] for "
                "a tree of depth 5."
            )
        if position_limit is None and max_offset is None:
            raise ValueError("the target's config has no max_position_embeddings to bound the offsets: set max_offset.")
        self.seed = seed
        self.gaps = int(gaps[0]), int(gaps[1])
        share = ACCEPTED if distribution == "reached" else 1.0
        self._cumulative = list(accumulate(share**level for level in range(self.gaps[1] - self.gaps[0] + 1)))
        self.position_limit = position_limit
        self.max_offset = max_offset

    def draw(self, step: int, total: int, rows: Sequence[int], lengths: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the gaps and the offsets of some rows of a step."""
        generator = torch.Generator().manual_seed(mixed(self.seed, step))
        table = torch.rand(total, 2, generator=generator, dtype=torch.float64)[list(rows)].tolist()
        total_weight = self._cumulative[-1]
        gaps = [self.gaps[0] + bisect(self._cumulative, share * total_weight) for share, _ in table]
        offsets = [int(share * (self.room(length) + 1)) for (_, share), length in zip(table, lengths, strict=True)]
        return gaps, offsets

    def room(self, length: int) -> int:
        """Return the largest offset of a row of `length` tokens, which are no more than the limit."""
        if self.position_limit is None:
            return self.max_offset or 0
        room = self.position_limit - length
        return room if self.max_offset is None else min(room, self.max_offset)


def mixed(*numbers: int) -> int:
    """Hash several numbers into one seed. Sums and products of small numbers would collide."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=7).digest())


def anchor_offset_positions(length: int, offsets: Sequence[int], anchors: int) -> torch.Tensor:
    """Compute positions `(B, length)`: the first `anchors` are unchanged, later ones shifted by the row's offset.

    The first tokens of a text attract attention at every length (attention sinks). They keep the positions at which the
    target expects them, while the other tokens get positions that short rows would never reach.

    Source: LongSpec (https://huggingface.co/papers/2502.17421), section 3.2, Anchor-Offset Indices.

    >>> anchor_offset_positions(6, [0, 100], anchors=2).tolist()
    [[0, 1, 2, 3, 4, 5], [0, 1, 102, 103, 104, 105]]
    """
    places = torch.arange(length)
    return places + torch.tensor(offsets)[:, None] * (places >= anchors)
