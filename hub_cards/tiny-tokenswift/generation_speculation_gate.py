# Published with a draft by hf_longspec, Apache-2.0.
"""The gate: speculation that does not pay is switched off, by what steps really take.

A step that speculates costs as much as several plain ones on one machine and hardly more than one on another, and what
it emits depends on the text. So both are measured. A call begins with a few plain steps, then speculates for as long as
measurements do not refute it, and tries again from time to time. What is tried may take a share of the time, `SHARE`.
Among several trees the fastest one is found in the same way, see tree_race.py; drafts that cost next to nothing are
compared with plain steps meanwhile, see rehearsal.py.

Plain step: the root alone is verified, one token per row. Speeds here are per growing row, so that rows which finish
change nothing.
"""

import time
from collections.abc import Callable, Sequence

from .generation_draft_tree import DraftTree
from .generation_drafters_base import TreeShape
from .generation_pace import Pace
from .generation_rehearsal import Rehearsal
from .generation_stats import GateDecision
from .generation_tree_race import GROWTH, TreeRace

PLAIN, DRAFT = "plain", "draft"
# Steps that are not counted: the first of a phase may compile or fill caches, and where the drafter rested, speculation
# begins with a plain step that brings it up to date.
WARM_UP = {PLAIN: 1, DRAFT: 2}
# Plain steps take equally long: of this many, two may be outliers.
PLAIN_SAMPLES = 3
# Time that may be lost to trying the choice that is off.
SHARE = 0.01


class SpeculationGate:
    """Chooses between plain steps and speculation, step by step, and among the trees that speculation may verify.

    The loop asks `speculates`, and then for `tree`, when a step begins, and calls `record` when it has ended.

    Args:
        trees (`Sequence[TreeShape]`): What the drafter may propose, the one to begin with first.
        most_speedup (`Callable[[], float]`, *optional*): What speculation can gain at most in the next step, as far as
            that can be computed. While it is not more than what trying may cost, nothing is tried.
        rehearsal ([`Rehearsal`], *optional*): Compares drafts with plain steps, for drafters that propose at next to no
            cost.
        clock (`Callable[[], float]`, *optional*): Time in seconds.
    """

    is_open = False

    def __init__(
        self,
        trees: Sequence[TreeShape],
        most_speedup: Callable[[], float] = lambda: float("inf"),
        rehearsal: Rehearsal | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._trees = TreeRace(trees)
        self._most_speedup = most_speedup
        self._rehearsal = rehearsal
        self._clock = clock
        self._plain = Pace()
        self._choice = PLAIN
        self._verdict: str | None = None
        self._steps = 0  # of the present phase
        self._started = 0.0
        self._now = 0.0  # time of all steps so far: what passes between them is not the gate's
        self._plain_length = 0
        self._check_plain_at = self._try_draft_at = 0.0

    @property
    def tree(self) -> int:
        """Which of the trees a step that speculates verifies."""
        return self._trees.tree

    def speculates(self) -> bool:
        """Whether the step that begins now speculates."""
        self._started = self._clock()
        return self._choice == DRAFT

    def rehearse(self, emitted: Sequence[Sequence[int]], propose: Callable[[], DraftTree]) -> None:
        """Compare a draft with the plain step that has ended, and possibly propose the next one to compare.

        Args:
            emitted (`Sequence[Sequence[int]]`): Tokens of every row.
            propose (`Callable[[], DraftTree]`): Makes the tree that would be verified now.
        """
        if self._rehearsal is None or self._verdict != PLAIN:
            return
        self._rehearsal.follow(emitted)
        if self._rehearsal.is_due(self._now):
            started = self._clock()
            tree = propose()
            self._rehearsal.begin(tree, self._clock() - started)

    def record(self, tokens: int, rows: int, length: int) -> GateDecision | None:
        """Take note of the step that has ended; what was found out by it, if it changed.

        Args:
            tokens (`int`): Emitted by all rows.
            rows (`int`): Rows that were growing.
            length (`int`): Tokens of the longest row.
        """
        seconds = self._clock() - self._started
        self._now += seconds
        self._steps += 1
        if self._choice == DRAFT:
            if self._steps > 1:  # behind the plain one; no tree's first step is counted either
                self._trees.add(tokens, rows, seconds)
            verdict = self._after_draft(length)
        else:
            if self._steps > WARM_UP[PLAIN]:
                self._plain.add(tokens, rows, seconds)
            verdict = self._after_plain(length)
        if verdict is None or verdict == self._verdict:
            return None
        self._verdict = verdict
        return self._decision(verdict, rows, length)

    def _decision(self, verdict: str, rows: int, length: int) -> GateDecision:
        plain, draft = rows * self._plain.speed, self._trees.pace
        if not draft.count:  # nothing was tried, because of what it could gain at most
            return GateDecision(verdict, length, plain, plain * self._most_speedup(), 0.0)
        return GateDecision(verdict, length, plain, rows * draft.speed, draft.tokens)

    def _after_draft(self, length: int) -> str | None:
        """Go on until refuted, or until the plain step that it is compared with is out of date."""
        trees, plain = self._trees, self._plain.seconds
        if trees.tree == trees.best:
            stale = length >= GROWTH * self._plain_length and self._now >= self._check_plain_at
            if stale or not (trees.may_pay(plain) or trees.give_up(plain)):
                self._turn_to(PLAIN)  # measured anew, it has the last word
                return None
            if not trees.pays(plain):
                return None
        trees.compare(self._now, length)
        if not trees.pays(plain):
            return None
        if self._rehearsal is not None:
            self._rehearsal.keep()
        return trees.name

    def _after_plain(self, length: int) -> str | None:
        plain, trees = self._plain, self._trees
        if plain.count < PLAIN_SAMPLES:
            return None
        if plain.count == PLAIN_SAMPLES:
            self._plain_length = length
            steps = WARM_UP[PLAIN] + PLAIN_SAMPLES + 1
            self._check_plain_at = self._now + steps * plain.seconds / SHARE
            if trees.pace.count and not (trees.may_pay(plain.seconds) or trees.give_up(plain.seconds)):
                lost = trees.lost(plain.seconds, WARM_UP[DRAFT])
                self._try_draft_at = self._now + lost / SHARE
                if self._rehearsal is not None:
                    self._rehearsal.fail(lost, self._now)
                return PLAIN
        elif self._now < self._try_draft_at and not self._is_promising():
            return None
        if self._most_speedup() <= 1 + SHARE:
            return PLAIN
        if plain.count > PLAIN_SAMPLES:
            trees.restart()
        self._turn_to(DRAFT)
        return None

    def _is_promising(self) -> bool:
        """Whether rehearsals speak for trying earlier."""
        pace, plain = self._trees.pace, self._plain.seconds
        if self._rehearsal is None or not pace.count:
            return False
        if not self._rehearsal.promises(pace.seconds / max(plain, 1e-9), self._now):
            return False
        self._rehearsal.heed()
        return True

    def _turn_to(self, choice: str) -> None:
        self._choice, self._steps = choice, 0
        if choice == PLAIN:
            self._plain.restart()
        else:
            self._trees.begin()
