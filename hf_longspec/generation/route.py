"""The route from `model.generate(..., assistant_model=draft)` to the decoding loop of this package.

It is a removable patch: `GenerationMixin._assisted_decoding` is wrapped once per process. Drafts are recognised by
their attribute `_is_longspec_draft`, because an installed copy of this package and one loaded from the Hub have
different classes. All other assistants run the function of transformers.
"""

import functools
from typing import Any

from transformers import GenerationMixin

_STOCK = "_longspec_stock"


def install() -> None:
    """Route the drafts of this package to their loop. Repeating it, also from another copy, changes nothing."""
    stock = stock_assisted_decoding()

    @functools.wraps(stock)
    def assisted_decoding(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(kwargs.get("assistant_model"), "_is_longspec_draft", False):
            return kwargs.pop("assistant_model").longspec_decoding(self, *args, **kwargs)
        return stock(self, *args, **kwargs)

    setattr(assisted_decoding, _STOCK, stock)
    GenerationMixin._assisted_decoding = assisted_decoding


def uninstall() -> None:
    """Restore the function of transformers."""
    GenerationMixin._assisted_decoding = stock_assisted_decoding()


def is_installed() -> bool:
    """Return whether drafts are routed."""
    return hasattr(GenerationMixin._assisted_decoding, _STOCK)


def stock_assisted_decoding() -> Any:
    """Return the function of transformers, which this or another copy may have wrapped."""
    current = GenerationMixin._assisted_decoding
    return getattr(current, _STOCK, current)
