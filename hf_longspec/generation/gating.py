"""The gate: speculation that does not pay is switched off, by what steps really take.

A step that speculates costs as much as several plain ones on one machine and hardly more than one on another, and what
it emits depends on the text. So both are measured. A call begins with a few plain steps, then speculates for as long as
measurements do not refute it, and tries again from time to time. What is tried may take a share of the time, `SHARE`.

Plain step: the root alone is verified, one token per row. Speeds here are per growing row, so that rows which finish
change nothing.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

from .stats import GateDecision

GATE_DEFAULTS: dict[str, Any] = {"gate": True}

PLAIN, DRAFT = "plain", "draft"
# Steps that are not counted: the first of a phase may compile or fill caches, and where the drafter rested, speculation
# begins with a plain step that brings it up to date.
WARM_UP = {PLAIN: 1, DRAFT: 2}
# Plain steps take equally long: of this many, two may be outliers.
PLAIN_SAMPLES = 3
# Fewest steps that can refute speculation.
DRAFT_SAMPLES = 2
# Steps that confirm that speculation pays.
CONFIRMING = 16
# Imagined row-steps in which everything was accepted. They alone speak for a draft of which nothing was accepted yet,
# so that refuting it costs about OPTIMISM x depth plain steps whatever a step costs.
OPTIMISM = 2
# Steps over which tokens and times are taken.
TOKENS_WINDOW, SECONDS_WINDOW = 128, 16
# Time that may be lost to trying the choice that is off.
SHARE = 0.01
# A plain step is measured anew when the longest prefix has grown by this factor.
GROWTH = 1.25


class Pace:
    """What steps of one kind take and give: tokens per row over `TOKENS_WINDOW` steps, time over `SECONDS_WINDOW`."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget everything."""
        self.count = self.row_steps = 0
        self._tokens: deque[float] = deque(maxlen=TOKENS_WINDOW)
        self._seconds: deque[float] = deque(maxlen=SECONDS_WINDOW)

    def add(self, tokens: int, rows: int, seconds: float) -> None:
        """Count a step in which `rows` growing rows emitted `tokens`."""
        self.count += 1
        self.row_steps += rows
        self._tokens.append(tokens / rows)
        self._seconds.append(seconds)

    @property
    def seconds(self) -> float:
        """Lower quartile, the fastest of three: a step may be disturbed, and is never helped."""
        return sorted(self._seconds)[(len(self._seconds) - 1) // 4]

    @property
    def tokens(self) -> float:
        """Mean per step and row."""
        return sum(self._tokens) / len(self._tokens)

    def hoped_tokens(self, most: int) -> float:
        """The mean, its standard error and, fading, the hope that `most` tokens are emitted."""
        mean, count = self.tokens, len(self._tokens)
        variance = sum((tokens - mean) ** 2 for tokens in self._tokens) / max(1, count - 1)
        return mean + (variance / count) ** 0.5 + OPTIMISM * (most - mean) / (self.row_steps + OPTIMISM)


class OpenGate:
    """Always speculates: `gate=False`, and drafts that propose nothing."""

    is_open = True

    def speculates(self) -> bool:
        """Yes."""
        return True

    def record(self, tokens: int, rows: int, length: int) -> GateDecision | None:
        """Nothing to measure."""
        return None


class SpeculationGate:
    """Chooses between plain steps and speculation, step by step.

    The loop asks `speculates` when a step begins and calls `record` when it has ended.

    Args:
        most_tokens (`int`): Tokens that a step emits per row if everything is accepted.
        clock (`Callable[[], float]`, *optional*): Time in seconds.
    """

    is_open = False

    def __init__(self, most_tokens: int, clock: Callable[[], float] = time.perf_counter):
        self.most_tokens = most_tokens
        self._clock = clock
        self._paces = {PLAIN: Pace(), DRAFT: Pace()}
        self._choice = PLAIN
        self._verdict: str | None = None
        self._steps = 0  # of the present phase
        self._started = 0.0
        self._now = 0.0  # time of all steps so far: what passes between them is not the gate's
        self._plain_length = 0
        self._check_plain_at = self._try_draft_at = 0.0

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
        if self._steps > WARM_UP[self._choice]:
            self._paces[self._choice].add(tokens, rows, seconds)
        verdict = self._after_draft(length) if self._choice == DRAFT else self._after_plain(length)
        if verdict is None or verdict == self._verdict:
            return None
        self._verdict = verdict
        plain, draft = self._paces[PLAIN], self._paces[DRAFT]
        speeds = [rows * pace.tokens / max(pace.seconds, 1e-9) for pace in (plain, draft)]
        return GateDecision(verdict, length, speeds[0], speeds[1], draft.tokens)

    def _after_draft(self, length: int) -> str | None:
        """Go on until refuted, or until the plain step that it is compared with is out of date."""
        draft = self._paces[DRAFT]
        stale = length >= GROWTH * self._plain_length and self._now >= self._check_plain_at
        if stale or not self._may_pay():
            self._turn_to(PLAIN)  # measured anew, it has the last word
        elif draft.count >= CONFIRMING and draft.tokens * self._paces[PLAIN].seconds >= draft.seconds:
            return DRAFT
        return None

    def _after_plain(self, length: int) -> str | None:
        plain, draft = self._paces[PLAIN], self._paces[DRAFT]
        if plain.count == PLAIN_SAMPLES:
            self._plain_length = length
            if self._may_pay():
                steps = WARM_UP[PLAIN] + PLAIN_SAMPLES + 1
                self._check_plain_at = self._now + steps * plain.seconds / SHARE
                self._turn_to(DRAFT)
                return None
            lost = draft.seconds - draft.tokens * plain.seconds
            self._try_draft_at = self._now + (min(draft.count, TOKENS_WINDOW) + WARM_UP[DRAFT]) * lost / SHARE
            return PLAIN
        if plain.count > PLAIN_SAMPLES and self._now >= self._try_draft_at:
            draft.restart()
            self._turn_to(DRAFT)
        return None

    def _may_pay(self) -> bool:
        """Whether speculation is not refuted."""
        plain, draft = self._paces[PLAIN], self._paces[DRAFT]
        return draft.count < DRAFT_SAMPLES or draft.hoped_tokens(self.most_tokens) * plain.seconds >= draft.seconds

    def _turn_to(self, choice: str) -> None:
        self._choice, self._steps = choice, 0
        if choice == PLAIN:
            self._paces[PLAIN].restart()


class SharedGate:
    """The gate of rank 0, for all ranks of a sharded target: their steps must be the same.

    Args:
        gate ([`SpeculationGate`]): Asked on rank 0 alone.
        device (`torch.device`): Where the ranks talk to each other.
    """

    is_open = False

    def __init__(self, gate: SpeculationGate, device: torch.device):
        self.gate = gate
        self.device = device
        self._decides = distributed.get_rank() == 0

    def speculates(self) -> bool:
        """What rank 0 says."""
        answer = torch.tensor(int(self._decides and self.gate.speculates()), device=self.device)
        distributed.broadcast(answer, src=0)
        return bool(answer)

    def record(self, tokens: int, rows: int, length: int) -> GateDecision | None:
        """Take note of the step on rank 0; the others find out nothing."""
        return self.gate.record(tokens, rows, length) if self._decides else None


Gate = OpenGate | SpeculationGate | SharedGate


def gate_of(wanted: bool, drafter: Any, model: Any) -> Gate:
    """The gate of one call.

    Args:
        wanted (`bool`): The setting `gate`.
        drafter ([`Drafter`]): Of the call.
        model (`PreTrainedModel`): The target. If only some of the processes share it, they cannot agree: open.
    """
    if not wanted or drafter.num_nodes == 1:
        return OpenGate()
    gate = SpeculationGate(drafter.max_depth + 1)
    ranks = getattr(model, "tp_size", None) or 1
    if ranks == 1 or not distributed.is_available() or not distributed.is_initialized():
        return gate
    return SharedGate(gate, model.device) if ranks == distributed.get_world_size() else OpenGate()


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
    return (
        f"speculation does not pay here and is switched off for now: {decision.draft_tokens_per_second:.3g} tokens/s "
        f"at {decision.tau:.2f} tokens per verification, against {decision.plain_tokens_per_second:.3g} tokens/s "
        f"without drafting, behind {decision.length} tokens. It is tried again now and then. Fewer drafted tokens, a "
        "longer context or a draft that knows the text better may pay; draft.generation_config.gate = False always "
        "speculates."
    )
