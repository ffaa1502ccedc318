"""The attention layers of a model, and hooks for decoder layers that do not pass keywords on to their attention.

An attention function gets its context as a keyword of the model's forward. The decoder layers of nemotron and stablelm
accept keywords and do not pass them on to their attention, which would accept them. Such layers are found in the source
of their forward, and hooks pass the keywords on.
"""

import ast
import inspect
import textwrap
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

from torch import nn

# Keywords that this package adds to a forward.
KEYWORDS = ("tree", "trial")


@contextmanager
def passed_on(model: nn.Module) -> Iterator[None]:
    """Pass `KEYWORDS` of this thread's forwards on to every attention layer of `model` while the context is open."""
    pairs = withheld(model)
    if not pairs:
        yield
        return
    given = _Given()

    def note(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        given.keywords = {name: kwargs[name] for name in KEYWORDS if name in kwargs}

    def add(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, given.keywords | kwargs

    with ExitStack() as hooks:
        for layer, attention in pairs:
            for module, hook in ((layer, note), (attention, add)):
                hooks.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


class _Given(threading.local):
    """Keywords of the decoder layer that runs in this thread; another thread may be using the same model."""

    def __init__(self) -> None:
        self.keywords: dict[str, Any] = {}


def withheld(model: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """Return the decoder layers that do not pass keywords on, each with its attention layer."""
    return [
        (layer, child)
        for layer in model.modules()
        for child in layer.children()
        if _attends(child) and _keeps_keywords(type(layer))  # type: ignore[arg-type]
    ]


def attention_layers(model: nn.Module) -> dict[int, nn.Module]:
    """Return every attention layer of `model` by the index of its cache layer."""
    return {module.layer_idx: module for module in model.modules() if _attends(module)}  # type: ignore[misc]


def _attends(module: nn.Module) -> bool:
    return isinstance(getattr(module, "layer_idx", None), int) and "get_interface(" in _source(type(module))  # type: ignore[arg-type]


@cache
def _keeps_keywords(kind: type) -> bool:
    """Return whether a forward accepts any keyword and passes none on."""
    parameters = inspect.signature(kind.forward).parameters.values()  # type: ignore[attr-defined]
    names = [parameter.name for parameter in parameters if parameter.kind is parameter.VAR_KEYWORD]
    if not names or not (source := _source(kind)):  # transformers, too, trusts a model without source
        return False
    return names[0] not in (node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name))


@cache
def _source(kind: type) -> str:
    """Return the source of a forward; an empty string if there is none."""
    try:
        return textwrap.dedent(inspect.getsource(kind.forward))  # type: ignore[attr-defined]
    except (OSError, TypeError):
        return ""
