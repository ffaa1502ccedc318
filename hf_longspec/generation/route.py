"""The route from `model.generate(..., assistant_model=draft)` to the decoding loop of this package.

It is a removable patch: two methods of `GenerationMixin` and one function of pipelines are wrapped once per process.
`_assisted_decoding` leads to the loop, `_validate_generation_mode` refuses before `generate` builds a cache, and
`load_assistant_model` loads the draft of a pipeline. Drafts are recognised by their attribute `_is_longspec_draft`, as
this part imports no draft. All other assistants run the functions of transformers.
"""

import copy
import functools
import os
from collections.abc import Callable
from typing import Any

from transformers import GenerationMixin
from transformers.pipelines import base as pipelines

from .call import USER_CACHE, refuse
from .special_case import SPECIAL_CASES
from .target import TargetView

_STOCK = "_longspec_stock"
# A function of a name and a target that loads the draft of a folder or Hub id. With `or_none=True`, it returns `None`
# for other repositories. The storage of drafts adds it.
loaders: list[Callable[..., Any]] = []
_OWNERS = {"_assisted_decoding": GenerationMixin, "_validate_generation_mode": GenerationMixin}
_OWNERS |= {"load_assistant_model": pipelines}


def install() -> None:
    """Route the drafts of this package to their loop. Repeating it changes nothing."""
    stock = decode, validate, load = tuple(map(_stock, _OWNERS))

    @functools.wraps(decode)
    def assisted_decoding(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(kwargs.get("assistant_model"), "_is_longspec_draft", False):
            return kwargs.pop("assistant_model").longspec_decoding(self, *args, **kwargs)
        return decode(self, *args, **kwargs)

    @functools.wraps(validate)
    def validate_generation_mode(self: Any, mode: Any, config: Any, mode_kwargs: dict[str, Any]) -> None:
        assistant: Any = mode_kwargs.get("assistant_model")
        if isinstance(assistant, str | os.PathLike | type):
            assistant = mode_kwargs["assistant_model"] = loaders[-1](assistant, self)
        if getattr(assistant, "_is_longspec_draft", False):
            if assistant.setting("on_unsupported") == "error":
                # before generate() makes such a cache
                refuse(SPECIAL_CASES[USER_CACHE].why_not_made(config.cache_implementation))
            if assistant.config.vocab_size != self.config.get_text_config().vocab_size:
                assistant.check(TargetView(self))  # transformers would ask for the tokenizers of both
            config = copy.copy(config)
            config.num_return_sequences = 1  # generate() repeats the rows, which transformers' assistants do not take
            if getattr(self, "_is_stateful", False) and TargetView(self).has_states:
                self = copy.copy(self)
                self._is_stateful = False  # states that the loop can verify and roll back
        validate(self, mode, config, mode_kwargs)

    @functools.wraps(load)
    def load_assistant_model(model: Any, assistant_model: Any, assistant_tokenizer: Any) -> Any:
        is_name = isinstance(assistant_model, str | os.PathLike)
        draft = loaders[-1](assistant_model, model, or_none=True) if is_name else assistant_model
        if getattr(draft, "_is_longspec_draft", False):  # its vocabulary is that of the model
            return draft, None
        return load(model, assistant_model, assistant_tokenizer)

    patches = assisted_decoding, validate_generation_mode, load_assistant_model
    for (name, owner), function, patch in zip(_OWNERS.items(), stock, patches, strict=True):
        setattr(patch, _STOCK, function)
        setattr(owner, name, patch)


def uninstall() -> None:
    """Restore the functions of transformers."""
    for name, owner in _OWNERS.items():
        setattr(owner, name, _stock(name))


def _stock(name: str) -> Any:
    """Return the function of transformers, which may be wrapped."""
    current = getattr(_OWNERS[name], name)
    return getattr(current, _STOCK, current)
