"""What a call returns: sequences, and scores and logits per position if they are asked for."""

from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .sampling import along_path
from .sequences import Sequences
from .stats import SpeculationStats

Kept = list[list[torch.Tensor]]


class Outputs:
    """Keeps scores and logits of emitted tokens, row by row, and makes what `generate` returns.

    Args:
        config (`GenerationConfig`): Says what is asked for.
        batch_size (`int`): Rows.
    """

    def __init__(self, config: GenerationConfig, batch_size: int):
        self.as_dict = bool(config.return_dict_in_generate)
        self.wants_scores = bool(self.as_dict and config.output_scores)
        self.wants_logits = bool(self.as_dict and config.output_logits)
        self._scores: Kept = [[] for _ in range(batch_size)]
        self._logits: Kept = [[] for _ in range(batch_size)]

    def keep(self, scores: torch.Tensor | None, logits: torch.Tensor, path: torch.Tensor, emitted: list[int]) -> None:
        """Keep what belongs to the tokens that a step emitted.

        Args:
            scores (`torch.Tensor` of shape `(B, M, V)`, *optional*): Processed, along the path.
            logits (`torch.Tensor` of shape `(B, N, V)`): Raw, of every node.
            path (`torch.LongTensor` of shape `(B, M)`): Nodes that were kept.
            emitted (`list[int]`): Tokens that each row emitted.
        """
        if self.wants_scores and scores is not None:
            _extend(self._scores, scores, emitted)
        if self.wants_logits:
            _extend(self._logits, along_path(logits.float(), path), emitted)

    def result(
        self, sequences: Sequences, cache: Any, stats: SpeculationStats
    ) -> GenerateDecoderOnlyOutput | torch.LongTensor:
        """With `return_dict_in_generate`, the statistics are its attribute `speculation`."""
        tokens = sequences.output()
        if not self.as_dict:
            return tokens
        output = GenerateDecoderOnlyOutput(
            sequences=tokens,
            scores=_by_position(self._scores, sequences),
            logits=_by_position(self._logits, sequences),
            past_key_values=cache,
        )
        output.speculation = stats
        return output


def _extend(kept: Kept, values: torch.Tensor, emitted: list[int]) -> None:
    for row, count in enumerate(emitted):
        kept[row].extend(values[row, :count].unbind(0))


def _by_position(rows: Kept, sequences: Sequences) -> tuple[torch.Tensor, ...] | None:
    """One `(batch, vocab)` tensor per generated position; zeros for rows that were done by then."""
    if not any(rows):
        return None
    longest = max(map(len, sequences.generated))
    filler = torch.zeros_like(next(row[0] for row in rows if row))
    return tuple(
        torch.stack([row[position] if position < len(row) else filler for row in rows]) for position in range(longest)
    )
