"""What is known of the logits processors of a call: which tokens they read, and whether they keep state.

A draft adds calls of processors, for drafted tokens that may be refused. [`why_stateful`] tries processors out on
copies before the first token, and finds those whose calls depend on one another.
"""

import copy
import dis
import gc
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation import logits_process
from transformers.generation.logits_process import LogitsProcessorList

from .target_modules import before_forward

# Processors whose result depends on the logits of one position only, so that they may run on all nodes at once.
# A custom processor of this kind sets the attribute `history_free = True`. A processor that depends on the last tokens
# only sets `history_window` to their number. Its cost then does not grow with the text, and it may be called with any
# number of rows of `history_window` tokens, one for each node.
HISTORY_FREE = {
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
    "MinPLogitsWarper",
    "SuppressTokensLogitsProcessor",
    "TemperatureLogitsWarper",
    "TopHLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TypicalLogitsWarper",
}
# Processors that compute with tensors and numbers alone, so that they can be part of a graph.
IN_GRAPHS = {
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
    "ContextualPenaltyLogitsProcessor",
}
# Attributes by which a processor says that its calls do not depend on one another.
DECLARED = ("stateless", "history_free", "history_window")

# Copies share these: they are large, and calls of processors do not change them.
SHARED = (torch.nn.Module, PreTrainedTokenizerBase)
# Nothing that they refer to is state of a processor.
LEAVES = (type, ModuleType, BuiltinFunctionType, CodeType, torch.Tensor, np.ndarray, int, float, complex, str, bytes)
LIBRARIES = ("torch", "transformers")
HIDDEN = ("__", "_abc_")
# Types that are compared by value.
VALUES = (int, float, complex, bool, str, bytes, bytearray, range, set, frozenset)

# What a copy of a processor shares with it: an object or the variables of a module, a name in it, and one for messages.
Place = tuple[Any, str, str]


def is_history_free(processor: object) -> bool:
    """Return whether the result of a processor depends on the scores alone."""
    if getattr(processor, "history_free", False):
        return True
    name = type(processor).__name__
    return name in HISTORY_FREE and type(processor) is getattr(logits_process, name, None)


def longest_window(processors: LogitsProcessorList) -> int | None:
    """Return the number of last tokens that the processors depend on; `None` if one may depend on all."""
    longest = 1  # some processors read the batch size from the tokens
    for processor in processors:
        if not is_history_free(processor):
            window = getattr(processor, "history_window", None)
            if window is None:
                return None
            longest = max(longest, window)
    return longest


def why_stateful(
    processors: LogitsProcessorList, input_ids: torch.Tensor, model: torch.nn.Module, vocab_size: int
) -> Iterator[str]:
    """Yield for each processor whose calls depend on one another the reason why a draft cannot be used.

    A copy is called twice with the prompts `input_ids` `(batch, P)`, as plain `generate` calls the processor first. It
    has state if the first call changes the copy, or what its code reads elsewhere: variables of closures and modules,
    attributes of its class, random states. It also has state if the two results differ. State that only a later call
    changes is not found. The processor and all that it reads stay as they are.
    """
    for processor in processors:
        if is_history_free(processor) or any(getattr(processor, mark, False) for mark in DECLARED):
            continue
        try:
            finding = _finding(processor, input_ids, model, vocab_size)
        except Exception as error:  # parts of a processor may raise anything
            finding = f"cannot be tried out on a copy ({type(error).__name__}: {error}). Let copy.deepcopy copy it"
        if finding is not None:
            yield f"{type(processor).__name__} {finding}. A draft adds calls, for drafted tokens that may be refused."


class _RunsTarget(Exception):
    """A processor has begun a forward of the target."""


# What processors share holds copies while one is tried out, so one is tried out at a time.
_trying_out = threading.RLock()


def _finding(processor: Any, input_ids: torch.Tensor, model: torch.nn.Module, vocab_size: int) -> str | None:
    """Return how the calls of a processor depend on one another, and the remedy; `None` if nothing shows it."""
    own_thread = threading.get_ident()

    def refuse(*_: Any) -> None:
        if threading.get_ident() == own_thread:
            raise _RunsTarget

    scores = torch.linspace(-4, 4, vocab_size, device=input_ids.device).repeat(len(input_ids), 1)
    with _trying_out, _kept_random_states(input_ids.device):
        places, shared = _shared_parts(processor)
        originals = list(map(_read, places))
        before, (twin, *copies) = (copy.deepcopy([processor, *originals], dict(shared)) for _ in range(2))
        before.append(_random_states(input_ids.device))
        handle = before_forward(model, refuse)
        try:
            _write(places, copies)
            first = twin(input_ids.clone(), scores.clone())
            after = [twin, *map(_read, places), _random_states(input_ids.device)]
            names = [type(processor).__name__, *(label for *_, label in places), "random states"]
            changed = list(filter(None, map(_difference, names, before, after)))
            second = twin(input_ids.clone(), scores.clone())
        except _RunsTarget:
            return "runs the target. Drop it, or the setting that adds it"
        finally:
            handle.remove()
            _write(places, originals)
    if changed:
        return f"keeps state between calls ({changed[0]} changed). Let its result depend on input_ids and scores alone"
    if not torch.equal(first, second):
        return "returned different scores for the same input. Let its result depend on input_ids and scores alone"
    return None


def _read(place: Place) -> Any:
    owner, name, _ = place
    return owner[name] if isinstance(owner, dict) else getattr(owner, name)


def _write(places: list[Place], values: list[Any]) -> None:
    for (owner, name, _), value in zip(places, values, strict=True):
        if isinstance(owner, dict):
            owner[name] = value
        else:
            setattr(owner, name, value)


def _shared_parts(processor: Any) -> tuple[list[Place], dict[int, Any]]:
    """Return the places outside of a processor that its code reads, and objects that copies share, by their ids."""
    places: dict[tuple[int, str], Place] = {}
    shared: dict[int, Any] = {}
    seen: dict[int, Any] = {}  # keeps the parts, as ids of others may be used again
    found = [processor]
    while found:
        part = found.pop()
        if id(part) in seen or isinstance(part, LEAVES):
            continue
        seen[id(part)] = part
        if part is not processor and (isinstance(part, SHARED) or getattr(part, "stateless", False) is True):
            shared[id(part)] = part
            continue
        own = [*_places_of(part)]
        places |= {(id(owner), name): (owner, name, label) for owner, name, label in own}
        found += map(_read, own)
        if not isinstance(part, FunctionType):
            found += gc.get_referents(part)
    return [place for place in places.values() if _is_variable(_read(place))], shared


def _places_of(part: Any) -> Iterator[Place]:
    """Yield where code keeps values: cells of a function and variables that it names, attributes of a class."""
    if isinstance(part, FunctionType):
        for label, cell in zip(part.__code__.co_freevars, part.__closure__ or (), strict=True):
            if gc.get_referents(cell):  # not if it is empty
                yield cell, "cell_contents", label
        variables = part.__globals__
        if _is_of_user(variables.get("__name__", "")):
            label = part.__name__
            yield part, "__dict__", label
            yield from ((part, name, f"{name} of {label}") for name in ("__defaults__", "__kwdefaults__"))
            yield from ((variables, name, name) for name in _global_names(part.__code__) if name in variables)
    elif callable(part):
        for cls in type(part).__mro__:
            if _is_of_user(cls.__module__):
                own = (name for name in vars(cls) if name == "__call__" or not name.startswith(HIDDEN))
                yield from ((cls, name, f"{cls.__name__}.{name}") for name in own)


def _global_names(code: CodeType) -> set[str]:
    """Return the names of variables of its module that code reads or writes."""
    names = {step.argval for step in dis.get_instructions(code) if "GLOBAL" in step.opname}
    return names.union(*(_global_names(part) for part in code.co_consts if isinstance(part, CodeType)))


def _is_of_user(module: str) -> bool:
    return module.partition(".")[0] not in LIBRARIES


def _is_variable(value: Any) -> bool:
    """Return whether a value is no function, method, property, class or module."""
    return not isinstance(value, type | ModuleType | BuiltinFunctionType) and not hasattr(type(value), "__get__")


def _difference(name: str, one: Any, other: Any) -> str | None:
    """Return the name of a part in which two copies of a value differ; `None` if they are equal.

    What cannot be compared differs.
    """
    found, seen, kept = [(name, one, other)], set(), []
    while found:
        name, one, other = found.pop()
        if one is other or (id(one), id(other)) in seen:
            continue
        seen.add((id(one), id(other)))
        kept.append((one, other))  # so that no other object gets these ids
        kind = type(one)
        if kind is not type(other):
            return name
        if isinstance(one, torch.Tensor):
            if one.dtype != other.dtype or one.device != other.device or not torch.equal(one, other):
                return name
        elif kind in VALUES:
            if one != other and one == one:  # nan does not differ from nan
                return name
        elif kind is dict:
            if one.keys() != other.keys():
                return name
            found += [(f"{name}.{key}", one[key], other[key]) for key in one]
        elif kind in (list, tuple):
            if len(one) != len(other):
                return name
            found += [(name, *pair) for pair in zip(one, other, strict=True)]
        else:
            try:
                found.append((name, _reduced(one), _reduced(other)))
            except Exception:  # as of any object that pickle does not take
                return name
    return None


def _reduced(value: Any) -> list[Any]:
    """Return what copy.deepcopy makes a copy of a value from."""
    made = value.__reduce_ex__(4)
    return [made] if isinstance(made, str) else [list(part) if isinstance(part, Iterator) else part for part in made]


def _random_states(device: torch.device) -> list[Any]:
    """Return the states of the generators of torch, Python and numpy that calls share."""
    of_device = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *of_device, random.getstate(), np.random.get_state()]  # noqa: NPY002


@contextmanager
def _kept_random_states(device: torch.device) -> Iterator[None]:
    """Restore the shared generators when the context closes."""
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002
