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
        self._columns: list[torch.Tensor] = []  # scores of columns, made when they are asked for

    def keep(self, scores: torch.Tensor | None, logits: torch.Tensor, path: torch.Tensor, counts: list[int]) -> None:
        """Keep scores and logits of the tokens that a step accepted. Those after the end of a row are not returned.

        Args:
            scores (`torch.Tensor` of shape `(B, M, V)`, *optional*): Processed scores along the path.
            logits (`torch.Tensor` of shape `(B, N, V)`): Raw logits of every node.
            path (`torch.LongTensor` of shape `(B, M)`): Nodes that were kept.
            counts (`list[int]`): Number of tokens of each row.
        """
        if self.wants_scores and scores is not None:
            _extend(self._scores, scores, counts)
        if self.wants_logits:
            _extend(self._logits, along_path(logits.float(), path), counts)

    def result(
        self, sequences: Sequences, cache: Any, stats: SpeculationStats
    ) -> GenerateDecoderOnlyOutput | torch.LongTensor:
        """Return the result of `generate`. With `return_dict_in_generate`, its attribute `speculation` is `stats`."""
        tokens = sequences.output()
        if not self.as_dict:
            return tokens
        count = max(map(len, sequences.generated))
        output = GenerateDecoderOnlyOutput(
            sequences=tokens,
            scores=self.scores_of(sequences, count) if any(self._scores) else None,
            logits=_columns(self._logits, sequences, range(count)) if any(self._logits) else None,
            past_key_values=cache,
        )
        output.speculation = stats
        return output

    def scores_of(self, sequences: Sequences, count: int) -> tuple[torch.Tensor, ...]:
        """Return the scores `(batch, vocab)` of the first `count` generated columns, which do not change any more."""
        self._columns += _columns(self._scores, sequences, range(len(self._columns), count))
        return tuple(self._columns)


def _extend(kept: Kept, values: torch.Tensor, counts: list[int]) -> None:
    for row, count in enumerate(counts):
        kept[row].extend(values[row, :count].unbind(0))


def _columns(rows: Kept, sequences: Sequences, places: range) -> tuple[torch.Tensor, ...]:
    """Return one `(batch, vocab)` tensor per generated place, with zeros for rows that have ended before it."""
    filler = torch.zeros_like(next(row[0] for row in rows if row))
    pairs = list(zip(rows, sequences.generated, strict=True))
    return tuple(
        torch.stack([row[place] if place < len(tokens) else filler for row, tokens in pairs]) for place in places
    )
