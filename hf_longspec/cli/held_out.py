"""What a trained draft is worth: tau and costs on rows of the training text that were held out."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from transformers import PreTrainedModel

from ..modeling.plain.modeling_plain import PlainDraftModel
from ..training.data import DocumentEncoder
from .measuring import changed, run_call

# Of a dataset with a length, one row of a hundred is held out, within these bounds; of a stream, the first ones.
LEAST_HELD_OUT, MOST_HELD_OUT, LEAST_ROWS = 2, 32, 20
# Prompts are the first halves of rows. A machine for which the target is too large gets through one of them.
PROMPT_TOKENS, NEW_TOKENS, MOST_PROMPTS, LEAST_TOKENS, MOST_SECONDS = 256, 48, 8, 8, 40


@dataclass(frozen=True)
class HeldOut:
    """What was measured with greedy decoding, one row after another."""

    tau: float  # tokens per step of the draft, the target's own included
    pays_from: float  # time of a step with the draft over that of a step without
    texts: int  # number of continuations

    def __str__(self) -> str:
        return (
            f"tau {self.tau:.2f}: {self.tau:.2f} tokens per step in {self.texts} greedy continuations of held-out text."
            f" With the costs of the machine that trained it, the draft pays from about {self.pays_from:.2f} on."
        )

    @property
    def warning(self) -> str | None:
        """What is wrong with the draft; `None` if it pays."""
        if self.tau > self.pays_from:
            return None
        return (
            f"With tau {self.tau:.2f}, below {self.pays_from:.2f}, this draft makes decoding slower. "
            "Train it longer or on more text."
        )


def split(rows: Any) -> tuple[Any, Any]:
    """Return the training rows and those that are held out: the last ones, or the first ones of a stream.

    Of fewer than 20 rows none is held out, and the second result is `None`.
    """
    if not hasattr(rows, "__len__"):
        return rows.skip(LEAST_HELD_OUT), rows.take(LEAST_HELD_OUT)
    if len(rows) < LEAST_ROWS:
        return rows, None
    first = len(rows) - min(max(LEAST_HELD_OUT, len(rows) // 100), MOST_HELD_OUT)
    parts = range(first), range(first, len(rows))
    if hasattr(rows, "select"):  # of datasets
        return rows.select(parts[0]), rows.select(parts[1])
    return torch.utils.data.Subset(rows, parts[0]), torch.utils.data.Subset(rows, parts[1])


def measure(draft: Any, target: PreTrainedModel, rows: Iterable[Any], encoder: DocumentEncoder) -> HeldOut | None:
    """Continue a few rows with the draft and without; `None` if they are too short, or the target ends them at once."""
    began, with_draft, without = time.perf_counter(), [], []
    plain = PlainDraftModel.from_target(target)
    how: dict[str, Any] = {"gate": False} if "gate" in draft.settings else {}
    if "tree_branching" in draft.settings and target.device.type == "cpu":
        # a chain, the default of other drafts there: most trees do not pay, and the gate takes the part that does
        how["tree_branching"] = [1] * len(draft.setting("tree_branching"))
    for row in islice(rows, MOST_PROMPTS):
        tokens = encoder(row)[0]
        prompt = tokens[None, : min(PROMPT_TOKENS, len(tokens) // 2)]
        if prompt.shape[1] < LEAST_TOKENS:
            continue
        inputs = prompt, torch.ones_like(prompt)
        with changed(draft, how):
            with_draft.append(run_call(target, draft, inputs, tokens=NEW_TOKENS, seed=0))
        without.append(run_call(target, plain, inputs, tokens=NEW_TOKENS, seed=0))
        if time.perf_counter() - began > MOST_SECONDS:
            break
    steps, plain_steps = (sum(call.steps for call in calls) for calls in (with_draft, without))
    if not steps or not plain_steps:
        return None
    step, plain_step = (
        sum(call.decode_seconds for call in calls) / count
        for calls, count in ((with_draft, steps), (without, plain_steps))
    )
    return HeldOut(sum(call.tokens for call in with_draft) / steps, step / plain_step, len(with_draft))
