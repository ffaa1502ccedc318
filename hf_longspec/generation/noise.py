"""Noise for sampling: one row of random numbers per batch row and position, so that a draw does not depend on steps."""

from collections.abc import Sequence
from typing import Any

import torch

from .verification import draw_noise

# Rows of noise that are drawn at once. Fewer would be more launches on a GPU, more would be wasted by short texts.
BLOCK = 8


class NoiseRows:
    """Noise for sampling: row t of a batch row decides its t-th generated token.

    Every batch row has its own generator, seeded from the default one, and draws its noise rows in the order of its
    positions. Rows that a step did not use are kept. The sampled text therefore depends on the seed alone, not on the
    draft tree, the other rows or where a rejection happened.

    Args:
        batch_size (`int`): Number of batch rows.
        vocab_size (`int`): Length of a noise row.
        device (`torch.device`): Where the noise lives.
        ranks ([`Ranks`], *optional*): Processes that must draw the same noise; they use the first one's seeds.

    Attributes:
        generator (`torch.Generator`): For draws that need not be tied to a position.
    """

    def __init__(self, batch_size: int, vocab_size: int, device: torch.device, ranks: Any = None):
        seeds = torch.randint(2**62, (batch_size + 1,)).tolist()
        if ranks is not None:
            seeds = ranks.first(seeds)
        self.vocab_size = vocab_size
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seeds[0])
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds[1:]]
        self._kept: list[list[torch.Tensor]] = [[] for _ in range(batch_size)]

    def rows(self, count: int) -> torch.Tensor:
        """Return the noise `(batch, count, vocab)` of the next `count` tokens of every row. Do not write to it."""
        for generator, kept in zip(self._generators, self._kept, strict=True):
            # Blocks of one size: on a GPU the random numbers depend on the size of the draw, which must not depend on
            # the step.
            while len(kept) < count:
                kept += draw_noise(BLOCK, self.vocab_size, generator=generator, device=self.device).unbind()
        wanted = [noise for kept in self._kept for noise in kept[:count]]
        noise = wanted[0] if len(wanted) == 1 else torch.stack(wanted)
        return noise.view(-1, count, self.vocab_size)

    def advance(self, counts: Sequence[int]) -> None:
        """Forget the noise of tokens that have been emitted."""
        for kept, count in zip(self._kept, counts, strict=True):
            del kept[:count]
