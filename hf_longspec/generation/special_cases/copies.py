"""Rows of a batch that have the same prompt, such as the completions of a rollout: it is read once."""

from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from ..cache import SpeculativeCache
from ..call import COPIES, Call, Prompts
from ..special_case import SpecialCase


class PromptsOnce(Prompts):
    """Prompts of which forwards read one row each, whose keys and values the other rows get as a copy.

    Attributes:
        first (`list[int]`): The row of each prompt that is read.
    """

    def __init__(self, call: Call):
        super().__init__(call)
        keys = [tuple(text.tolist()) for text in self.texts]
        prompts = list(dict.fromkeys(keys))
        if not any(self.past_lengths):  # else the rows may differ in what their cache holds
            self.places = [prompts.index(key) for key in keys]
        self.first = [keys.index(key) for key in prompts]

    def run(self, cache: SpeculativeCache, heads: list[torch.Tensor]) -> None:
        """Append keys and values of the beginnings of prompts to a cache."""
        if any(self.past_lengths) or not max(map(len, heads)):
            super().run(cache, heads)
            return
        read = [heads[row] for row in self.first]
        once = SpeculativeCache(self.target.config, len(read), max(map(len, read)), tree_slots=1)
        self.target.prefill(pad_sequence(read, batch_first=True), once, self.chunk_size)
        once.set_lengths([len(head) for head in read])
        for row, place in enumerate(self.places):
            cache.take_row(row, once, place)


class Copies(SpecialCase):
    """Calls with several rows that have the same tokens, if nothing else of the prompts is special."""

    case = COPIES

    def change(self, call: Any) -> None:
        """Read each prompt once."""
        if call.prompts_class is Prompts:
            call.prompts_class = PromptsOnce
