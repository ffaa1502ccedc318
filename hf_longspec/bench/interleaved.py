"""Decodings that take turns within one text: what a machine does to the one, it does to the others.

Whole runs of some seconds each vary by ten per cent on a shared machine, as it is faster now and slower then. Here
every way to decode advances by a few tokens before the next one has its turn, so all see the same minute, and every
single step is timed. The gate counts the time of its own steps, and so does not notice.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..generation.cache import SpeculativeCache
from ..generation.decoding import Session
from ..generation.target import TargetView
from .decoding import MODES
from .prefill import PrefilledPrompts

# Tokens of a turn: enough that a cold cache at its beginning is little, few enough that it is a fraction of a second.
TURN = 32
# Kinds of steps; a catch-up is a plain one that is shown to a drafter behind its rest.
PLAIN_STEP, CATCH_UP, SPECULATION = "plain", "catch-up", "speculation"

Clocks = tuple[Callable[[], float], Callable[[], float]]
CLOCKS: Clocks = (time.perf_counter, time.process_time)


@dataclass(frozen=True)
class TimedStep:
    """One iteration of the loop.

    Args:
        turn (`int`): Which turn it belongs to.
        kind (`str`): `plain`, `catch-up` or `speculation`.
        seconds (`float`): By the wall clock.
        cpu_seconds (`float`): That this process ran on a processor.
    """

    turn: int
    kind: str
    seconds: float
    cpu_seconds: float


class SteppedRun:
    """One decoding behind a prefilled prompt, advanced from outside; the prompt is done, the first token is out.

    Args:
        model (`PreTrainedModel`): From [`load_target`].
        draft (`DraftModel`): How to decode, with its setting `gate`.
        prompts ([`PrefilledPrompts`]): Where decoding starts.
        row (`int`): Which of them.
        context (`int`): How much of it.
        mode (`str`): `sample` or `greedy`.
        seed (`int`): Of the sampling.
        tokens (`int`): Tokens behind the first one.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: PreTrainedModel,
        draft: Any,
        prompts: PrefilledPrompts,
        row: int,
        context: int,
        *,
        mode: str,
        seed: int,
        tokens: int,
    ):
        rows = slice(row, row + 1)
        cache = SpeculativeCache(model.config, 1, context + tokens + 1)
        prompts.fill(cache, rows, context - draft.num_tree_nodes(TargetView(model)))
        prompt = prompts.prompt(rows, context)
        options: dict[str, Any] = {**MODES[mode], "max_new_tokens": tokens + 1, "past_key_values": cache}

        def opened(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs) -> Session:
            target = TargetView(model)
            session = Session(target, draft, input_ids, logits_processor, stopping_criteria, generation_config, None)
            session.open_cache(model_kwargs)
            return session

        torch.manual_seed(seed)
        # generate() prepares processors and criteria, and returns what it is given
        self.session: Session = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), custom_generate=opened, **options
        )
        self.steps: list[TimedStep] = []
        self.session.prefill()
        with self.session.target.attention():
            self.session.seed()

    @property
    def text(self) -> list[int]:
        """Emitted tokens, the first one included."""
        return self.session.sequences.generated[0].tolist()

    def advance(self, turn: int, tokens: int, clocks: Clocks = CLOCKS) -> None:
        """Take steps until `tokens` more than the first token are out."""
        while not self.session.sequences.finished and len(self.session.sequences.generated[0]) <= tokens:
            speculated = self.session.stats.num_spec_steps
            before = [clock() for clock in clocks]
            self.session.iterate()
            wall, cpu = (clock() - start for clock, start in zip(clocks, before, strict=True))
            self.steps.append(TimedStep(turn, self._kind(speculated), wall, cpu))

    def _kind(self, speculated: int) -> str:
        """Of the last step, behind `speculated` that speculated."""
        if self.session.stats.num_spec_steps > speculated:
            return SPECULATION if self.session.drafter.num_nodes > 1 else PLAIN_STEP
        return PLAIN_STEP if self.session.drafter.is_steady else CATCH_UP


@torch.no_grad()
def interleave(runs: Mapping[str, SteppedRun], tokens: int, clocks: Clocks = CLOCKS) -> None:
    """Advance runs of one target to `tokens` tokens in turns of `TURN`, every other round in reverse order."""
    with next(iter(runs.values())).session.target.attention():
        for turn, reached in enumerate(range(TURN, tokens + TURN, TURN)):
            names = list(runs) if turn % 2 == 0 else list(runs)[::-1]
            for name in names:
                runs[name].advance(turn, min(reached, tokens), clocks)


def accounted(
    steps: Sequence[Sequence[TimedStep]], base: Sequence[Sequence[TimedStep]]
) -> tuple[float, dict[str, Any]]:
    """Time of some runs over that of `base`, from exact counts of steps and the median cost of each kind.

    A step's cost is its time over the median of the base's steps in the same turn: the unit follows the machine.
    Medians leave out what disturbed single steps, so this says what the choice of steps costs.

    Args:
        steps (`Sequence[Sequence[TimedStep]]`): Of each run.
        base (`Sequence[Sequence[TimedStep]]`): Likewise, of the loop without a draft beside it.

    Returns:
        The ratio, and for each kind how many steps a run has on average and their median cost.

    >>> plain = [TimedStep(0, "plain", 1.0, 1.0)] * 4
    >>> accounted([[TimedStep(0, "plain", 1.0, 1.0)] * 3 + [TimedStep(0, "speculation", 3.0, 3.0)]], [plain])[0]
    1.5
    """
    costs: dict[str, list[float]] = {}
    for run, beside in zip(steps, base, strict=True):
        turns: dict[int, list[float]] = {}
        for step in beside:
            turns.setdefault(step.turn, []).append(step.seconds)
        units = {turn: statistics.median(seconds) for turn, seconds in turns.items()}
        for step in run:
            costs.setdefault(step.kind, []).append(step.seconds / units[step.turn])
    kinds = {
        kind: {"steps": len(found) / len(steps), "cost": statistics.median(found)} for kind, found in costs.items()
    }
    total = sum(kind["steps"] * kind["cost"] for kind in kinds.values())
    return total / (sum(map(len, base)) / len(base)), kinds
