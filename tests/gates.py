"""Gates for tests."""

import random
from typing import Any

from hf_longspec.generation.special_cases.gate import SpeculationGate


class FlippingGate(SpeculationGate):
    """Opens and closes at random, for one to four steps of each kind, from a seed; `turns` counts that."""

    def __init__(self, seed: int = 0):
        super().__init__(2)
        self.random = random.Random(seed)
        self.speculating = False
        self.left = self.turns = 0

    def speculates(self) -> bool:
        """Return whether this step speculates."""
        if not self.left:
            self.speculating, self.left = not self.speculating, self.random.randint(1, 4)
            self.turns += 1
        self.left -= 1
        return self.speculating

    def record(self, tokens: int, rows: int, length: int) -> None:
        """Measure nothing."""


def ungated(drafter: Any, ranks: Any, known: Any = None) -> None:
    """Replace `gate_of` where steps are counted: all of them speculate, however long they take."""
