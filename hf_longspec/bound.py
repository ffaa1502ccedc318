"""A draft in every call of `generate` of a model, whoever makes the call: trainers, pipelines, evaluation harnesses."""

import inspect
from collections.abc import Callable
from types import TracebackType
from typing import Any

from transformers import GenerationMixin, PreTrainedModel

from .generation import route


class bind:
    """Let every `generate` of a model use a draft, until `undo()` or the end of a `with` block.

    ```python
    with hf_longspec.bind(trainer, draft):
        trainer.train()
    ```

    Calls that pass an `assistant_model` of their own use that. What cannot be served with the draft is decoded without,
    as in a call with `assistant_model=draft`. Copies of the model are not bound.

    Args:
        model_or_trainer (`PreTrainedModel` or object with a `model`): A model, also within PEFT or
            `DistributedDataParallel`, or what has one: a trainer, a pipeline, a model of lm-eval.
        draft ([`DraftModel`], `str` or other `assistant_model`): The draft, its folder or Hub id.

    Attributes:
        owner (`Any`): What was passed.
        model (`PreTrainedModel`): The model.
        draft ([`DraftModel`]): The draft, whose `last_speculation` is that of the last call.
        listeners (`list[Callable]`): Functions that get the arguments by name and the result of each call that used
            the draft.

    Raises:
        ValueError: If there is no model that generates, or it is bound already.
    """

    def __init__(self, model_or_trainer: Any, draft: Any):
        self.owner, self.model = model_or_trainer, generating_model(model_or_trainer)
        if "generate" in vars(self.model):
            raise ValueError(f"{type(self.model).__name__}.generate is bound or replaced already. Undo that first.")
        self.draft = draft if getattr(draft, "_is_longspec_draft", False) else route.loaders[-1](draft, self.model)
        self.listeners: list[Callable[[dict[str, Any], Any], None]] = []
        self.model.generate = BoundGenerate(self.model, self.draft, self.listeners)

    def undo(self) -> None:
        """Let calls of `generate` use no draft again. Repeating it changes nothing."""
        vars(self.model).pop("generate", None)

    def __enter__(self) -> "bind":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


class BoundGenerate:
    """The method `generate` of a model, with a draft."""

    def __init__(self, model: PreTrainedModel, draft: Any, listeners: list[Callable[[dict[str, Any], Any], None]]):
        self.model, self.draft, self.listeners = model, draft, listeners

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("assistant_model") is not None:
            return type(self.model).generate(self.model, *args, **kwargs)
        result = type(self.model).generate(self.model, *args, **kwargs | {"assistant_model": self.draft})
        if self.listeners:
            arguments = inspect.signature(type(self.model).generate).bind(self.model, *args, **kwargs).arguments
            arguments |= arguments.pop("kwargs", {})
            for listener in self.listeners:
                listener(arguments, result)
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        """Let copies of the model have the method of their class."""
        return getattr, (self.model, "generate")


def generating_model(owner: Any) -> PreTrainedModel:
    """Return the model within wrappers of PEFT and of processes, or that of a trainer, a pipeline and the like."""
    found = owner
    for _ in range(8):  # wrappers within each other
        if isinstance(found, PreTrainedModel) and isinstance(found, GenerationMixin):
            return found
        if hasattr(found, "get_base_model"):  # of PEFT
            found = found.get_base_model()
        else:
            found = getattr(found, "module", None) or getattr(found, "model", None)
    name = type(owner).__name__
    raise ValueError(f"a {name} has no model that generates. Pass a model, or an object with a `model`.")
