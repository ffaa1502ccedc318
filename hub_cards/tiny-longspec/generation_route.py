# Published with a draft by hf_longspec, Apache-2.0.
"""The way from `model.generate(..., assistant_model=draft)` to this project's loop: one patch, removable.

`GenerationMixin._assisted_decoding` is wrapped once for the process. A draft is known by its attribute
`_is_longspec_draft`, not by its class: an installed copy of this package and one loaded from the Hub have different
classes. Every other assistant takes the stock function.
"""

import functools
from typing import Any

from transformers import GenerationMixin

_STOCK = "_longspec_stock"


def install() -> None:
    """Route drafts of this project to their own loop. Doing it again, also from another copy, changes nothing."""
    stock = stock_assisted_decoding()

    @functools.wraps(stock)
    def assisted_decoding(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(kwargs.get("assistant_model"), "_is_longspec_draft", False):
            return kwargs.pop("assistant_model").longspec_decoding(self, *args, **kwargs)
        return stock(self, *args, **kwargs)

    setattr(assisted_decoding, _STOCK, stock)
    GenerationMixin._assisted_decoding = assisted_decoding


def uninstall() -> None:
    """Restore transformers' own function."""
    GenerationMixin._assisted_decoding = stock_assisted_decoding()


def is_installed() -> bool:
    """Whether drafts are routed."""
    return hasattr(GenerationMixin._assisted_decoding, _STOCK)


def stock_assisted_decoding() -> Any:
    """Transformers' own function, whoever has wrapped it."""
    current = GenerationMixin._assisted_decoding
    return getattr(current, _STOCK, current)
