"""Checks of settings that several drafts have."""

from collections.abc import Sequence
from typing import Any


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
