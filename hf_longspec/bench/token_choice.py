"""How the target chooses its tokens in a measured call: greedy or sampled, from what, under which penalty."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import LogitsProcessorList

from ..generation.contextual_penalty import ContextualPenaltyLogitsProcessor

# Of the contextual penalty, when only the penalty is given: the one of TokenSwift's runs.
DEFAULT_WINDOW = 1024


@dataclass(frozen=True)
class Decoding:
    """How the target chooses its tokens.

    Args:
        temperature (`float`): 0 is greedy.
        top_k (`int`): 0 cuts nothing off; so do the defaults of the next two.
        penalty (`float`, *optional*): Contextual penalty over the last `window` tokens.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float | None = None
    penalty: float | None = None
    window: int = DEFAULT_WINDOW

    def __post_init__(self) -> None:
        checks = {
            "temperature": (self.temperature >= 0, "at least 0, which is greedy"),
            "top_k": (self.top_k >= 0, "at least 0, which cuts nothing off"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "min_p": (self.min_p is None or 0 <= self.min_p <= 1, "in [0, 1]"),
        }
        for name, (fine, rule) in checks.items():
            if not fine:
                raise ValueError(f"{name}={getattr(self, name)}: expected a number {rule}.")
        self.processors()  # refuses a penalty or a window out of range

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0

    def options(self) -> dict[str, Any]:
        """Arguments of `generate`."""
        if self.greedy:
            return {"do_sample": False}
        chosen = {"do_sample": True, "temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        return chosen if self.min_p is None else chosen | {"min_p": self.min_p}

    def processors(self) -> LogitsProcessorList:
        """A new processor for every call."""
        if self.penalty is None:
            return LogitsProcessorList()
        return LogitsProcessorList([ContextualPenaltyLogitsProcessor(self.penalty, self.window)])

    def to_dict(self) -> dict[str, Any]:
        """What differs from plain greedy decoding."""
        values = vars(self)
        kept = {name: value for name, value in values.items() if value != type(self).__dataclass_fields__[name].default}
        return kept | ({"window": self.window} if self.penalty is not None else {})


def decoding_of(values: Mapping[str, Any]) -> Decoding:
    """From the keys of [`Decoding`].

    Raises:
        ValueError: If a value is out of range, or a window is given without a penalty.
    """
    if "window" in values and values.get("penalty") is None:
        raise ValueError(
            f"window={values['window']} without a penalty has no effect: pass penalty=1.2, or leave it out."
        )
    return Decoding(**values)
