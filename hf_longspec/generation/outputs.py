"""Results of a call: sequences, and scores and logits per position if they are requested."""

from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .sampling import along_path
from .sequences import Sequences
from .stats import SpeculationStats

Kept = list[list[torch.Tensor]]


class Outputs:
    """Keep scores and logits of emitted tokens, row by row, and build the result of `generate`.

    Args:
        config (`GenerationConfig`): Its `return_dict_in_generate`, `output_scores` and `output_logits` are read.
        batch_size (`int`): Number of rows.
    """

    def __init__(self, config: GenerationConfig, batch_size: int):
        self.as_dict = bool(config.return_dict_in_generate)
        self.wants_scores = bool(self.as_dict and config.output_scores)
        self.wants_logits = bool(self.as_dict and config.output_logits)
        self._scores: Kept = [[] for _ in range(batch_size)]
        self._logits: Kept = [[] for _ in range(batch_size)]

    def keep(self, scores: torch.Tensor | None, logits: torch.Tensor, path: torch.Tensor, emitted: list[int]) -> None:
        """Keep scores and logits of the tokens that a step emitted.

        Args:
            scores (`torch.Tensor` of shape `(B, M, V)`, *optional*): Processed scores along the path.
            logits (`torch.Tensor` of shape `(B, N, V)`): Raw logits of every node.
            path (`torch.LongTensor` of shape `(B, M)`): Nodes that were kept.
            emitted (`list[int]`): Number of tokens that each row emitted.
        """
        if self.wants_scores and scores is not None:
            _extend(self._scores, scores, emitted)
        if self.wants_logits:
            _extend(self._logits, along_path(logits.float(), path), emitted)

    def result(
        self, sequences: Sequences, cache: Any, stats: SpeculationStats
    ) -> GenerateDecoderOnlyOutput | torch.LongTensor:
        """Return the result of `generate`. With `return_dict_in_generate`, its attribute `speculation` is `stats`."""
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
    """Return one `(batch, vocab)` tensor per generated position, with zeros for rows that have ended before it."""
    if not any(rows):
        return None
    longest = max(map(len, sequences.generated))
    filler = torch.zeros_like(next(row[0] for row in rows if row))
    return tuple(
        torch.stack([row[position] if position < len(row) else filler for row in rows]) for position in range(longest)
    )
