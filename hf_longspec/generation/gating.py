"""The gate: speculation that does not pay is switched off, by what steps really take.

A step that speculates costs as much as several plain ones on one machine and hardly more than one on another, and what
it emits depends on the text. So both are measured. A call begins with a few plain steps, then speculates for as long as
measurements do not refute it, and tries again from time to time. What is tried may take a share of the time, `SHARE`.
Among several trees the fastest one is found in the same way, see tree_race.py.

Plain step: the root alone is verified, one token per row. Speeds here are per growing row, so that rows which finish
change nothing.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from .drafters.base import TreeShape
from .pace import Pace
from .ranks import Ranks
from .stats import GateDecision
from .tree_race import GROWTH, TreeRace

GATE_DEFAULTS: dict[str, Any] = {"gate": True}

PLAIN, DRAFT = "plain", "draft"
# Steps that are not counted: the first of a phase may compile or fill caches, and where the drafter rested, speculation
# begins with a plain step that brings it up to date.
WARM_UP = {PLAIN: 1, DRAFT: 2}
# Plain steps take equally long: of this many, two may be outliers.
PLAIN_SAMPLES = 3
# Time that may be lost to trying the choice that is off.
SHARE = 0.01


class OpenGate:
    """Always speculates: `gate=False`, and drafts that propose nothing."""

    is_open = True
    tree = 0

    def speculates(self) -> bool:
        """Yes."""
        return True

    def record(self, tokens: int, rows: int, length: int) -> GateDecision | None:
        """Nothing to measure."""
        return None


class SpeculationGate:
    """Chooses between plain steps and speculation, step by step, and among the trees that speculation may verify.

    The loop asks `speculates`, and then for `tree`, when a step begins, and calls `record` when it has ended.

    Args:
        trees (`Sequence[TreeShape]`): What the drafter may propose, the one to begin with first.
        most_speedup (`Callable[[], float]`, *optional*): What speculation can gain at most in the next step, as far as
            that can be computed. While it is not more than what trying may cost, nothing is tried.
        clock (`Callable[[], float]`, *optional*): Time in seconds.
    """

    is_open = False

    def __init__(
        self,
        trees: Sequence[TreeShape],
        most_speedup: Callable[[], float] = lambda: float("inf"),
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._trees = TreeRace(trees)
        self._most_speedup = most_speedup
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
        return trees.name if trees.pays(plain) else None

    def _after_plain(self, length: int) -> str | None:
        plain, trees = self._plain, self._trees
        if plain.count < PLAIN_SAMPLES:
            return None
        if plain.count == PLAIN_SAMPLES:
            self._plain_length = length
            steps = WARM_UP[PLAIN] + PLAIN_SAMPLES + 1
            self._check_plain_at = self._now + steps * plain.seconds / SHARE
            if trees.pace.count and not (trees.may_pay(plain.seconds) or trees.give_up(plain.seconds)):
                self._try_draft_at = self._now + trees.lost(plain.seconds, WARM_UP[DRAFT]) / SHARE
                return PLAIN
        elif self._now < self._try_draft_at:
            return None
        if self._most_speedup() <= 1 + SHARE:
            return PLAIN
        if plain.count > PLAIN_SAMPLES:
            trees.restart()
        self._turn_to(DRAFT)
        return None

    def _turn_to(self, choice: str) -> None:
        self._choice, self._steps = choice, 0
        if choice == PLAIN:
            self._plain.restart()
        else:
            self._trees.begin()


class SharedGate:
    """The gate of the first rank, for all ranks of a sharded target: their steps must be the same.

    Args:
        gate ([`SpeculationGate`]): Asked on the first rank alone.
        ranks ([`Ranks`]): All of them.
    """

    is_open = False

    def __init__(self, gate: SpeculationGate, ranks: Ranks):
        self.gate = gate
        self.ranks = ranks
        self.tree = 0

    def speculates(self) -> bool:
        """What the first rank says."""
        decides = self.ranks.rank == 0
        speculates, self.tree = self.ranks.first([decides and self.gate.speculates(), self.gate.tree])
        return bool(speculates)

    def record(self, tokens: int, rows: int, length: int) -> GateDecision | None:
        """Take note of the step on the first rank; the others find out nothing."""
        return self.gate.record(tokens, rows, length) if self.ranks.rank == 0 else None


Gate = OpenGate | SpeculationGate | SharedGate


def gate_of(wanted: bool, drafter: Any, ranks: Ranks | None) -> Gate:
    """The gate of one call.

    Args:
        wanted (`bool`): The setting `gate`.
        drafter ([`Drafter`]): Of the call.
        ranks ([`Ranks`], *optional*): Processes that share the target. If there are others besides, as where several
            copies of a sharded target run side by side, the gate is open: this was never tried.
    """
    if not wanted or drafter.num_nodes == 1:
        return OpenGate()
    gate = SpeculationGate(drafter.trees, drafter.most_speedup)
    if ranks is None:
        return gate
    return SharedGate(gate, ranks) if ranks.is_everyone else OpenGate()


def check_gate(value: Any) -> None:
    """Refuse a setting `gate` that is no bool.

    Raises:
        ValueError: With the value, the rule and the remedy.
    """
    if type(value) is not bool:
        raise ValueError(
            f"gate={value!r}: expected True or False. True switches speculation off while it does not pay, False "
            "always speculates."
        )


def warning_of(decision: GateDecision) -> str:
    """What a user is told when speculation is switched off."""
    against = (
        f"against {decision.plain_tokens_per_second:.3g} tokens/s without drafting, behind {decision.length} tokens"
    )
    if not decision.tau:
        return (
            f"speculation cannot pay here and is not tried for now: at most {decision.draft_tokens_per_second:.3g} "
            f"tokens/s if every draft were accepted, {against}. It is tried when that has changed."
        )
    return (
        f"speculation does not pay here and is switched off for now: {decision.draft_tokens_per_second:.3g} tokens/s "
        f"at {decision.tau:.2f} tokens per verification, {against}. It is tried again now and then. Fewer drafted "
        "tokens, a longer context or a draft that knows the text better may pay; draft.generation_config.gate = False "
        "always speculates."
    )
