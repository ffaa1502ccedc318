"""Forward hooks and patched forwards that a user put on a target.

A hook that treats all tokens alike, such as steering by a vector, has the same effect on a node of a tree as on a token
in plain `generate`. One that looks at the last token, at the size of a forward or at the number of calls has another.
Only its owner can tell: it declares `stateless = True`. `forward_check.py` then compares both ways of decoding.

Hooks of libraries (offloading, adapters, quantisation, tensor parallelism, training) treat all tokens alike.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules import module as of_torch
from transformers import PreTrainedModel

from ..sampling import declared
from ..target_modules import FORWARDS, foreign_code, name_of, package_of

HOOKS = ("_forward_pre_hooks", "_forward_hooks")
# Packages whose hooks are part of a model. Those of other libraries may be made for the rows of one call, such as those
# of PEFT with an adapter for each row.
OF_THE_MODEL = (__name__.split(".")[0], "torch", "transformers")

Hook = tuple[str, Callable[..., Any]]


def hooks_of(model: nn.Module) -> list[Hook]:
    """Return the hooks and patched forwards of a user on the modules of `model`, each with a name."""
    modules = {id(module) for module in model.modules()}
    shared = [*of_torch._global_forward_pre_hooks.values(), *of_torch._global_forward_hooks.values()]
    found = [("all modules of torch", hook) for hook in shared]
    for module in model.modules():
        functions = (*(hook for name in HOOKS for hook in vars(module)[name].values()), *_forwards_on(module))
        found += ((type(module).__name__, function) for function in functions)
    parts = ((foreign_code(function, modules), owner, function) for owner, function in found)
    return [(f"{name_of(part)} on {owner}", function) for part, owner, function in parts if part is not None]


def is_declared(function: Any) -> bool:
    """Return whether a hook, or what it binds, declares that it treats all tokens alike."""
    if isinstance(function, partial):
        return is_declared(function.func) or declared(function, "stateless") is True
    owner = getattr(function, "__self__", None)
    return any(declared(one, "stateless") is True for one in (function, owner) if one is not None)


def bare(model: PreTrainedModel) -> PreTrainedModel:
    """Return `model` without hooks: itself if it has none, or a twin that shares all weights and settings.

    It is for forwards that show how a model is built. They must not run hooks, which may keep state or expect the rows
    of a call. The model itself is left as it is, as another thread may be using it. Hooks that are part of it stay.
    """
    is_alone = not (of_torch._global_forward_pre_hooks or of_torch._global_forward_hooks)
    modules = {id(module) for module in model.modules()}
    beside = {id(module): [*map(id, _beside(module, modules))] for module in model.modules()}
    if is_alone and not any(beside.values()):
        return model
    twins: dict[int, nn.Module] = {}

    def twin_of(module: nn.Module) -> nn.Module:
        if id(module) not in twins:
            twin = twins[id(module)] = object.__new__(type(module))
            values, dropped = vars(module), beside[id(module)]
            vars(twin).update((name, value) for name, value in values.items() if id(value) not in dropped)
            for name in HOOKS:
                kept = ((key, hook) for key, hook in values[name].items() if id(hook) not in dropped)
                vars(twin)[name] = type(values[name])(kept)
            children = values["_modules"].items()
            vars(twin)["_modules"] = {name: None if child is None else twin_of(child) for name, child in children}
            if not (is_alone or any(vars(twin)[name] for name in HOOKS)):  # torch calls this in place of all hooks
                vars(twin)["_compiled_call_impl"] = twin.forward
        return twins[id(module)]

    return twin_of(model)


def _beside(module: nn.Module, modules: set[int]) -> list[Any]:
    """Return the hooks on a module that are not part of the model, and a forward that a user put in its place."""

    def is_foreign(function: Any) -> bool:
        return foreign_code(function, modules) is not None

    values = vars(module)
    hooks = [hook for name in HOOKS for hook in values[name].values()]
    found = [hook for hook in hooks if package_of(_bound_by(hook)) not in OF_THE_MODEL or is_foreign(hook)]
    if any(map(is_foreign, _forwards_on(module))):
        found += (values[name] for name in FORWARDS if name != "_old_forward" and name in values)
    return found


def _forwards_on(module: nn.Module) -> list[Any]:
    """Return what runs in the place of the forward of a module's class."""
    values = vars(module)
    functions = [values[name] for name in FORWARDS if values.get(name) is not None]
    if (hook := values.get("_hf_hook")) is not None:  # of accelerate, which calls two of its methods
        hooks = getattr(hook, "hooks", (hook,))
        functions += [getattr(one, name) for one in hooks for name in ("pre_forward", "post_forward")]
    return functions


def _bound_by(function: Any) -> Any:
    """Return the function that a hook binds."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__func__", function)
