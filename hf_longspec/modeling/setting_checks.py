"""Checks of settings that several drafts have."""

from collections.abc import Sequence
from typing import Any

MOST_CHOICES = 3


def check_integer(name: str, value: Any, least: int, most: int | None = None) -> None:
    """Refuse a value that is no integer from `least` to `most`.

    Raises:
        ValueError: With the name and the value of the setting.
    """
    if type(value) is not int or value < least or (most is not None and value > most):
        rule = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name}={value!r}: expected an integer {rule}.")


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Refuse a value that is none of `choices`.

    Raises:
        ValueError: With the name and the value of the setting.
    """
    if value not in choices:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(choices)}.")


def is_tree(widths: Any) -> bool:
    """Return whether a value is a list of positive integers, the nodes of each level of a tree."""
    return isinstance(widths, list | tuple) and bool(widths) and all(type(w) is int and w > 0 for w in widths)


def check_widths(name: str, widths: Any) -> None:
    """Refuse a value that is no list of the nodes of each level.

    Raises:
        ValueError: With the name and the value of the setting.
    """
    if not is_tree(widths):
        raise ValueError(f"{name}={widths!r}: expected a list of positive integers, the nodes of each level.")


def all_trees(configured: Any, choices: Any, name: str) -> list[Any]:
    """Return the configured tree and the others that the gate may choose, without duplicates.

    Args:
        configured (`Any`): Value of the settings that make up the tree.
        choices (`list[Any]`, *optional*): The setting `tree_choices`, a list of such values.
        name (`str`): Name of these settings, for the message.

    Raises:
        ValueError: If `choices` is not a list, or has more than `MOST_CHOICES` entries.

    >>> all_trees([4, 2], [[1, 1], (4, 2), [1, 1]], "tree_widths"), all_trees(4, None, "num_assistant_tokens")
    ([[4, 2], [1, 1]], [4])
    """
    if choices is None:
        choices = []
    if not isinstance(choices, list | tuple) or len(choices) > MOST_CHOICES:
        raise ValueError(
            f"tree_choices={choices!r}: expected None, or a list of at most {MOST_CHOICES} other values of {name}. The "
            "gate begins with the configured one and takes the fastest."
        )
    trees = [list(tree) if isinstance(tree, tuple) else tree for tree in (configured, *choices)]
    return [tree for place, tree in enumerate(trees) if tree not in trees[:place]]
