# Published with a draft by hf_longspec, Apache-2.0.
"""Rehearsals: drafts that plain steps go past, to see how many of their tokens those steps emit.

Where proposing takes no forward, as with n-grams, what speculation would emit now is known without a verification: a
tree is proposed beside plain steps and compared with their tokens. So a draft that becomes good late in a text is found
as soon as it does, while one that stays bad costs nothing but its proposals.
"""

from collections import deque
from collections.abc import Sequence

from .generation_draft_tree import DraftTree

# Share of the time that proposals may take.
SHARE = 0.005
# Rehearsals that are looked at, and the fewest that say something.
RECENT, FEWEST = 8, 4
# By how much speculation has to be faster, standard error apart, for trying it not to wait: small gains can.
MARGIN = 1.2
# A promise that was not kept makes the next one wait until what it cost is 1 / PATIENCE of the time; twice as long each
# time that it happens again.
PATIENCE, MOST_PATIENCE = 5, 100


class Rehearsal:
    """What drafts would have emitted, and whether that is enough to try them.

    Tokens are counted like those of a step: what was right on the way down the tree, and one more; mean over the rows
    that went on.
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._rows: list[_Walk | None] = []
        self._results: list[int] = []
        self._spent = 0.0
        self._deaf_until = 0.0
        self._broken = 0
        self._is_trial = False

    def is_due(self, now: float) -> bool:
        """Whether to propose another draft: none is being compared, and proposals took little of the time `now`."""
        return not any(self._rows) and self._spent <= SHARE * now

    def begin(self, tree: DraftTree, seconds: float) -> None:
        """Compare `tree`, which took `seconds` to propose, with the tokens that follow."""
        self._spent += seconds
        self._results = []
        rows = zip(tree.tokens.tolist(), tree.parents.tolist(), tree.valid.tolist(), strict=True)
        self._rows = [_Walk(*row) for row in rows]

    def follow(self, emitted: Sequence[Sequence[int]]) -> None:
        """Go on with what a plain step emitted in each row; nothing in rows that are done."""
        if not any(self._rows):
            return
        for index, (row, tokens) in enumerate(zip(self._rows, emitted, strict=True)):
            if row is not None and not (tokens and row.goes_on(tokens[0])):
                self._results += [row.tokens] if tokens else []
                self._rows[index] = None
        if not any(self._rows) and self._results:
            self._recent.append(sum(self._results) / len(self._results))

    def promises(self, cost: float, now: float) -> bool:
        """Whether steps that cost `cost` plain ones each would pay clearly."""
        count = len(self._recent)
        if count < FEWEST or now < self._deaf_until:
            return False
        mean = sum(self._recent) / count
        variance = sum((tokens - mean) ** 2 for tokens in self._recent) / (count - 1)
        return mean - (variance / count) ** 0.5 >= MARGIN * cost

    def heed(self) -> None:
        """What was promised is tried now."""
        self._is_trial = True

    def keep(self) -> None:
        """Speculation pays."""
        self._is_trial, self._broken = False, 0

    def fail(self, lost: float, now: float) -> None:
        """Speculation does not pay: forget, and wait if that had been promised. Trying has cost `lost` seconds."""
        if self._is_trial:
            self._deaf_until = now + lost * min(MOST_PATIENCE, PATIENCE * 2**self._broken)
            self._broken += 1
        self._is_trial = False
        self._recent.clear()
        self._rows = []


class _Walk:
    """The way of one row's tokens down its tree, given as tokens, parents and valid of all nodes."""

    def __init__(self, tokens: Sequence[int], parents: Sequence[int], valid: Sequence[bool]):
        nodes = zip(tokens, parents, valid, strict=True)
        self._children = {
            (parent, token): node for node, (token, parent, is_real) in enumerate(nodes) if is_real and node
        }
        self._node = 0
        self.tokens = 1

    def goes_on(self, token: int) -> bool:
        """Step to the child that carries `token`, if there is one."""
        child = self._children.get((self._node, token))
        if child is not None:
            self._node, self.tokens = child, self.tokens + 1
        return child is not None
