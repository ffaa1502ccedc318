"""Forward hooks and patched forwards that a user put on a target.

A hook that treats all tokens alike, such as steering by a vector, has the same effect on a node of a tree as on a token
in plain `generate`. One that looks at the last token, at the size of a forward or at the number of calls has another.
`forward_check.py` compares both, and runs the hooks for it. [`HookState`] keeps what they hold, tells whether that has
changed, and puts it back.

Hooks of libraries (offloading, adapters, quantisation, tensor parallelism) treat all tokens alike.
"""

import random
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from logging import Logger
from re import Pattern
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules import module as of_torch
from transformers import PreTrainedModel

# Packages whose hooks and forwards are no user's. Those of the first three are part of the model. Hooks of the others
# may be made for the rows of one call, such as those of PEFT with an adapter for each row.
OF_THE_MODEL = (__name__.split(".")[0], "torch", "transformers")
OF_LIBRARIES = {*OF_THE_MODEL, "accelerate", "bitsandbytes", "compressed_tensors", "hqq", "kernels", "liger_kernel"}
OF_LIBRARIES |= {"optimum", "peft", "torchao"}
# Bytes of the largest tensor of a hook that is kept to be compared.
MOST_BYTES = 1 << 28

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
    found = [hook for hook in hooks if any(_root(part) not in OF_THE_MODEL for part in _parts(hook))]
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
    return any(_root(part) not in OF_LIBRARIES for part in _parts(function) if part is not type(module).forward)


def _parts(function: Any) -> Iterator[Any]:
    """Yield the functions that a function consists of, without bound arguments; a decorator wraps one."""
    if not isinstance(function, partial | types.MethodType):
        yield function
    for name in ("func", "__func__", "__wrapped__"):
        if callable(inner := getattr(function, name, None)):
            yield from _parts(inner)


def _root(function: Any) -> str:
    """Return the package that the code of a function is in; `__module__` may be that of another one."""
    code = function if hasattr(function, "__globals__") else type(function).__call__
    return str(getattr(code, "__globals__", {}).get("__name__", "")).split(".")[0]


def _name(function: Any, module: nn.Module) -> str:
    part = next(_parts(function))
    return f"{getattr(part, '__qualname__', type(part).__qualname__)} on {type(module).__name__}"


# Values that are compared, and objects that hold nothing that a hook would change.
PLAIN = (type(None), bool, int, float, complex, str, bytes, np.generic)
FIXED = (*PLAIN, types.ModuleType, types.BuiltinFunctionType, types.CodeType, type(...), range, slice, Logger, Pattern)
COLLECTIONS = (list, tuple, set, frozenset, deque)
WITH_STATE = (torch.Tensor, torch.Generator, nn.Module, dict, *COLLECTIONS)
OF_MODULES = vars(nn.Module()).keys() - {"training"}


class HookState:
    """What some hooks hold: variables, objects and tensors that their code reaches, and attributes of their modules.

    Attributes:
        unknown (`str`, *optional*): Type of an object that cannot be compared and put back; `None` if there is none.
    """

    def __init__(self, hooks: Sequence[Hook]):
        self.unknown: str | None = None
        self._kept: dict[int, tuple[Any, Any]] = {}
        self._random = random.getstate(), np.random.get_state()  # noqa: NPY002
        pending: list[Any] = [part for _, *parts in hooks for part in parts]
        while pending:
            one = pending.pop()
            if id(one) not in self._kept and not _is_fixed(one):
                contents, further = _contents(one), _further(one)
                if contents is None and not further:
                    self.unknown = self.unknown or type(one).__name__
                self._kept[id(one)] = one, contents
                pending += further
                if isinstance(contents, dict | list):
                    pending += contents.values() if isinstance(contents, dict) else contents

    def restore(self) -> bool:
        """Put everything back, with the random numbers of Python and numpy, and return whether it had changed."""
        changed = [(one, before) for one, before in self._kept.values() if not _same(_contents(one), before)]
        for one, before in changed:
            _put_back(one, before)
        random.setstate(self._random[0])
        np.random.set_state(self._random[1])  # noqa: NPY002
        return bool(changed)


def _is_fixed(one: Any) -> bool:
    """Return whether an object is a value, or one of a library, such as a configuration or a tokenizer."""
    if isinstance(one, type):
        return one.__module__.split(".")[0] in {*OF_LIBRARIES, "builtins"}
    if isinstance(one, types.FunctionType):
        return _root(one) in OF_LIBRARIES
    of_library = type(one).__module__.split(".")[0] in OF_LIBRARIES
    return isinstance(one, FIXED) or (of_library and not isinstance(one, WITH_STATE))


def _contents(one: Any) -> Any:
    """Return a copy of what an object holds, by name or in order; `None` if that is not known."""
    if isinstance(one, torch.Tensor):
        return one.detach().clone() if one.nbytes <= MOST_BYTES else None
    if isinstance(one, torch.Generator):
        return one.get_state()
    if isinstance(one, np.ndarray):
        return torch.from_numpy(one.copy())
    if isinstance(one, random.Random):
        return one.getstate()
    if isinstance(one, types.FunctionType):
        return {name: one.__globals__[name] for name in _names(one.__code__) if name in one.__globals__}
    if isinstance(one, nn.Module):
        return {name: value for name, value in vars(one).items() if name not in OF_MODULES}
    if isinstance(one, type):
        attributes = ((name, value) for name, value in vars(one).items() if not hasattr(type(value), "__get__"))
        return {name: value for name, value in attributes if not name.startswith("__")}
    if isinstance(one, dict):
        return dict(one)
    if isinstance(one, types.CellType):
        return [one.cell_contents]
    return list(one) if isinstance(one, COLLECTIONS) else None


def _further(one: Any) -> list[Any]:
    """Return the objects that an object reaches beside its contents."""
    if isinstance(one, types.FunctionType):
        return [*(one.__closure__ or ()), one.__defaults__, one.__kwdefaults__, vars(one)]
    if isinstance(one, types.MethodType):
        return [one.__self__, one.__func__]
    if isinstance(one, partial):
        return [one.func, one.args, one.keywords]
    if isinstance(one, nn.Module):
        return [one._buffers]
    if isinstance(one, type) or not hasattr(one, "__dict__") or isinstance(one, torch.Tensor):
        return []
    return [vars(one), type(one), *([one.__call__] if callable(one) else [])]


def _names(code: types.CodeType) -> set[str]:
    """Return the names of variables and attributes in a function, and in those that it defines."""
    inner = (part for part in code.co_consts if isinstance(part, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _same(one: Any, other: Any) -> bool:
    """Return whether contents are the same objects, or equal values."""
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and bool(((one == other) | (one != one) & (other != other)).all())
    if isinstance(one, dict):
        return one.keys() == other.keys() and _same(list(one.values()), list(other.values()))
    if not isinstance(one, list):
        return bool(one == other)
    pairs = zip(one, other, strict=False)
    is_same = (x is y or (type(x) is type(y) and isinstance(x, PLAIN) and x == y) for x, y in pairs)
    return len(one) == len(other) and all(is_same)


def _put_back(one: Any, before: Any) -> None:
    if isinstance(one, torch.Tensor):
        one.detach().copy_(before)
    elif isinstance(one, torch.Generator):
        one.set_state(before)
    elif isinstance(one, np.ndarray):
        one[...] = before.numpy()
    elif isinstance(one, random.Random):
        one.setstate(before)
    elif isinstance(one, types.FunctionType):
        one.__globals__.update(before)
    elif isinstance(one, nn.Module | type):
        for name in _contents(one).keys() - before.keys():
            delattr(one, name)
        for name, value in before.items():
            setattr(one, name, value)
    elif isinstance(one, types.CellType):
        one.cell_contents = before[0]
    else:
        one.clear()
        one.extend(before) if isinstance(one, list | deque) else one.update(before)
