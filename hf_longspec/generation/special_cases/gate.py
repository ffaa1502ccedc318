"""The gate: switch speculation off while plain decoding is faster.

Whether speculation pays depends on the machine, the batch, the length of the context and the text, so it is measured. A
call begins with a few plain steps, then speculates until measurements refute it, and tries again from time to time. A
fixed share of the time may be lost to such trials. In a plain step the root alone is verified and each row emits one
token. All speeds are per growing row, so that rows that finish change nothing.

[`SpeculationGate`] decides step by step, and [`GatedDrafter`] hides plain steps from the draft. A gate outlives its
call: the next call of the same kind takes it, begins with the choice that was better, and goes on to measure. Trials
then cost a share of the time of all calls, however short each of them is.
"""

import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers.utils import logging

from ..draft_tree import DraftTree
from ..drafter import Drafter, DrafterAround, Verification
from ..sequences import GateDecision, SpeculationStats
from ..special_case import GATE, SpecialCase

logger = logging.get_logger(__name__)

PLAIN, DRAFT = "plain", "draft"

# Steps over which tokens and times are averaged.
TOKENS_WINDOW, SECONDS_WINDOW = 128, 16
# Imagined row-steps in which everything was accepted. They are the only evidence for a draft of which nothing was
# accepted yet, so that refuting it costs about OPTIMISM x depth plain steps, whatever a step costs.
OPTIMISM = 2
# Fewest steps that can refute a draft, and steps that confirm that it pays.
FEWEST, CONFIRMING = 2, 16
# Steps that are not counted. The first step of a phase may compile or fill caches, and after plain steps speculation
# begins with one more of them, which brings the drafter up to date.
WARM_UP = {PLAIN: 1, DRAFT: 2}
# Plain steps take equally long: of this many, two may be outliers.
PLAIN_SAMPLES = 3
# Share of the time that may be lost to trying what is switched off.
TRIAL_SHARE = 0.01
# Plain steps are measured again when the longest prefix has grown by this factor.
GROWTH = 1.25


class StepStatistics:
    """Measured time and tokens per kind of step: tokens over `TOKENS_WINDOW` steps, times over `SECONDS_WINDOW`."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget everything."""
        self.count = self.row_steps = 0
        self._tokens: deque[float] = deque(maxlen=TOKENS_WINDOW)
        self._seconds: deque[float] = deque(maxlen=SECONDS_WINDOW)

    def fade(self) -> None:
        """Keep the tokens of the last few steps only, so that those of another text soon outweigh them."""
        self._tokens = deque(list(self._tokens)[-CONFIRMING:], maxlen=TOKENS_WINDOW)
        self.count = self.row_steps = len(self._tokens)

    def add(self, tokens: int, rows: int, seconds: float) -> None:
        """Count a step in which `rows` growing rows emitted `tokens` together."""
        self.count += 1
        self.row_steps += rows
        self._tokens.append(tokens / rows)
        self._seconds.append(seconds)

    @property
    def seconds(self) -> float:
        """Lower quartile of the times, the fastest of three: disturbances only make a step slower."""
        return sorted(self._seconds)[(len(self._seconds) - 1) // 4]

    @property
    def tokens(self) -> float:
        """Mean tokens per step and row."""
        return sum(self._tokens) / len(self._tokens)

    @property
    def error(self) -> float:
        """Standard error of `tokens`."""
        mean, count = self.tokens, len(self._tokens)
        variance = sum((tokens - mean) ** 2 for tokens in self._tokens) / max(1, count - 1)
        return (variance / count) ** 0.5

    @property
    def speed(self) -> float:
        """Tokens per second and row."""
        return self.tokens / max(self.seconds, 1e-9)

    def lost(self, steps: int, plain: float) -> float:
        """Return the seconds that `steps` steps take beyond plain steps that emit as much, at least 0."""
        return max(0.0, steps * (self.seconds - self.tokens * plain))

    def may_pay(self, most: int, plain: float) -> bool:
        """Return whether plain steps of `plain` seconds do not refute steps that emit at most `most` tokens per row.

        The upper estimate of `tokens` is their mean, the standard error, and a fading share of `most`.
        """
        if self.count < FEWEST:
            return True
        hope = OPTIMISM * (most - self.tokens) / (self.row_steps + OPTIMISM)
        return (self.tokens + self.error + hope) * plain >= self.seconds

    def pays(self, plain: float) -> bool:
        """Return whether these steps were measured to be faster than plain steps of `plain` seconds."""
        return self.count >= CONFIRMING and self.tokens * plain >= self.seconds


class SpeculationGate:
    """Choose between plain steps and speculation, step by step.

    `speculates` is read when a step begins, and `record` is called when it has ended. Nothing is tried while
    `speedup_bound`, an upper bound of the gain of the next step, is below the cost of trying.
    """

    def __init__(
        self,
        most_tokens: int,
        speedup_bound: Callable[[], float] = lambda: float("inf"),
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.most_tokens = most_tokens
        self.clock = clock
        self.ranks: Any = None  # share the target, and so must their steps: the first measures and decides for all
        self.choice = PLAIN  # of the present phase
        self._speedup_bound = speedup_bound
        self._plain, self._draft = StepStatistics(), StepStatistics()
        self._is_confirmed = False  # whether drafts paid before they were refuted
        self._verdict: str | None = None
        self._last_verdict: str | None = None  # verdict of the call before, until this call has reported it
        self._steps = 0  # of the present phase
        self._started = 0.0
        self._now = 0.0  # seconds of all steps so far; time between steps is the caller's
        self._plain_length = 0
        self._check_plain_at = self._try_draft_at = 0.0

    def release(self) -> None:
        """Drop what belongs to the call that ends, such as its cache, and keep what was measured."""
        self._speedup_bound, self.clock = lambda: float("inf"), time.perf_counter

    def resume(self, speedup_bound: Callable[[], float], clock: Callable[[], float]) -> None:
        """Begin another call of the same kind with the present choice, and with what was measured."""
        self._speedup_bound, self.clock = speedup_bound, clock
        self._last_verdict, self._verdict = self._verdict, None
        self._steps = 0
        self._draft.fade()

    def speculates(self) -> bool:
        """Return whether the step that begins now speculates."""
        self._started = self.clock()
        if self.ranks is None:
            return self.choice == DRAFT
        return bool(self.ranks.first([self.choice == DRAFT])[0])

    def record(self, tokens: int, rows: int, length: int) -> GateDecision | None:
        """Count the step that has ended, and return a decision if it changed."""
        if self.ranks is not None and self.ranks.rank:
            return None  # the first process measures
        seconds = self.clock() - self._started
        self._now += seconds
        self._steps += 1
        if self._steps > WARM_UP[self.choice]:
            (self._draft if self.choice == DRAFT else self._plain).add(tokens, rows, seconds)
        verdict = self._after_draft(length) if self.choice == DRAFT else self._after_plain(length)
        is_measured = self._plain.count and (self.choice == PLAIN or self._draft.count)
        if verdict is None and is_measured and self._last_verdict == self.choice:
            verdict = self._last_verdict  # still true
        self._last_verdict = None
        if verdict is None or verdict == self._verdict:
            return None
        self._verdict = verdict
        return self._decision(verdict, rows, length)

    def _decision(self, verdict: str, rows: int, length: int) -> GateDecision:
        plain, draft = rows * self._plain.speed, self._draft
        if not draft.count:  # nothing was tried, because the bound is too low
            return GateDecision(verdict, length, plain, plain * self._speedup_bound(), 0.0)
        return GateDecision(verdict, length, plain, rows * draft.speed, draft.tokens)

    def _after_draft(self, length: int) -> str | None:
        """Go on until refuted, or until the plain step that it is compared with is out of date."""
        plain = self._plain.seconds
        is_stale = length >= GROWTH * self._plain_length and self._now >= self._check_plain_at
        if is_stale or not self._draft.may_pay(self.most_tokens, plain):
            self._turn_to(PLAIN)  # plain steps are measured again before that is final
            return None
        if not self._draft.pays(plain):
            return None
        self._is_confirmed = True
        return DRAFT

    def _after_plain(self, length: int) -> str | None:
        plain, draft = self._plain, self._draft
        if plain.count < PLAIN_SAMPLES:
            return None
        if plain.count == PLAIN_SAMPLES:
            self._plain_length = length
            steps = WARM_UP[PLAIN] + PLAIN_SAMPLES + 1
            self._check_plain_at = self._now + steps * plain.seconds / TRIAL_SHARE
            if draft.count and not draft.may_pay(self.most_tokens, plain.seconds):
                # a draft that paid before it failed has cost the steps of one window at most
                steps = min(draft.count, TOKENS_WINDOW) if self._is_confirmed else draft.count
                self._try_draft_at = self._now + draft.lost(steps + WARM_UP[DRAFT], plain.seconds) / TRIAL_SHARE
                return PLAIN
        elif self._now < self._try_draft_at:
            return None
        if self._speedup_bound() <= 1 + TRIAL_SHARE:
            return PLAIN
        if plain.count > PLAIN_SAMPLES:
            draft.restart()
            self._is_confirmed = False
        self._turn_to(DRAFT)
        return None

    def _turn_to(self, choice: str) -> None:
        self.choice, self._steps = choice, 0
        if choice == PLAIN:
            self._plain.restart()


class GatedDrafter(DrafterAround):
    """Propose the root alone while speculation does not pay, else the tree of another drafter.

    Plain steps are hidden from the other drafter: it neither captures nor observes them. Before it proposes again, it
    is resumed with the text so far and the verification of one more root. So the first step after a pause is plain.
    `keep` is called when the text is complete.
    """

    def __init__(
        self,
        inner: Drafter,
        gate: SpeculationGate,
        stats: SpeculationStats,
        keep: Callable[[], None],
    ):
        super().__init__(inner)
        self.gate = gate
        self._stats = stats
        self._keep = keep
        self._is_open = self._was_open = True
        self._prompts: list[torch.Tensor] = []
        self._emitted: list[array[int]] = []

    @property
    def wants_hidden(self) -> bool | tuple[int, ...]:
        """As the other drafter, in the steps that it observes."""
        return self._is_open and self.inner.wants_hidden

    @property
    def reuse_graph(self) -> bool:
        """False in the step that resumes the other drafter."""
        return self._was_open or not self._is_open

    def keep(self) -> None:
        """Keep the gate, and what the other drafter keeps."""
        self._keep()
        self.inner.keep()

    def start(self, texts: Sequence[torch.Tensor], verification: Verification) -> None:
        """Start the other drafter."""
        self._prompts, self._emitted = list(texts), [array("q", tokens) for tokens in verification.tokens]
        self.inner.start(texts, verification)

    def take(self, row: int, other: Drafter) -> None:
        """Let the other drafter take a row, and note the text of its drafter."""
        self.inner.take(row, other)
        sequences = other.binding.rule.sequences  # type: ignore[union-attr]
        self._prompts[row] = sequences.tokens[0, : sequences.prompt_length]
        self._emitted[row] = sequences.generated[0][:]

    def propose(self, root: torch.Tensor) -> DraftTree:
        """Return the other drafter's tree, or the root alone."""
        self._was_open, self._is_open = self._is_open, self.gate.speculates()
        return self.inner.propose(root) if self._is_open and self._was_open else DraftTree.root_only(root)

    def capture(self, tree: DraftTree) -> Any:
        """Return the other drafter's capture while the gate is open."""
        return super().capture(tree) if self._is_open else None

    def observe(self, verification: Verification) -> None:
        """Pass the verification on while the gate is open, and measure the step."""
        for row, new in zip(self._emitted, verification.tokens, strict=True):
            row.extend(new)
        if self._is_open:
            self._inform(verification)
        tokens = sum(map(len, verification.tokens))
        rows = sum(map(bool, verification.tokens))
        decision = self.gate.record(tokens, rows, max(self.binding.cache.lengths.host))
        if decision is not None:
            self._stats.gate_decisions.append(decision)
            if decision.choice == PLAIN and self._stats.method not in _reported:
                _reported.add(self._stats.method)
                logger.info(message_of(decision, self._stats.method))

    def _inform(self, verification: Verification) -> None:
        """Let the other drafter go on, or resume after plain steps."""
        if self._was_open:
            self.inner.observe(verification)
            return
        rows = zip(self._prompts, self._emitted, self.binding.cache.lengths.host, strict=True)
        texts = [torch.cat([prompt, prompt.new_tensor(new)])[:length] for prompt, new, length in rows]
        self.inner.resume(texts, verification)


# Gates that no call is using, by draft, target, and everything else that steps of a call depend on.
_kept: WeakKeyDictionary[nn.Module, WeakKeyDictionary[nn.Module, dict[tuple, SpeculationGate]]] = WeakKeyDictionary()
_kept_lock = Lock()
# Kinds of drafts of which a log message has reported that drafting is paused.
_reported: set[str] = set()


def gate_of(drafter: Drafter, ranks: Any, last: SpeculationGate | None = None) -> SpeculationGate | None:
    """Return the gate of one call, the `last` of its kind; None if every step may speculate.

    Copies of a sharded target that run side by side, which was never tried, have no gate.
    """
    if drafter.num_nodes == 1 or (ranks is not None and not ranks.is_everyone):
        return None
    clock = drafter.binding.target.clock
    if last is not None:
        last.resume(drafter.speedup_bound, clock)
        return last
    gate = SpeculationGate(drafter.max_depth + 1, drafter.speedup_bound, clock)
    gate.ranks = ranks
    return gate


def message_of(decision: GateDecision, method: str) -> str:
    """Return the line that says that drafting with a draft of this name is paused."""
    draft, plain = decision.draft_tokens_per_second, decision.plain_tokens_per_second
    if not decision.tau:
        speeds = f"at most {draft:.3g} tokens/s if every draft were accepted, {plain:.3g} without"
    else:
        speeds = f"{draft:.3g} vs {plain:.3g} tokens/s"
    return f"{method}: drafting paused, plain decoding is faster here ({speeds}); see docs/gate.md"


class Gate(SpecialCase):
    """The gate of calls that speculate."""

    case = GATE

    def drafter(self, inner: Any, session: Any) -> Any:
        """Return the drafter of a [`Session`], hidden from steps that do not speculate, unless every step may.

        Decisions of the gate are added to the statistics. The first time that a kind of draft is paused, this is
        logged. A gate that does not share its decisions with other processes is kept for the next call of its kind: the
        same draft, settings, target, way to choose tokens, number of rows and power of two of tokens.
        """
        draft, target, rule = session.draft, session.target, inner.binding.rule
        model, cache = target.model, session.cache
        place = model.device, model.dtype, model.config._attn_implementation, rule is not None and rule.do_sample
        settings = tuple(repr(draft.setting(name)) for name in draft.settings)
        kind = place, settings, cache.batch_size, session.max_length.bit_length(), inner.num_nodes

        def keep() -> None:
            if gate is not None and gate.ranks is None:
                gate.release()
                with _kept_lock:
                    _kept.setdefault(draft, WeakKeyDictionary()).setdefault(model, {})[kind] = gate

        with _kept_lock:
            last = _kept.get(draft, {}).get(model, {}).pop(kind, None)
        gate = gate_of(inner, target.ranks, last)
        return inner if gate is None else GatedDrafter(inner, gate, session.stats, keep)
