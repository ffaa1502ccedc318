"""Calls of the stand-ins of kernel packages in this folder, and faults that tests give to them.

Transformers looks the functions of these packages up when it imports a model's module and keeps them, so a test cannot
replace them later.
"""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

# Calls by the name of the function and the number of tokens.
CALLS: Counter[tuple[str, int]] = Counter()
# Functions by name that run in place of a stand-in and get it as their first argument.
FAULTS: dict[str, Callable[..., Any]] = {}


def counted(tokens: Callable[..., int]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Count the calls of a function, whose arguments `tokens` gets, and let `FAULTS` change it."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            CALLS[function.__name__, tokens(*args)] += 1
            if (fault := FAULTS.get(function.__name__)) is not None:
                return fault(function, *args, **kwargs)
            return function(*args, **kwargs)

        return wrapper

    return decorate
