"""How one kind of draft is trained: the base classes of the training methods, and the metrics that they log."""

import os
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from transformers import PreTrainedModel

from ..generation.target_modules import TargetEnds, final_norm_of
from ..modeling.register_draft import DRAFTS
from .arguments import DraftTrainingArguments
from .data import IGNORED
from .losses import DraftLoss
from .target_states import TargetPass


class TrainingMethod:
    """Base class of the training methods. A [`DraftTrainer`] creates one instance for its run.

    The loss of a step is a sum of terms. Each term is a mean over the tokens that the whole step predicts for it, no
    matter how the step is divided into batches and processes.
    """

    levels: int  # of the draft, for each of which hits and predicted tokens are counted
    longest_position = 0  # recorded as `trained_max_length` in the draft's config, unless it is 0

    def __init__(self, draft: Any, target: PreTrainedModel, args: DraftTrainingArguments):
        self.draft = draft
        self.args = args
        # None if the target's configuration gives no limit
        self.position_limit = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
        check_length(args.max_length or 0, self.position_limit)
        self.max_length = args.max_length or self.position_limit

    def prepare(self, batch: dict[str, Any], step: int, total: int, rows: Sequence[int]) -> dict[str, Any]:
        """Add what the training rows need besides tokens and labels, such as positions; nothing by default.

        A step has `total` rows in all processes; `rows` are the indices of the batch's rows among them.
        """
        return batch

    def is_trained(self, labels: torch.Tensor) -> torch.Tensor:
        """Return which labels are trained on, as a bool tensor of their shape.

        A draft that has some of the target's tokens cannot learn others by `loss="ce"`. With `loss="kl"` such tokens
        tell the distribution over those that it has.
        """
        present = labels != IGNORED
        if self.args.loss == "ce" and getattr(self.draft, "d2t", None) is not None:
            present = present & torch.isin(labels, self.draft.token_ids.to(labels.device))
        return present

    def items(self, labels: torch.Tensor) -> torch.Tensor:
        """Count the tokens that each term predicts, `(terms,)`. The labels `(B, L)` are not shifted."""
        raise NotImplementedError

    def loss(self, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sums of the terms `(terms,)` and the counts `(levels, 2)` of a prepared batch."""
        raise NotImplementedError

    def evaluate(self, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean loss of a batch that was not prepared, and the counts of each row `(B, levels, 2)`."""
        raise NotImplementedError

    def summary(self, counts: Sequence[Sequence[float]]) -> dict[str, float]:
        """Compute the metrics of the log from counts `(levels, 2)`."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """Return everything except the rows and the target that stored states depend on."""
        raise NotImplementedError

    def stored(self, tokens: torch.Tensor, number: int) -> dict[str, torch.Tensor]:
        """Compute the states of the target that are stored for the training row `number`, tokens `(L,)`."""
        raise NotImplementedError

    def resume(self, checkpoint: str) -> None:
        """Restore `longest_position` from the draft's configuration in the folder `checkpoint` of an earlier run."""
        if os.path.isfile(os.path.join(checkpoint, "config.json")):
            before = type(self.draft.config).from_pretrained(checkpoint)
            self.longest_position = max(self.longest_position, getattr(before, "trained_max_length", None) or 0)

    def record(self, accelerator: Any) -> None:
        """Record the `longest_position` of all processes in the draft's configuration."""
        longest = accelerator.gather(torch.tensor([self.longest_position], device=accelerator.device))
        if int(longest.max()):
            self.draft.config.trained_max_length = int(longest.max())


# Weight of the loss of chained step s is this to the power of s, as the authors of EAGLE-3 train.
STEP_WEIGHT = 0.8


class LevelsMethod(TrainingMethod):
    """Base of methods that train several levels on hidden states of the target, by default the input of its final norm.

    The loss has one term and the counts one row per level. Level i (from 0) predicts the tokens from index i + 2 on.
    Subclasses implement `run`; `level` is what they call a level. The states end with the input of the final norm if
    `loss="kl"`.
    """

    level = "step"

    def __init__(
        self,
        draft: Any,
        target: PreTrainedModel,
        args: DraftTrainingArguments,
        levels: int,
        layers: bool | tuple[int, ...] = True,
    ):
        super().__init__(draft, target, args)
        if levels < 1:
            raise ValueError(f"training_steps={levels} in the draft's config: expected at least 1; 3 is usual.")
        if args.max_offset:
            raise ValueError(f"max_offset={args.max_offset}: these drafts have no positions to offset. Leave it out.")
        self.levels = levels
        self.target, self.norm = target, final_norm_of(target)
        self.target_pass = TargetPass(target, args.target_chunk_size, layers)
        token_ids = None if getattr(draft, "d2t", None) is None else draft.token_ids
        self.ends = TargetEnds(target)
        self.objective = DraftLoss(args.loss, self.ends, args.loss_chunk_size, self.norm, token_ids)

    def run(self, model: Any, inputs: dict[str, Any], hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sums of the losses `(levels,)`, and counts `(B, levels, 2)`, on states `(B, L, hidden)`."""
        raise NotImplementedError

    def summary(self, counts: Sequence[Sequence[float]]) -> dict[str, float]:
        return acceptance(counts, self.level)

    def items(self, labels: torch.Tensor) -> torch.Tensor:
        present = self.is_trained(labels)
        return torch.stack([present[:, level + 2 :].sum() for level in range(self.levels)])

    def loss(self, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = inputs.get("hidden")  # of a KVStore
        hidden = self.target_pass(inputs["input_ids"]).hidden if hidden is None else hidden
        totals, counts = self.run(model, inputs, hidden)
        return totals, counts.sum(0)

    def evaluate(self, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        bare = {name: inputs[name] for name in ("input_ids", "labels")}
        totals, counts = self.run(model, bare, self.target_pass(inputs["input_ids"]).hidden)
        return (totals / self.items(inputs["labels"]).clamp_min(1)).sum(), counts

    def of_all_levels(self, results: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sums `(levels,)` and counts `(B, levels, 2)` of the first levels; of others, there are none."""
        totals, counts = (torch.stack(parts, dim) for dim, parts in enumerate(zip(*results, strict=True)))
        missing = self.levels - len(results)
        pad = torch.nn.functional.pad
        return pad(totals, (0, missing)), pad(counts, (0, 0, 0, missing))

    def facts(self) -> dict[str, Any]:
        return {"states": list(getattr(self, "layers", ("final",))), "max_length": self.args.max_length}

    def stored(self, tokens: torch.Tensor, number: int) -> dict[str, torch.Tensor]:
        return {"hidden": self.target_pass(tokens[None].to(self.args.device)).hidden[0]}


def trained_drafts() -> dict[str, type[PreTrainedModel]]:
    """Return the classes of the drafts that can be trained, by `config.model_type`."""
    return {kind: draft.model for kind, draft in DRAFTS.items() if draft.training is not None}


def method_of(draft: Any) -> type[TrainingMethod]:
    drafts = trained_drafts()
    for kind, draft_class in drafts.items():
        if isinstance(draft, draft_class):
            return DRAFTS[kind].load("training")
    calls = " or ".join(f"{draft_class.__name__}.from_target(target)" for draft_class in drafts.values())
    raise ValueError(f"a {type(draft).__name__} cannot be trained: create a draft with {calls}.")


def check_length(length: int, limit: int | None) -> None:
    """Refuse a row of `length` tokens if the target has fewer positions."""
    if limit is not None and length > limit:
        raise ValueError(
            f"a row has {length} tokens, more than the target's {limit} positions (max_position_embeddings): set "
            "max_length, or shorten the rows."
        )


def counted(hits: torch.Tensor, groups: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Count the hits and the predicted tokens of each group.

    >>> counted(torch.tensor([True, False, True]), torch.tensor([1, 1, 2]), 3).tolist()
    [[0.0, 0.0], [1.0, 2.0], [1.0, 1.0]]
    """
    counts = torch.zeros(num_groups, 2, dtype=torch.float64, device=hits.device)
    return counts.index_add_(0, groups, torch.stack([hits, torch.ones_like(hits)], 1).to(counts.dtype))


def acceptance(counts: Sequence[Sequence[float]], name: str, first: int = 1) -> dict[str, float]:
    """Compute the share of hits of every level, from hits and predicted tokens of each, and an estimate of tau.

    The shares are those of the levels of a draft tree with one branch. The estimate `1 + a1 + a1 a2 + ...`, bonus token
    included, assumes that the levels are independent. It is omitted unless every level from 1 on has counts.

    >>> acceptance([(3, 4), (2, 4)], "gap")
    {'acceptance_gap_1': 0.75, 'acceptance_gap_2': 0.5, 'estimated_tau': 2.125}
    """
    shares = {level: hits / places for level, (hits, places) in enumerate(counts, start=first) if places}
    logs = {f"acceptance_{name}_{level}": share for level, share in shares.items()}
    if first == 1 and len(shares) == len(counts):
        logs["estimated_tau"] = sum(accumulate([1.0, *shares.values()], mul))
    return logs
