"""What a training run refuses before it begins, in one line each."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..generation.target import TargetView
from .arguments import DraftTrainingArguments
from .documents import DocumentEncoder

HALVES = (torch.float16, torch.bfloat16)


def check_models(draft: Any, target: PreTrainedModel, args: DraftTrainingArguments) -> None:
    """Refuse a target that the draft was not made for or that cannot be decoded speculatively.

    Raises:
        ValueError: With value, rule and remedy.
    """
    view = TargetView(target)
    if reasons := view.why_not():
        raise ValueError(f"{type(target).__name__} cannot be decoded speculatively: {'; '.join(reasons)}.")
    draft.check(view)
    if args.n_gpu > 1:
        raise ValueError(f"{args.n_gpu} GPUs in one process: run one process on each, with accelerate launch.")


def check_weights(model: Any) -> None:
    """Refuse weights that training could not move: none, or in half precision.

    Raises:
        ValueError: With value, rule and remedy.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise ValueError("no weight of the draft requires a gradient: call draft.requires_grad_(True).")
    if halves := {parameter.dtype for parameter in trained} & set(HALVES):
        raise ValueError(
            f"the draft's weights are {', '.join(map(str, halves))}, in which small updates are rounded away: train "
            "draft.float(), with bf16=True for speed."
        )


def check_data(name: str, dataset: Any, encoder: DocumentEncoder) -> None:
    """Refuse a dataset without rows, and one without a column to train on.

    Raises:
        ValueError: With value, rule and remedy.
    """
    if dataset is None or isinstance(dataset, dict):
        return
    first = next(iter(dataset), None) if not hasattr(dataset, "__len__") or len(dataset) else None
    if first is None:
        raise ValueError(f"{name} has no rows: check its path, split and filters.")
    encoder.check(list(first))


def last_complete_checkpoint(folder: str | Path) -> str:
    """The newest checkpoint below `folder` that was written to its end: its trainer_state.json comes last.

    Raises:
        ValueError: If there is none.
    """
    states = Path(folder).glob("checkpoint-*/trainer_state.json")
    complete = [path.parent for path in states if path.parent.name.removeprefix("checkpoint-").isdigit()]
    if not complete:
        raise ValueError(f"{str(folder)!r} has no complete checkpoint to resume from: start without resuming.")
    return str(max(complete, key=lambda path: int(path.name.removeprefix("checkpoint-"))))
