"""The gate: switch speculation off while plain decoding is faster, and choose among the trees of a draft.

Whether speculation pays depends on the machine, the batch, the length of the context and the text, so it is measured. A
call begins with a few plain steps, then speculates until measurements refute it, and tries again from time to time. A
fixed share of the time may be lost to such trials. In a plain step the root alone is verified and each row emits one
token. All speeds are per growing row, so that rows that finish change nothing.

[`GatedDrafter`] hides plain steps from the draft, and [`SpeculationGate`] decides step by step. [`ShadowDraft`]
compares drafts that cost next to nothing with the tokens of plain steps, and [`TreeTuner`] several trees of one draft.

A gate outlives its call: the next call of the same kind takes it, begins with the choice that was better, and goes on
to measure. Trials then cost a share of the time of all calls, however short each of them is.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from transformers.utils import logging

from .draft_tree import DraftTree
from .drafter import Drafter, TreeShape
from .gated_drafter import GatedDrafter
from .parallel import Ranks
from .stats import GateDecision, SpeculationStats
from .tree_tuner import GROWTH, StepStatistics, TreeTuner

logger = logging.get_logger(__name__)

PLAIN, DRAFT = "plain", "draft"

# Steps that are not counted. The first step of a phase may compile or fill caches, and after plain steps speculation
# begins with one more of them, which brings the drafter up to date.
WARM_UP = {PLAIN: 1, DRAFT: 2}
# Plain steps take equally long: of this many, two may be outliers.
PLAIN_SAMPLES = 3
# Share of the time that may be lost to trying what is switched off.
TRIAL_SHARE = 0.01

# Share of the time that proposals of a shadow draft may take.
SHADOW_SHARE = 0.005
# Shadow drafts that are looked at, and the fewest that count as evidence.
SHADOW_RECENT, SHADOW_FEWEST = 8, 4
# By how much speculation has to be faster, standard error apart, to be tried at once.
SHADOW_MARGIN = 1.2
# After a suggested trial that failed, the next suggestion waits until the loss is 1 / PATIENCE of the time, and twice
# as long after each further failure.
PATIENCE, MOST_PATIENCE = 5, 100


class ShadowDraft:
    """Compare proposed trees with the tokens of plain steps, and suggest to try speculation.

    Drafters that propose without a forward, such as n-grams, can be followed at next to no cost while speculation is
    switched off. Tokens are counted as a verification would count them, as a mean over the rows that went on.
    """

    def __init__(self) -> None:
        # tokens per step of the last shadow drafts, oldest first
        self.recent: deque[float] = deque(maxlen=SHADOW_RECENT)
        # of rows that still follow their tree: the nodes by parent and token, and the path so far
        self._rows: dict[int, tuple[dict[tuple[int, int], int], list[int]]] = {}
        self._results: list[int] = []
        self._spent = 0.0
        self._wait_until = 0.0
        self._failures = 0
        self._is_trial = False

    def is_due(self, now: float) -> bool:
        """Return whether to propose another tree: none is being followed, and few of the `now` seconds were spent."""
        return not self._rows and self._spent <= SHADOW_SHARE * now

    def begin(self, tree: DraftTree, seconds: float) -> None:
        """Follow `tree`, which took `seconds` to propose, along the tokens to come."""
        self._spent += seconds
        self._results = []
        for row, nodes in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), tree.valid.tolist(), strict=True)):
            numbered = enumerate(zip(*nodes, strict=True))
            children = {(parent, token): node for node, (token, parent, is_real) in numbered if is_real and node}
            self._rows[row] = children, [0]

    def follow(self, emitted: Sequence[Sequence[int]]) -> None:
        """Go on with the tokens that a plain step emitted in each row, none in rows that are done."""
        if not self._rows:
            return
        for row, (children, path) in list(self._rows.items()):
            child = children.get((path[-1], emitted[row][0])) if emitted[row] else None
            if child is not None:
                path.append(child)
                continue
            del self._rows[row]
            self._results += [len(path)] if emitted[row] else []
        if not self._rows and self._results:
            self.count(sum(self._results) / len(self._results))

    def count(self, tokens: float) -> None:
        """Count a tree of which `tokens` tokens per row would have been emitted."""
        self.recent.append(tokens)

    def suggests(self, cost: float, now: float) -> bool:
        """Return whether steps that cost `cost` plain ones each would clearly pay."""
        count = len(self.recent)
        if count < SHADOW_FEWEST or now < self._wait_until:
            return False
        mean = sum(self.recent) / count
        variance = sum((tokens - mean) ** 2 for tokens in self.recent) / (count - 1)
        return mean - (variance / count) ** 0.5 >= SHADOW_MARGIN * cost

    def forget_text(self) -> None:
        """Stop following a tree, as another text begins."""
        self._rows, self._results = {}, []

    def begin_trial(self) -> None:
        """Speculation is tried because it was suggested."""
        self._is_trial = True

    def confirm(self) -> None:
        """Speculation pays."""
        self._is_trial, self._failures = False, 0

    def fail(self, lost: float, now: float) -> None:
        """Forget everything, since speculation did not pay and cost `lost` seconds; wait if it had been suggested."""
        if self._is_trial:
            self._wait_until = now + lost * min(MOST_PATIENCE, PATIENCE * 2**self._failures)
            self._failures += 1
        self._is_trial = False
        self.recent.clear()
        self._rows = {}


class SpeculationGate:
    """Choose between plain steps and speculation, step by step, and among the trees that speculation may verify.

    `speculates`, and then `tree`, are read when a step begins, and `record` is called when it has ended.

    Args:
        trees (`Sequence[TreeShape]`): The drafter's trees, the one to begin with first.
        speedup_bound (`Callable[[], float]`, *optional*): Upper bound of the gain of the next step, as far as it can be
            computed. Nothing is tried while the bound is below the cost of trying.
        shadow ([`ShadowDraft`], *optional*): For drafters that propose at next to no cost.
        clock (`Callable[[], float]`, *optional*): Time in seconds.

    Attributes:
        ranks ([`Ranks`], *optional*): Processes that share the target. Their steps must be the same, so the first one
            measures and decides for all.
    """

    def __init__(
        self,
        trees: Sequence[TreeShape],
        speedup_bound: Callable[[], float] = lambda: float("inf"),
        shadow: ShadowDraft | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.tuner = TreeTuner(trees)
        self.shadow = shadow
        self.clock = clock
        self.ranks: Ranks | None = None
        self.choice = PLAIN  # of the present phase
        self._speedup_bound = speedup_bound
        self._plain = StepStatistics()
        self._verdict: str | None = None
        self._known: str | None = None  # verdict of the call before, until this call has reported it
        self._steps = 0  # of the present phase
        self._started = 0.0
        self._now = 0.0  # seconds of all steps so far; time between steps is the caller's
        self._plain_length = 0
        self._check_plain_at = self._try_draft_at = 0.0

    @property
    def tree(self) -> int:
        """Index of the tree that a step verifies if it speculates."""
        return self.tuner.tree

    def rest(self) -> None:
        """Drop what belongs to the call that ends, such as its cache, and keep what was measured."""
        self._speedup_bound, self.clock = lambda: float("inf"), time.perf_counter
        if self.shadow is not None:
            self.shadow.forget_text()

    def resume(self, speedup_bound: Callable[[], float], clock: Callable[[], float]) -> None:
        """Begin another call of the same kind with the present choice, and with what was measured."""
        self._speedup_bound, self.clock = speedup_bound, clock
        self._known, self._verdict = self._verdict, None
        self._steps = 0
        self.tuner.begin()
        self.tuner.fade()

    def speculates(self) -> bool:
        """Return whether the step that begins now speculates."""
        self._started = self.clock()
        if self.ranks is None:
            return self.choice == DRAFT
        speculates, self.tuner.tree = self.ranks.first([self.choice == DRAFT, self.tree])
        return bool(speculates)

    @property
    def _measures(self) -> bool:
        """Whether this process measures steps."""
        return self.ranks is None or self.ranks.rank == 0

    def follow(self, emitted: Sequence[Sequence[int]], propose: Callable[[], DraftTree]) -> None:
        """Compare a shadow draft with the plain step that has ended, and possibly propose the next one.

        Args:
            emitted (`Sequence[Sequence[int]]`): Tokens of every row.
            propose (`Callable[[], DraftTree]`): Makes the tree that would be verified now.
        """
        if self.shadow is None or self._verdict != PLAIN or not self._measures:
            return
        self.shadow.follow(emitted)
        if self.shadow.is_due(self._now):
            started = self.clock()
            tree = propose()
            self.shadow.begin(tree, self.clock() - started)

    def record(self, tokens: int, rows: int, length: int) -> GateDecision | None:
        """Count the step that has ended, and return a decision if it changed.

        Args:
            tokens (`int`): Emitted by all rows.
            rows (`int`): Rows that were growing.
            length (`int`): Tokens of the longest row.
        """
        if not self._measures:
            return None
        seconds = self.clock() - self._started
        self._now += seconds
        self._steps += 1
        if self.choice == DRAFT:
            if self._steps > 1:  # the first one is plain; the tuner leaves out each tree's own first step
                self.tuner.add(tokens, rows, seconds)
            verdict = self._after_draft(length)
        else:
            if self._steps > WARM_UP[PLAIN]:
                self._plain.add(tokens, rows, seconds)
            verdict = self._after_plain(length)
        if verdict is None and self._is_known():
            verdict = self._known
        self._known = None
        if verdict is None or verdict == self._verdict:
            return None
        self._verdict = verdict
        return self._decision(verdict, rows, length)

    def _is_known(self) -> bool:
        """Return whether the verdict of the call before is that of the present choice, with its measurements."""
        is_same = self._known is not None and (self._known == PLAIN) == (self.choice == PLAIN)
        return is_same and bool(self._plain.count) and (self.choice == PLAIN or bool(self.tuner.steps.count))

    def _decision(self, verdict: str, rows: int, length: int) -> GateDecision:
        plain, draft = rows * self._plain.speed, self.tuner.steps
        if not draft.count:  # nothing was tried, because the bound is too low
            return GateDecision(verdict, length, plain, plain * self._speedup_bound(), 0.0)
        return GateDecision(verdict, length, plain, rows * draft.speed, draft.tokens)

    def _after_draft(self, length: int) -> str | None:
        """Go on until refuted, or until the plain step that it is compared with is out of date."""
        tuner, plain = self.tuner, self._plain.seconds
        if tuner.tree == tuner.best:
            stale = length >= GROWTH * self._plain_length and self._now >= self._check_plain_at
            if stale or not (tuner.may_pay(plain) or tuner.give_up(plain)):
                self._turn_to(PLAIN)  # plain steps are measured again before that is final
                return None
            if not tuner.pays(plain):
                return None
        tuner.compare(self._now, length)
        if not tuner.pays(plain):
            return None
        if self.shadow is not None:
            self.shadow.confirm()
        return tuner.name

    def _after_plain(self, length: int) -> str | None:
        plain, tuner = self._plain, self.tuner
        if plain.count < PLAIN_SAMPLES:
            return None
        if plain.count == PLAIN_SAMPLES:
            self._plain_length = length
            steps = WARM_UP[PLAIN] + PLAIN_SAMPLES + 1
            self._check_plain_at = self._now + steps * plain.seconds / TRIAL_SHARE
            if tuner.steps.count and not (tuner.may_pay(plain.seconds) or tuner.give_up(plain.seconds)):
                lost = tuner.lost(plain.seconds, WARM_UP[DRAFT])
                self._try_draft_at = self._now + lost / TRIAL_SHARE
                if self.shadow is not None:
                    self.shadow.fail(lost, self._now)
                return PLAIN
        elif self._now < self._try_draft_at and not self._is_suggested():
            return None
        if self._speedup_bound() <= 1 + TRIAL_SHARE:
            return PLAIN
        if plain.count > PLAIN_SAMPLES:
            tuner.restart()
        self._turn_to(DRAFT)
        return None

    def _is_suggested(self) -> bool:
        """Return whether shadow drafts suggest to try speculation before its time."""
        steps, plain = self.tuner.steps, self._plain.seconds
        if self.shadow is None or not steps.count:
            return False
        if not self.shadow.suggests(steps.seconds / max(plain, 1e-9), self._now):
            return False
        self.shadow.begin_trial()
        return True

    def _turn_to(self, choice: str) -> None:
        self.choice, self._steps = choice, 0
        if choice == PLAIN:
            self._plain.restart()
        else:
            self.tuner.begin()


# Gates that no call is using, by draft, target, and everything else that steps of a call depend on.
_kept: WeakKeyDictionary[nn.Module, WeakKeyDictionary[nn.Module, dict[tuple, SpeculationGate]]] = WeakKeyDictionary()
_kept_lock = Lock()
# Kinds of drafts of which a log message has reported that drafting is paused.
_reported: set[str] = set()


def gate_of(
    wanted: bool, drafter: Drafter, ranks: Ranks | None, known: SpeculationGate | None = None
) -> SpeculationGate | None:
    """Return the gate of one call; None if every step may speculate.

    Args:
        wanted (`bool`): The setting `gate`.
        drafter ([`Drafter`]): Of the call.
        ranks ([`Ranks`], *optional*): Processes that share the target. Without a gate if there are others besides, as
            where several copies of a sharded target run side by side: that was never tried.
        known ([`SpeculationGate`], *optional*): The gate of an earlier call of the same kind.
    """
    if not wanted or drafter.num_nodes == 1 or (ranks is not None and not ranks.is_everyone):
        return None
    clock = drafter.binding.target.clock
    if known is not None:
        known.resume(drafter.speedup_bound, clock)
        return known
    shadow = ShadowDraft() if drafter.can_shadow else None
    gate = SpeculationGate(drafter.trees, drafter.speedup_bound, shadow, clock)
    gate.ranks = ranks
    return gate


def gated(drafter: Drafter, draft: Any, stats: SpeculationStats, may_speculate: Callable[[int], bool]) -> Drafter:
    """Return the drafter of `draft`, hidden from the steps that cannot or shall not speculate.

    Decisions of the gate are added to `stats`. The first time that a kind of draft is paused, this is logged. A gate
    that does not share its decisions with other processes is kept for the next call of its kind: the same draft,
    settings, target, way to choose tokens, number of rows and power of two of tokens.
    """
    target, binding = drafter.binding.target, drafter.binding
    model, rule = target.model, binding.rule
    place = model.device, model.dtype, model.config._attn_implementation, rule is not None and rule.do_sample
    settings = tuple(repr(draft.setting(name)) for name in draft.settings)
    kind = place, settings, binding.cache.batch_size, binding.max_length.bit_length(), drafter.trees

    def report(decision: GateDecision) -> None:
        stats.gate_decisions.append(decision)
        if decision.choice == PLAIN and stats.method not in _reported:
            _reported.add(stats.method)
            logger.info(message_of(decision))

    def keep() -> None:
        if isinstance(gate, SpeculationGate) and gate.ranks is None:
            gate.rest()
            with _kept_lock:
                _kept.setdefault(draft, WeakKeyDictionary()).setdefault(model, {})[kind] = gate

    with _kept_lock:
        known = _kept.get(draft, {}).get(model, {}).pop(kind, None) if draft.setting("gate") else None
    gate = gate_of(draft.setting("gate"), drafter, target.ranks, known)
    return GatedDrafter(drafter, gate, may_speculate, report, keep)


def message_of(decision: GateDecision) -> str:
    """Return the line that says that drafting is paused."""
    draft, plain = decision.draft_tokens_per_second, decision.plain_tokens_per_second
    if not decision.tau:
        speeds = f"at most {draft:.3g} tokens/s if every draft were accepted, {plain:.3g} without"
    else:
        speeds = f"{draft:.3g} vs {plain:.3g} tokens/s"
    return f"longspec: drafting paused, plain decoding is faster here ({speeds}); see docs/gate.md"
