"""Which method trains which kind of draft."""

from typing import Any

from ..modeling.base import DraftModel
from ..modeling.modeling_longspec import LongSpecDraftModel
from ..modeling.modeling_tokenswift import TokenSwiftDraftModel
from .heads_method import HeadsMethod
from .longspec_method import LongSpecMethod
from .method import TrainingMethod

METHODS: dict[type[DraftModel], type[TrainingMethod]] = {
    LongSpecDraftModel: LongSpecMethod,
    TokenSwiftDraftModel: HeadsMethod,
}


def method_of(draft: Any) -> type[TrainingMethod]:
    """The method that trains `draft`.

    Raises:
        ValueError: If it is no draft that can be trained.
    """
    for kind, method in METHODS.items():
        if isinstance(draft, kind):
            return method
    calls = " or ".join(f"{kind.__name__}.from_target(target)" for kind in METHODS)
    raise ValueError(f"the model is a {type(draft).__name__}, which is not trained: make one with {calls}.")
