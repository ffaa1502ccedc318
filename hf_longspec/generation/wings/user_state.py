"""What the code of a user holds: kept before extra calls, compared after them, and put back.

Hooks and logits processors are called in place, as not everything can be copied.
"""

import copy
import copyreg
import functools
import gc
import logging
import random
import re
import sys
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.utils import PushToHubMixin

# Packages whose hooks and forwards are no user's. Those of the first three are part of the model. Hooks of the others
# may be made for the rows of one call, such as those of PEFT with an adapter for each row.
OF_THE_MODEL = (__name__.split(".")[0], "torch", "transformers")
OF_LIBRARIES = {*OF_THE_MODEL, "accelerate", "bitsandbytes", "compressed_tensors", "hqq", "kernels", "liger_kernel"}
OF_LIBRARIES |= {"optimum", "peft", "torchao"}
STATELESS_CODE = {*OF_LIBRARIES, *sys.stdlib_module_names, "numpy"}
# Values that are compared, and objects that do not change.
PLAIN = (type(None), bool, int, float, complex, str, bytes, np.generic)
OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.finfo, torch.iinfo)
OF_PYTHON = (types.ModuleType, types.CodeType, type(...), range, slice, logging.Logger, re.Pattern)
FIXED = (*PLAIN, *OF_PYTHON, *OF_TORCH, np.dtype, np.ufunc)
# Objects that refer to others and never change.
REFERRING = (types.MethodType, types.BuiltinFunctionType, functools.partial, functools._lru_cache_wrapper, defaultdict)
# Compiled grammars and vocabularies of engines, which do not change, by the packages of their classes. Classes of
# llguidance name none.
COMPILED = {"xgrammar": {"CompiledGrammar", "GrammarCompiler", "TokenizerInfo"}, "builtins": {"LLTokenizer"}}
COMPILED |= {"outlines_core": {"Index", "Vocabulary"}}
# Methods that copy an object with its state, of the matchers of xgrammar and llguidance.
FORKS = ("fork", "deep_copy")
# Parts of the largest object that is copied.
MOST_COPIED = 10_000
# Bytes of the largest tensor or array that is kept.
MOST_BYTES = 1 << 28
OF_MODULES = vars(nn.Module()).keys() - {"training"}


class UserState:
    """What `objects` of a user, by name, and the code that they run hold: variables, attributes, tensors, generators.

    Weights of models, tokenizers, configurations, code of libraries and objects with `stateless = True` are left out.

    Attributes:
        unknown (`str`, *optional*): Type of an object that cannot be compared and put back; `None` if there is none.
        forks (`list`): Objects that are copied by a method of their own, such as matchers, which are not compared.
    """

    def __init__(self, objects: Mapping[str, Any]):
        self.unknown: str | None = None
        self.forks: list[Any] = []
        self._kept: list[tuple[str, Any, Way, Any]] = []
        seen: dict[int, Any] = {}  # keeps the objects, as ids of others may be used again
        pending = deque((name, one, True) for name, one in objects.items())
        while pending:
            name, one, is_root = pending.popleft()
            if id(one) in seen or (not is_root and _is_fixed(one)):
                continue
            seen[id(one)] = one
            if not is_root and fork_of(one) is not None:
                self.forks.append(one)
                continue
            way, further = _way(one), [*_further(name, one)]
            if way is None:
                self.unknown = self.unknown or type(one).__name__
                continue
            contents = way[0](one)
            if isinstance(contents, dict):
                name = "" if isinstance(one, types.FunctionType) else f"{name}."
                further += ((f"{name}{key}", value) for key, value in contents.items())
            if isinstance(contents, dict | list):
                further += ((name, part) for part in contents)  # also keys of a dict
            self._kept.append((name, one, way, contents))
            pending += ((*part, False) for part in further)

    def __len__(self) -> int:
        """Return the number of objects that are compared."""
        return len(self._kept)

    def restore(self) -> str | None:
        """Put everything back, and return the name of the first thing that had changed; `None` if nothing had."""
        first = None
        for name, one, (read, put_back), before in self._kept:
            now = read(one)
            if (part := _difference(now, before)) is not None:
                put_back(one, before, now)
                first = first or name + part
        return first

    def changed(self) -> str | None:
        """Return the name of the first thing that has changed; `None` if nothing has."""
        states = ((name, _difference(read(one), before)) for name, one, (read, _), before in self._kept)
        return next((name + part for name, part in states if part is not None), None)


def fork_of(one: Any) -> Callable[[], Any] | None:
    """Return the method of an object that copies it with its state, as matchers of grammars have; else `None`."""
    names = () if isinstance(one, type | nn.Module | torch.Tensor | types.ModuleType) else FORKS
    return next((getattr(one, name) for name in names if callable(getattr(type(one), name, None))), None)


def copied(one: Any, is_often: bool = False) -> Any:
    """Return a copy of an object of a user with a state of its own; `None` if there is none, or it has too many parts.

    With `is_often`, also if a part can only be copied in a way of which nothing is known, which may take long.

    Parts with a method for it are copied by that. Code, modules and what [`UserState`] leaves out belong to both.
    """
    memo: dict[int, Any] = {}
    pending, seen = [one], dict[int, Any]()
    try:
        while pending:
            part = pending.pop()
            if isinstance(part, PLAIN) or id(part) in seen:
                continue
            seen[id(part)] = part
            if len(seen) > MOST_COPIED:
                return None
            if (fork := fork_of(part)) is not None:
                memo[id(part)] = fork()
            elif _is_fixed(part) or isinstance(part, nn.Module):
                memo[id(part)] = part
            elif is_often and _way(part) is None:
                return None
            elif isinstance(part, dict):
                pending += (*part.keys(), *part.values())
            elif isinstance(part, list | tuple | set | frozenset | deque):
                pending += part
            elif isinstance(part, types.MethodType | functools.partial):
                pending += gc.get_referents(part)
            elif not isinstance(part, types.FunctionType | type):
                slots = (getattr(part, name) for name in copyreg._slotnames(type(part)) if hasattr(part, name))  # type: ignore[attr-defined]
                pending += (*getattr(part, "__dict__", {}).values(), *slots)
        return copy.deepcopy(one, memo)
    except Exception:  # code of a user, or of a library in C, may raise anything
        return None


def random_generators() -> list[Any]:
    """Return the generators of random numbers of torch, Python and numpy that all code shares."""
    return [torch.default_generator, *torch.cuda.default_generators, random._inst, np.random.mtrand._rand]


def package_of(function: Any) -> str:
    """Return the package that the code of a function is in; `__module__` may be that of another one."""
    code = function if hasattr(function, "__globals__") else type(function).__call__
    return str(getattr(code, "__globals__", {}).get("__name__", "")).split(".")[0]


def _is_fixed(one: Any) -> bool:
    """Return whether an object is a value, or one that code of a user does not change."""
    if isinstance(one, type):
        return one.__module__.split(".")[0] in STATELESS_CODE
    if isinstance(one, FIXED) or getattr(one, "stateless", False) is True:
        return True
    package = type(one).__module__.split(".")[0]
    of_library = package in OF_LIBRARIES - {"torch", "transformers"} or type(one).__name__ in COMPILED.get(package, ())
    # models, tokenizers and configurations have this mixin
    return (of_library or isinstance(one, PushToHubMixin)) and not isinstance(one, nn.Module | torch.Tensor)


def _further(name: str, one: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects that an object reaches beside its contents, with their names."""
    if isinstance(one, types.FunctionType):
        yield from zip(one.__code__.co_freevars, one.__closure__ or (), strict=True)
        if package_of(one) not in STATELESS_CODE:
            yield from ((f"__defaults__ of {one.__name__}", part) for part in (one.__defaults__, one.__kwdefaults__))
            yield one.__name__, vars(one)
    elif isinstance(one, type):
        values = [*vars(one).values()]  # methods, and properties and the like, which refer to functions
        yield from ((base.__name__, base) for base in one.__bases__)
        functions = (part for part in (*values, *gc.get_referents(*values)) if isinstance(part, types.FunctionType))
        yield from ((function.__name__, function) for function in functions)
    else:
        yield type(one).__name__, type(one)
        if hasattr(one, "__dict__"):
            yield name, one._buffers if isinstance(one, nn.Module) else vars(one)
        if isinstance(one, REFERRING):
            yield from ((name, part) for part in gc.get_referents(one))


def _difference(now: Any, before: Any) -> str | None:
    """Return the name of a part in which contents differ, empty if it has none; `None` if they are equal."""
    if isinstance(before, dict):
        pairs = zip_longest(now.items(), before.items(), fillvalue=("", before))
        return next((str(x[0] or y[0]) for x, y in pairs if x[0] != y[0] or not _is_same(x[1], y[1])), None)
    if isinstance(before, torch.Tensor):
        is_same = now.shape == before.shape and bool(((now == before) | (now != now) & (before != before)).all())
    elif isinstance(before, list):
        is_same = len(now) == len(before) and all(map(_is_same, now, before))
    else:
        is_same = now == before if isinstance(before, bytes) else repr(now) == repr(before)
    return None if is_same else ""


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, PLAIN) and bool(one == other))


def _way(one: Any) -> "Way | None":
    """Return how the contents of an object are read and put back; `None` if that is not known."""
    kind = next(cls for cls in type(one).__mro__ if cls in WAYS)
    if isinstance(one, torch.Tensor):
        is_known = one.layout is torch.strided and not one.is_meta and not one.is_quantized and one.nbytes <= MOST_BYTES
    elif isinstance(one, np.ndarray):
        is_known = not one.dtype.hasobject and one.nbytes <= MOST_BYTES
    elif kind is object:  # a class in C is no heap type (bit 9), or is immutable (bit 8), or makes its objects
        makers = ((cls.__flags__ >> 8 & 3, vars(cls).get("__new__")) for cls in type(one).__mro__[:-1])
        is_known = all(flags == 2 and not isinstance(new, types.BuiltinFunctionType) for flags, new in makers)
    else:
        is_known = not copyreg._slotnames(type(one))  # type: ignore[attr-defined]
    return WAYS[kind] if is_known else None


def _named(one: Any) -> dict[str, Any]:
    """Return variables of its module that a function of a user names, or attributes that are not in `vars`."""
    if isinstance(one, types.FunctionType):
        names = set() if package_of(one) in STATELESS_CODE else _names(one.__code__)
        return {name: one.__globals__[name] for name in sorted(names & one.__globals__.keys())}
    if isinstance(one, type):
        values = {name: value for name, value in vars(one).items() if not hasattr(type(value), "__get__")}
        return {name: value for name, value in values.items() if not name.startswith(("__", "_abc_"))}
    if isinstance(one, nn.Module):
        return {name: value for name, value in vars(one).items() if name not in OF_MODULES}
    return {name: getattr(one, name) for name in copyreg._slotnames(type(one)) if hasattr(one, name)}  # type: ignore[attr-defined]


def _names(code: types.CodeType) -> set[str]:
    """Return the names of variables and attributes in a function, and in those that it defines."""
    return set(code.co_names).union(*(_names(part) for part in code.co_consts if isinstance(part, types.CodeType)))


def _put_named(one: Any, before: dict[str, Any], now: dict[str, Any]) -> None:
    variables = one.__globals__ if isinstance(one, types.FunctionType) else None
    for name in now.keys() - before.keys():
        delattr(one, name) if variables is None else variables.pop(name)
    for name, value in before.items():
        setattr(one, name, value) if variables is None else variables.update({name: value})


# What returns a copy of the contents of an object, by name or in order, and what puts them back.
Way = tuple[Callable[[Any], Any], Callable[[Any, Any, Any], Any]]
WAYS: dict[type, Way] = {
    **dict.fromkeys((object, type, types.FunctionType, nn.Module, *REFERRING[:-1]), (_named, _put_named)),
    dict: (dict, lambda one, before, now: (one.clear(), one.update(before))),
    set: (list, lambda one, before, now: (one.clear(), one.update(before))),
    **dict.fromkeys((list, deque, bytearray), (list, lambda one, before, now: (one.clear(), one.extend(before)))),
    **dict.fromkeys((tuple, frozenset), (list, lambda one, before, now: None)),
    weakref.ref: (lambda one: [one()], lambda one, before, now: None),
    types.CellType: (
        gc.get_referents,
        lambda one, before, now: setattr(one, "cell_contents", *before) if before else delattr(one, "cell_contents"),
    ),
    torch.Tensor: (lambda one: one.detach().clone(), lambda one, before, now: one.detach().copy_(before)),
    torch.Generator: (torch.Generator.get_state, lambda one, before, now: one.set_state(before)),
    np.ndarray: (
        np.ndarray.tobytes,
        lambda one, before, now: one.__setitem__(..., np.frombuffer(before, one.dtype).reshape(one.shape)),
    ),
    np.random.Generator: (lambda one: [one.bit_generator], lambda one, before, now: None),
    **dict.fromkeys(
        (random.Random, np.random.RandomState, np.random.BitGenerator),
        (lambda one: (one.__getstate__(),), lambda one, before, now: one.__setstate__(*before)),
    ),
}
