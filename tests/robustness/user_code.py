"""Code of users in a call of `generate`, as data: what is passed to the call or done to the model, and its outcome.

user_processors.py, user_hooks.py and target_changes.py have the lists, test_users_code.py runs them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# Few tokens, so that drafts are often right; rows of a batch end at these.
VOCAB, ENDS = 32, [10, 11]
DIRECTION = torch.linspace(-1, 1, 64) * 4  # added to hidden states of the tiny targets, it changes the text


@dataclasses.dataclass
class Applied:
    """A user's code in one call.

    Attributes:
        options: Further arguments of `generate`.
        state: Returns what the user could see of its state. Called once, after `generate`.
        undo: Takes back what is not on the model alone.
    """

    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    state: Callable[[], Any] = lambda: None
    undo: Callable[[], Any] = lambda: None


@dataclasses.dataclass(frozen=True)
class Entry:
    """One kind of code.

    Attributes:
        apply: Function of a model that returns [`Applied`], or `None` if nothing is to be passed or taken back.
        is_passed: Whether it is passed to the call, so that models and drafts serve several calls.
        drafts: Whether a draft is used; `None` if that depends on the draft.
        reason: Pattern of the reason why it is not.
        is_lie: Whether it declares what is not true. Drafts of one node do not notice it, and need not.
        has_effect: Whether the text of one prompt differs from that without it; `None` if it may.
        name: Architecture of the target, of `tests/tiny_targets.py`.
        settings: Its settings, names and values.
    """

    apply: Callable[[Any], Applied | None]
    is_passed: bool = False
    drafts: bool | None = None
    reason: str = ""
    is_lie: bool = False
    has_effect: bool | None = True
    name: str = "llama"
    settings: tuple[tuple[str, Any], ...] = ()


def hidden_of(output: Any) -> torch.Tensor:
    """Return the hidden states in the output of a module, or in its arguments."""
    if isinstance(output, tuple):
        return output[0]
    return getattr(output, "last_hidden_state", output)


def first_layer(model: Any) -> nn.Module:
    return model.model.layers[0]


def replaced(owner: Any, name: str, value: Any) -> Applied:
    """Replace an attribute of a class or a module until it is taken back."""
    has_own = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, value)
    return Applied(undo=lambda: setattr(owner, name, before) if has_own else delattr(owner, name))
