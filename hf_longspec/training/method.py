"""How one kind of draft is trained: the base class, and the look-up of the method of a draft."""

import os
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from transformers import PreTrainedModel

from ..modeling.register_draft import DRAFTS
from .arguments import DraftTrainingArguments
from .data import IGNORED
from .target_states import HiddenPass


class TrainingMethod:
    """Base class of the training methods. A [`DraftTrainer`] creates one instance for its run.

    The loss of a step is a sum of terms. Each term is a mean over the tokens that the whole step predicts for it, no
    matter how the step is divided into batches and processes.

    Args:
        draft ([`DraftModel`]): The draft.
        target (`PreTrainedModel`): The target.
        args ([`DraftTrainingArguments`]): Settings of the run.

    Attributes:
        count_shape (`tuple[int, int]`): Shape of the counts that are logged: levels of the draft, counts per level.
        max_length (`int`, *optional*): Largest number of tokens of a row.
        longest_position (`int`): What is recorded as `trained_max_length` in the draft's config, unless it is 0.

    Raises:
        ValueError: If the settings do not fit the draft or the target.
    """

    count_shape: tuple[int, int]
    longest_position = 0

    def __init__(self, draft: Any, target: PreTrainedModel, args: DraftTrainingArguments):
        self.draft = draft
        self.args = args
        # None if the target's configuration gives no limit
        self.position_limit = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
        check_length(args.max_length or 0, self.position_limit)
        self.max_length = args.max_length or self.position_limit

    def prepare(self, batch: dict[str, Any], step: int, total: int, rows: Sequence[int]) -> dict[str, Any]:
        """Add what the training rows need besides tokens and labels, such as positions.

        Args:
            batch (`dict[str, Any]`): Output of the collator.
            step (`int`): Number of the step.
            total (`int`): Number of rows of the step, in all processes.
            rows (`Sequence[int]`): Indices of the batch's rows among them.
        """
        raise NotImplementedError

    def items(self, labels: torch.Tensor) -> torch.Tensor:
        """Count the tokens that each term predicts, `(terms,)`. The labels `(B, L)` are not shifted."""
        raise NotImplementedError

    def loss(self, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sums of the terms `(terms,)` and the counts `count_shape` of a prepared batch.

        Args:
            model (`Callable`): The draft, which may be wrapped for training in several processes.
            inputs (`dict[str, Any]`): The batch, on the device.
        """
        raise NotImplementedError

    def evaluate(self, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean loss of a batch that was not prepared, and the counts of each row `(B, *count_shape)`."""
        raise NotImplementedError

    def summary(self, counts: Sequence[Sequence[float]]) -> dict[str, float]:
        """Compute the metrics of the log from counts of shape `count_shape`."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """Return everything except the rows and the target that stored states depend on."""
        raise NotImplementedError

    def stored(self, tokens: torch.Tensor, number: int) -> dict[str, torch.Tensor]:
        """Compute the states of the target that are stored for a training row.

        Args:
            tokens (`torch.LongTensor` of shape `(L,)`): The row.
            number (`int`): Its index in the dataset.
        """
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


class LevelsMethod(TrainingMethod):
    """Base of methods that train several levels on hidden states of the target.

    The loss has one term and the counts one row per level. Level i (from 0) predicts the tokens from index i + 2 on.
    Subclasses implement `run`.

    Args:
        draft ([`DraftModel`]): The draft.
        target (`PreTrainedModel`): The target.
        args ([`DraftTrainingArguments`]): Settings of the run.
        count_shape (`tuple[int, int]`): Number of levels, and of counts per level.
        wanted (`bool` or `tuple[int, ...]`): States to keep, see [`HiddenPass`].
    """

    def __init__(
        self,
        draft: Any,
        target: PreTrainedModel,
        args: DraftTrainingArguments,
        count_shape: tuple[int, int],
        wanted: bool | tuple[int, ...] = True,
    ):
        super().__init__(draft, target, args)
        self.count_shape = count_shape
        self.hidden_pass = HiddenPass(target, args.target_chunk_size, wanted)

    def run(self, model: Any, inputs: dict[str, Any], hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the levels over a batch.

        Args:
            model (`Callable`): The draft, which may be wrapped for training in several processes.
            inputs (`dict[str, Any]`): The batch. In evaluation it has `input_ids` and `labels` alone.
            hidden (`torch.Tensor` of shape `(B, L, hidden)`): The target's states.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: Sums of the losses `(levels,)`, and counts `(B, *count_shape)`.
        """
        raise NotImplementedError

    def is_trained(self, labels: torch.Tensor) -> torch.Tensor:
        """Return which labels are trained on, `(B, L)`."""
        return labels != IGNORED

    def items(self, labels: torch.Tensor) -> torch.Tensor:
        """Count the labels that each level predicts."""
        present = self.is_trained(labels)
        return torch.stack([present[:, level + 2 :].sum() for level in range(self.count_shape[0])])

    def loss(self, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each level's summed loss, and the counts."""
        totals, counts = self.run(model, inputs, self._hidden(inputs))
        return totals, counts.sum(0)

    def evaluate(self, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the levels' mean losses, and the counts of each row."""
        bare = {name: inputs[name] for name in ("input_ids", "labels")}
        totals, counts = self.run(model, bare, self._hidden(inputs))
        return (totals / self.items(inputs["labels"]).clamp_min(1)).sum(), counts

    def _hidden(self, inputs: dict[str, Any]) -> torch.Tensor:
        stored: torch.Tensor | None = inputs.get("hidden")
        return self.hidden_pass(inputs["input_ids"]) if stored is None else stored

    def stored(self, tokens: torch.Tensor, number: int) -> dict[str, torch.Tensor]:
        """Compute the target's states for a row."""
        check_length(len(tokens), self.position_limit)
        return {"hidden": self.hidden_pass(tokens[None].to(self.args.device))[0]}


def trained_drafts() -> dict[str, type[PreTrainedModel]]:
    """Return the classes of the drafts that can be trained, by `config.model_type`."""
    return {kind: draft.model for kind, draft in DRAFTS.items() if draft.training is not None}


def method_of(draft: Any) -> type[TrainingMethod]:
    """Return the method that trains `draft`.

    Raises:
        ValueError: If `draft` is not a draft that can be trained.
    """
    drafts = trained_drafts()
    for kind, draft_class in drafts.items():
        if isinstance(draft, draft_class):
            method: type[TrainingMethod] = DRAFTS[kind].load("training")
            return method
    calls = " or ".join(f"{draft_class.__name__}.from_target(target)" for draft_class in drafts.values())
    raise ValueError(f"the model is a {type(draft).__name__}, which cannot be trained: create a draft with {calls}.")


def check_length(length: int, limit: int | None) -> None:
    """Refuse a row of `length` tokens if the target has fewer positions.

    Raises:
        ValueError: With both numbers.
    """
    if limit is not None and length > limit:
        raise ValueError(
            f"a row has {length} tokens, and the target has {limit} positions (max_position_embeddings): set "
            "max_length, or cut the rows."
        )


def counted(hits: torch.Tensor, groups: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Count the hits and the predicted tokens of each group.

    Args:
        hits (`torch.BoolTensor` of shape `(n,)`): Whether the draft's most likely token is the wanted one.
        groups (`torch.LongTensor` of shape `(n,)`): Group of each predicted token.
        num_groups (`int`): Number of groups.

    Returns:
        `torch.DoubleTensor` of shape `(num_groups, 2)`.

    >>> counted(torch.tensor([True, False, True]), torch.tensor([1, 1, 2]), 3).tolist()
    [[0.0, 0.0], [1.0, 2.0], [1.0, 1.0]]
    """
    counts = torch.zeros(num_groups, 2, dtype=torch.float64, device=hits.device)
    return counts.index_add_(0, groups, torch.stack([hits, torch.ones_like(hits)], 1).to(counts.dtype))


def acceptance(counts: Sequence[Sequence[float]], name: str, first: int = 1) -> dict[str, float]:
    """Compute the share of hits of every level, and an estimate of tau.

    The shares are those of the levels of a draft tree with one branch. The estimate `1 + a1 + a1 a2 + ...`, bonus token
    included, assumes that the levels are independent. It is left out unless every level from 1 on was seen.

    Args:
        counts (`Sequence`): Hits and predicted tokens of each level.
        name (`str`): Name of a level in the log.
        first (`int`, *optional*, defaults to 1): Number of the first level.

    >>> acceptance([(3, 4), (2, 4)], "gap")
    {'acceptance_gap_1': 0.75, 'acceptance_gap_2': 0.5, 'estimated_tau': 2.125}
    """
    shares = {level: hits / places for level, (hits, places) in enumerate(counts, start=first) if places}
    logs = {f"acceptance_{name}_{level}": share for level, share in shares.items()}
    if first == 1 and len(shares) == len(counts):
        logs["estimated_tau"] = sum(accumulate([1.0, *shares.values()], mul))
    return logs
