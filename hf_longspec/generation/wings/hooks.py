"""Forward hooks and patched forwards that a user put on a target.

A hook that treats all tokens alike, such as steering by a vector, has the same effect on a node of a tree as on a token
in plain `generate`. One that looks at the last token, at the size of a forward or at the number of calls has another.
`forward_check.py` compares both, and runs the hooks for it.

Hooks of libraries (offloading, adapters, quantisation, tensor parallelism) treat all tokens alike.
"""

import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules import module as of_torch
from transformers import PreTrainedModel

from .user_state import OF_LIBRARIES, OF_THE_MODEL, package_of

HOOKS = ("_forward_pre_hooks", "_forward_hooks")

Hook = tuple[str, nn.Module, Callable[..., Any]]


def hooks_of(model: nn.Module) -> list[Hook]:
    """Return the hooks and patched forwards of a user on the modules of `model`, each with a name and its module."""
    shared = [*of_torch._global_forward_pre_hooks.values(), *of_torch._global_forward_hooks.values()]
    found: list[Hook] = []
    for module in model.modules():
        functions = [*shared, *(hook for name in HOOKS for hook in vars(module)[name].values()), *_forwards_on(module)]
        found += [(_name(function, module), module, function) for function in functions if _is_users(function, module)]
        shared = []
    return found


def bare(model: PreTrainedModel) -> PreTrainedModel:
    """Return `model` without hooks: itself if it has none, or a twin that shares all weights and settings.

    It is for forwards that show how a model is built. They must not run hooks, which may keep state or expect the rows
    of a call. The model itself is left as it is, as another thread may be using it. Hooks that are part of it stay.
    """
    if not any(_beside(module) for module in model.modules()):
        return model
    twins: dict[int, nn.Module] = {}

    def twin_of(module: nn.Module) -> nn.Module:
        if id(module) not in twins:
            twin = twins[id(module)] = object.__new__(type(module))
            values, dropped = vars(module), [id(function) for function in _beside(module)]
            vars(twin).update((name, value) for name, value in values.items() if id(value) not in dropped)
            for name in HOOKS:
                kept = ((key, hook) for key, hook in values[name].items() if id(hook) not in dropped)
                vars(twin)[name] = type(values[name])(kept)
            children = values["_modules"].items()
            vars(twin)["_modules"] = {name: None if child is None else twin_of(child) for name, child in children}
        return twins[id(module)]

    return twin_of(model)


def _beside(module: nn.Module) -> list[Any]:
    """Return the hooks on a module that are not part of the model, and a forward that a user put in its place."""
    values = vars(module)
    hooks = [hook for name in HOOKS for hook in values[name].values()]
    found = [hook for hook in hooks if any(package_of(part) not in OF_THE_MODEL for part in _parts(hook))]
    if any(_is_users(function, module) for function in _forwards_on(module)):
        found.append(values.get("forward"))
    return found


def _forwards_on(module: nn.Module) -> list[Any]:
    """Return what runs in the place of the forward of a module's class."""
    values = vars(module)
    functions = [values[name] for name in ("forward", "_old_forward") if name in values]
    if (hook := values.get("_hf_hook")) is not None:  # of accelerate, which calls two of its methods
        hooks = getattr(hook, "hooks", (hook,))
        functions += [getattr(one, name) for one in hooks for name in ("pre_forward", "post_forward")]
    return functions


def _is_users(function: Any, module: nn.Module) -> bool:
    return any(package_of(part) not in OF_LIBRARIES for part in _parts(function) if part is not type(module).forward)


def _parts(function: Any) -> Iterator[Any]:
    """Yield the functions that a function consists of, without bound arguments; a decorator wraps one."""
    if not isinstance(function, partial | types.MethodType):
        yield function
    for name in ("func", "__func__", "__wrapped__"):
        if callable(inner := getattr(function, name, None)):
            yield from _parts(inner)


def _name(function: Any, module: nn.Module) -> str:
    part = next(_parts(function))
    return f"{getattr(part, '__qualname__', type(part).__qualname__)} on {type(module).__name__}"
