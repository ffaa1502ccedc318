"""Heads that know how the text goes on, so that paths of every shape are accepted."""

from typing import Any

import torch


class OracleHeads:
    """Heads that rank the token of `hints` at place `ranks(iteration, row, level)`, or last if that is `None`."""

    def __init__(self, drafter: Any, hints: list[list[int]], ranks: Any):
        self.drafter, self.hints, self.ranks = drafter, hints, ranks
        self.iteration = 0
        self.generator = torch.Generator().manual_seed(0)
        self.sequential = False
        drafter.heads, drafter.ends = self, self

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.expand(len(self.drafter.draft.setting("tree_branching")) - 1, *hidden.shape)

    def head(self, states: torch.Tensor) -> torch.Tensor:
        """Logits `(batch, levels, vocab)` that rank the candidates as `ranks` says."""
        first = 1 if self.drafter.partial is not None else 0  # the target's own prediction is the first level there
        vocab = self.drafter.binding.target.vocab_size
        logits = torch.zeros(*states.shape[:2], vocab)
        for level in range(states.shape[1]):
            for row, generated in enumerate(self.drafter.binding.rule.sequences.generated):
                coming = self.hints[row][len(generated) + first + level :]
                rank = self.ranks(self.iteration, row, level)
                candidates = self._candidates(vocab, coming[0] if coming else None, rank)
                logits[row, level, candidates] = -torch.arange(vocab, dtype=torch.float32)
        self.iteration += 1
        return logits

    def _candidates(self, vocab: int, right: int | None, rank: int | None) -> torch.Tensor:
        """All tokens, the best first."""
        others = [token for token in torch.randperm(vocab, generator=self.generator).tolist() if token != right]
        if right is not None:
            others.insert(vocab if rank is None else rank, right)
        return torch.tensor(others)


def with_oracle(draft: Any, hints: list[list[int]], ranks: Any) -> Any:
    """Let the drafters that `draft` makes ask an oracle; the last one is `draft.oracle`."""
    make = draft.make_drafter

    def make_drafter(binding: Any) -> Any:
        drafter = make(binding)
        draft.oracle = OracleHeads(drafter, hints, ranks)
        return drafter

    draft.make_drafter = make_drafter
    return draft
