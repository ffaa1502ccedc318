"""The forwards of plain `generate`, for layers whose results depend on what else is in a forward."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...attention_backends.lengths import on_device
from ..call import Call, Prompts


@dataclass
class PlainForwards:
    """The forwards in which plain `generate` runs the tokens of a call: prompts in chunks, then one column each."""

    lags: tuple[int, ...]  # padding before the tokens of each row
    stored: int  # columns that the cache of plain `generate` held before the call
    prompt: int  # columns of the prompts
    chunk: int  # columns of a forward of the prompts
    # how many tokens of each row the prefill runs, if it runs rows of different lengths right-padded
    padded: list[int] | None = None

    def num_keys(self, columns: Tensor) -> Tensor:
        """Return the number of keys in the forward of the tokens in these columns."""
        ends = self.stored + ((columns - self.stored) // self.chunk + 1) * self.chunk
        is_prompt = (columns >= self.stored) & (columns < self.prompt)
        return torch.where(is_prompt, ends.clamp_max(self.prompt), columns + 1)

    def are_steps(self, places: Tensor) -> Tensor:
        """Return which tokens at `places` `(B, N)` of their texts run in forwards of one column after a state."""
        columns = places + on_device(self.lags, places.device)[:, None]
        begins = columns - (columns - self.stored) % self.chunk
        is_alone = (columns < self.stored) | (columns >= self.prompt) | (self.num_keys(columns) - begins == 1)
        return is_alone & (columns > 0)


class PromptsOfForwards(Prompts):
    """Prompts of targets whose layers depend on the forwards of plain `generate`."""

    def __init__(self, call: Call):
        super().__init__(call)
        width = self.input_ids.shape[1]
        lags = tuple(width - len(text) for text in self.texts)
        # plain `generate` runs the padding after rows that have ended, so its cache has the columns of the longest row
        stored = max((held + lag for held, lag in zip(self.past_lengths, lags, strict=True) if held), default=0)
        self.plain = PlainForwards(lags, stored, width, self.chunk_size or width)

    def begin(self, cache: Any) -> None:
        super().begin(cache)
        cache.rows.plain = self.plain
