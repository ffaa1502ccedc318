"""TrainingMethod: what training has to know of a kind of draft."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from .arguments import DraftTrainingArguments
from .positions import check_length, position_limit


class TrainingMethod:
    """How one kind of draft is trained; a [`DraftTrainer`] makes one for its run.

    The loss of a step is a sum of terms. Each is the mean of a loss over the tokens that the whole step predicts in it,
    however the step is divided into batches and processes.

    Args:
        draft ([`DraftModel`]): The draft.
        target (`PreTrainedModel`): Its target.
        args ([`DraftTrainingArguments`]): Settings of the run.

    Attributes:
        count_shape (`tuple[int, int]`): Shape of what is counted for the log: levels of the draft, numbers of each.
        max_length (`int`, *optional*): Most tokens of a row.

    Raises:
        ValueError: If they do not go together.
    """

    count_shape: tuple[int, int]

    def __init__(self, draft: Any, target: PreTrainedModel, args: DraftTrainingArguments):
        self.draft = draft
        self.args = args
        self.position_limit = position_limit(target)
        check_length(args.max_length or 0, self.position_limit)
        self.max_length = args.max_length or self.position_limit

    def prepare(self, batch: dict[str, Any], step: int, total: int, rows: Sequence[int]) -> dict[str, Any]:
        """A batch with what its rows are trained with besides.

        Args:
            batch (`dict[str, Any]`): As the collator makes it.
            step (`int`): Number of the step.
            total (`int`): Rows of the step in all processes.
            rows (`Sequence[int]`): Numbers of these rows among them.
        """
        raise NotImplementedError

    def items(self, labels: torch.Tensor) -> torch.Tensor:
        """Tokens that each term predicts, `(terms,)`, of labels `(B, L)` that are not shifted."""
        raise NotImplementedError

    def loss(self, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums of the terms of a prepared batch, `(terms,)`, and its counts, of shape `count_shape`.

        Args:
            model (`Callable`): The draft, possibly wrapped for training in several processes.
            inputs (`dict[str, Any]`): The batch, on the device.
        """
        raise NotImplementedError

    def evaluate(self, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean loss of a batch that was not prepared, and the counts of each row, `(B, *count_shape)`."""
        raise NotImplementedError

    def summary(self, counts: Sequence[Sequence[float]]) -> dict[str, float]:
        """What the log says of counts of shape `count_shape`."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """What the states that can be stored depend on, beside the rows."""
        raise NotImplementedError

    def stored(self, tokens: torch.Tensor, number: int) -> dict[str, torch.Tensor]:
        """States of the target for a training row.

        Args:
            tokens (`torch.LongTensor` of shape `(L,)`): The row.
            number (`int`): Its number in the dataset.
        """
        raise NotImplementedError

    def resume(self, checkpoint: str) -> None:
        """Take up what an earlier run recorded in the draft's configuration in the folder `checkpoint`."""

    def record(self, accelerator: Any) -> None:
        """Write into the draft's configuration what a user of it shall know of the training."""
