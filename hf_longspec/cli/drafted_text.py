"""Which parts of a text were drafted: the tokens of every verification, as text, while they arrive."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from ..generation.stats import SpeculationStats
from ..streaming import IncrementalDecoder


@dataclass(frozen=True)
class StepText:
    """What one verification emitted.

    A character that several tokens spell together belongs to the last of them, special tokens have no text.

    Args:
        drafted (`str`): Of the accepted drafted tokens.
        own (`str`): Of the one token that the target contributed.
        num_accepted (`int`): Drafted tokens that were emitted.
        num_drafted (`int`): Drafted tokens that were verified.
    """

    drafted: str
    own: str
    num_accepted: int
    num_drafted: int


class DraftedTextStreamer(BaseStreamer):
    """Tells the text of one row verification by verification.

    The loop streams the tokens of a step before it has recorded it, so a step is told when the next one begins.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Decodes.
        stats (`Callable`): Returns the statistics of the running call.
        tell (`Callable[[StepText], None]`): Called with every step. The first is the token that the prompt's own
            forward gave. What an interruption kept from being recorded comes as the target's own.
    """

    def __init__(self, tokenizer: Any, stats: Callable[[], SpeculationStats], tell: Callable[[StepText], None]):
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=True)
        self._stats = stats
        self._tell = tell
        self._expects_prompt = True
        self._waiting: list[int] = []
        self._told = 0

    def put(self, value: torch.Tensor) -> None:
        """Called by `generate` with the prompt, then with every token."""
        if self._expects_prompt:
            self._expects_prompt = False
            return
        self._tell_recorded()
        self._waiting += value.flatten().tolist()

    def end(self) -> None:
        """Called by `generate` behind the last token."""
        self._tell_recorded()
        for token in self._waiting:
            self._tell(StepText("", self._decoder.feed(token), 0, 0))
        self._waiting = []
        if rest := self._decoder.end():
            self._tell(StepText("", rest, 0, 0))

    def _tell_recorded(self) -> None:
        """Tell the steps whose tokens have arrived and that are recorded; step 0 is the prompt's token."""
        emitted, drafted = (rows[0] if rows else [] for rows in self._recorded())
        while self._waiting and self._told <= len(emitted):
            number = self._told - 1
            count, proposed = (1, 0) if number < 0 else (emitted[number], drafted[number])
            if len(self._waiting) < count:  # an interruption stopped the stream inside the step
                return
            pieces = [self._decoder.feed(token) for token in self._waiting[:count]]
            del self._waiting[:count]
            self._told += 1
            self._tell(StepText("".join(pieces[:-1]), pieces[-1], count - 1, proposed))

    def _recorded(self) -> tuple[list[Any], list[Any]]:
        stats = self._stats()
        return stats.emitted_per_step, stats.drafted_per_step
