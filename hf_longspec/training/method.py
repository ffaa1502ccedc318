"""How one kind of draft is trained: the base class, and the look-up of the method of a draft."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ..modeling.register_draft import DRAFTS
from .arguments import DraftTrainingArguments


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

    Raises:
        ValueError: If the settings do not fit the draft or the target.
    """

    count_shape: tuple[int, int]

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
        """Restore what an earlier run recorded in the draft's configuration in the folder `checkpoint`."""

    def record(self, accelerator: Any) -> None:
        """Record in the draft's configuration what its users need to know about the training."""


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
