"""The route from `model.generate(..., assistant_model=draft)` to the decoding loop of this package.

It is a removable patch: two methods of `GenerationMixin` are wrapped once per process. `_assisted_decoding` leads to
the loop, and `_validate_generation_mode` refuses before `generate` builds a cache. Drafts are recognised by their
attribute `_is_longspec_draft`, because an installed copy of this package and one loaded from the Hub have different
classes. All other assistants run the functions of transformers.
"""

import functools
from typing import Any

from transformers import GenerationMixin

from .user_cache import refuse_cache_implementation

_STOCK = "_longspec_stock"


def install() -> None:
    """Route the drafts of this package to their loop. Repeating it, also from another copy, changes nothing."""
    decode, validate = stock_assisted_decoding(), _stock("_validate_generation_mode")

    @functools.wraps(decode)
    def assisted_decoding(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(kwargs.get("assistant_model"), "_is_longspec_draft", False):
            return kwargs.pop("assistant_model").longspec_decoding(self, *args, **kwargs)
        return decode(self, *args, **kwargs)

    @functools.wraps(validate)
    def validate_generation_mode(self: Any, mode: Any, config: Any, mode_kwargs: dict[str, Any]) -> None:
        if getattr(mode_kwargs.get("assistant_model"), "_is_longspec_draft", False):
            refuse_cache_implementation(config.cache_implementation)
        validate(self, mode, config, mode_kwargs)

    setattr(assisted_decoding, _STOCK, decode)
    setattr(validate_generation_mode, _STOCK, validate)
    GenerationMixin._assisted_decoding = assisted_decoding
    GenerationMixin._validate_generation_mode = validate_generation_mode


def uninstall() -> None:
    """Restore the functions of transformers."""
    GenerationMixin._assisted_decoding = stock_assisted_decoding()
    GenerationMixin._validate_generation_mode = _stock("_validate_generation_mode")


def is_installed() -> bool:
    """Return whether drafts are routed."""
    return hasattr(GenerationMixin._assisted_decoding, _STOCK)


def stock_assisted_decoding() -> Any:
    """Return the function of transformers, which this or another copy may have wrapped."""
    return _stock("_assisted_decoding")


def _stock(name: str) -> Any:
    current = getattr(GenerationMixin, name)
    return getattr(current, _STOCK, current)
