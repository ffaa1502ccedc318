"""The route from `model.generate(..., assistant_model=draft)` to the decoding loop of this package.

It is a removable patch: two methods of `GenerationMixin` and one function of pipelines are wrapped once per process.
`_assisted_decoding` leads to the loop, `_validate_generation_mode` refuses before `generate` builds a cache, and
`load_assistant_model` loads the draft of a pipeline. Drafts are recognised by their attribute `_is_longspec_draft`,
because an installed copy of this package and one loaded from the Hub have different classes. All other assistants run
the functions of transformers.
"""

import copy
import functools
import os
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from transformers import CONFIG_MAPPING, MODEL_MAPPING, GenerationMixin
from transformers.pipelines import base as pipelines

from .call import USER_CACHE, refuse
from .saved_config import read_config
from .target import TargetView
from .wing import WINGS

_STOCK = "_longspec_stock"
# Functions of a config.json that return the class of draft that reads it. The registry of drafts adds its own.
readers: list[Callable[[dict[str, Any]], Any]] = []
# Drafts that calls gave by their names, for each target.
_named: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
_OWNERS = {"_assisted_decoding": GenerationMixin, "_validate_generation_mode": GenerationMixin}
_OWNERS |= {"load_assistant_model": pipelines}


def install() -> None:
    """Route the drafts of this package to their loop. Repeating it, also from another copy, changes nothing."""
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
            assistant = mode_kwargs["assistant_model"] = _draft_of(assistant, self)
        if getattr(assistant, "_is_longspec_draft", False):
            if assistant.setting("on_unsupported") == "error" and USER_CACHE in WINGS:
                # before generate() makes such a cache
                refuse(WINGS[USER_CACHE].why_not_made(config.cache_implementation))
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
        draft = _draft_of(assistant_model, model, or_none=True) if is_name else assistant_model
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


def is_installed() -> bool:
    """Return whether drafts are routed."""
    return hasattr(GenerationMixin._assisted_decoding, _STOCK)


def stock_assisted_decoding() -> Any:
    """Return the function of transformers, which this or another copy may have wrapped."""
    return _stock("_assisted_decoding")


def _draft_of(name: str | os.PathLike | type, target: Any, or_none: bool = False) -> Any:
    """Return the draft of a folder or Hub id, loaded once for each target. No code of a repository is run.

    It is a saved one, or a checkpoint of another project that a draft of the installed package reads. A repository that
    is no draft is refused, or with `or_none` the result is `None`.
    """
    if isinstance(name, type):
        raise ValueError(
            f"assistant_model is the class {name.__name__}. Pass a draft, such as "
            "SpecAttnDraftModel.from_target(model)."
        )
    drafts = _named.setdefault(target, {})
    if (name := os.fspath(name)) not in drafts:
        try:
            config = read_config(name)
        except OSError as error:
            raise OSError(
                f"assistant_model={name!r} cannot be loaded ({str(error).splitlines()[0]}). Pass a draft, or the "
                "folder or Hub id of a saved or published one."
            ) from error
        kind = config.get("model_type")
        draft: Any = MODEL_MAPPING.get(CONFIG_MAPPING[kind], None) if kind in CONFIG_MAPPING else None
        if not getattr(draft, "_is_longspec_draft", False):
            draft = next((found for reader in readers if (found := reader(config)) is not None), None)
        if draft is None and or_none:
            return None
        if draft is None:
            raise ValueError(
                f"assistant_model={name!r} has model_type={kind!r} and is not a draft. For a small language model, "
                "pass AssistantDraftModel.from_pretrained(name, target=model)."
            )
        drafts[name] = draft.from_pretrained(name, target=target, trust_remote_code=False)
    return drafts[name]


def _stock(name: str) -> Any:
    current = getattr(_OWNERS[name], name)
    return getattr(current, _STOCK, current)
