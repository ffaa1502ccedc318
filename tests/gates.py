"""Gates for tests."""

import random
from typing import Any

from hf_longspec.generation.special_cases.costs import Costs
from hf_longspec.generation.special_cases.gate import SpeculationGate


class FlippingGate(SpeculationGate):
    """Opens and closes at random, for one to four steps of each kind, from a seed; `turns` counts that.

    While it is open, each step drafts one of the trees that the drafter can draft, or some of its levels, and verifies
    some of these levels and of the n-grams.
    """

    def __init__(self, drafter: Any, seed: int = 0):
        super().__init__(drafter, lambda power, earlier: Costs())
        self.random = random.Random(seed)
        self.speculating = False
        self.left = self.turns = 0

    def speculates(self) -> bool:
        """Return whether this step speculates."""
        if not self.left:
            self.speculating, self.left = not self.speculating, self.random.randint(1, 4)
            self.turns += 1
        self.left -= 1
        self.widths = self.random.choice(self._choices)[0]
        self.only_ngrams = self._joins_ngrams and not self.speculating and self.random.random() < 0.5
        self._begin_chain()
        return self.speculating

    def goes_on(self, shares: Any) -> bool:
        """Go on or not."""
        assert all(0 <= share <= 1.0001 for share in shares)
        self._said.append(list(shares))
        return len(self._said) < len(self.widths) and self.random.random() < 0.7

    def kept(self, may_cut: bool = True) -> int:
        """Keep some levels."""
        self.widths = self.widths[: self.random.randint(1, len(self._said)) if may_cut else len(self._said)]
        return len(self.widths)

    def cut(self, rows: Any, nodes: int, most: int) -> Any:
        """Return some of the paths, and beginnings of them."""
        paths = [[path[: self.random.randint(1, len(path))] for path, _ in row] for row in rows]
        return paths, self.random.randint(0, most)

    def record(self, *step: Any) -> None:
        """Measure nothing."""


def ungated(*inputs: Any) -> None:
    """Replace `gate_of` where steps are counted: all of them speculate, however long they take."""
