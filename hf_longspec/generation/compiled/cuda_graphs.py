"""Steps of fixed shapes, captured as CUDA graphs and replayed, and the buffers that graphs are bound to.

A graph holds addresses, so small inputs are copied into tensors of its own. Kernels read the lengths of the rows on the
device, and buffers are read up to the next power of two, so that one graph serves many lengths. A function that cannot
be captured is not tried again. `capture` and the functions after it contain all calls of CUDA. The tests run them on a
simulated device.

Graphs stay valid while the buffers and the model do, so a [`Workspace`] keeps both for the next call of `generate`.
"""

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedModel
from transformers.utils import logging

from ...attention_backends.lengths import SeqLens
from ..cache import SpeculativeCache
from ..target import FixedStep
from ..target_modules import structure_of
from .fixed_steps import LengthsInGraph, Runner

logger = logging.get_logger(__name__)

SMALLEST_BUCKET = 1024
WARM_UP = 3
# Graphs of one cache or draft. The oldest are dropped, since every temperature of a call may need graphs of its own.
MOST_GRAPHS = 128

_NOT_CAPTURED = (
    "A step of %s could not be captured as a CUDA graph (%s) and runs without one. Set "
    "draft.generation_config.compile to 'off' to skip the attempt."
)

# A graph is bound to the buffers of one cache or drafter and to the weights of one module, and is dropped with either.
_captured: WeakKeyDictionary[Any, WeakKeyDictionary[torch.nn.Module, dict[tuple, "CapturedFunction"]]]
_captured = WeakKeyDictionary()
# Steps of a target or a draft that could not be captured, and are not tried again.
_not_captured: WeakKeyDictionary[torch.nn.Module, set[tuple]] = WeakKeyDictionary()
# By device: the handle of the memory that the graphs of a target share, and the first of them. A handle is valid while
# a graph is alive, and a call may drop all others with its buffers.
_pools: WeakKeyDictionary[torch.nn.Module, dict[torch.device, tuple[Any, Any]]] = WeakKeyDictionary()
# A stream for the captures on a device. That of `torch.cuda.graph` lies on the device that captured first.
_streams: dict[torch.device, Any] = {}
_capturing = Lock()


class CapturedRunner(Runner):
    """Run steps as captured graphs.

    Args:
        model (`PreTrainedModel`): The target.
        draft (`torch.nn.Module`): The draft, which keeps the workspaces.
        inner ([`CompiledRunner`] or [`FusedRunner`], *optional*): Runs the steps while they are captured.
    """

    captures = True

    def __init__(self, model: PreTrainedModel, draft: torch.nn.Module, inner: Any = None):
        self.model, self.draft = model, draft
        self.inner, self.compiles = inner, inner is not None and inner.compiles
        self.state = state_of(model), state_of(draft)
        # Graphs of this call, by what differs within one call. It takes microseconds to look one up.
        self._graphs: dict[tuple, CapturedFunction] = {}

    def lengths(self, lengths: SeqLens, room: int, capacity: int, parts: int = 1) -> LengthsInGraph:
        """Return their bucket. A captured graph would reuse the lengths it was captured with, so it knows none."""
        most = bucket(lengths.longest + room, capacity, parts) - room
        return LengthsInGraph([torch.empty(most, 0)], 0, (most,))

    def __call__(self, step: FixedStep, *inputs: torch.Tensor) -> Any:
        """Return `step.run(*inputs)`, which the next call overwrites; `None` if it cannot be captured.

        Within one call of `generate`, steps of one class, key, places, holder and shapes have the same fields.
        """
        shapes = tuple(x.shape for x in inputs)
        key = type(step), step.key, step.places, shapes, id(step.holder)
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._of_earlier_calls(step, key[:-1], inputs)
            if graph is None:
                return None
            self._graphs[key] = graph
        return graph(inputs)

    def _of_earlier_calls(self, step: FixedStep, shape: tuple, inputs: tuple) -> "CapturedFunction | None":
        """Return the graph that an earlier call captured, or capture it; `None` if that is not possible."""
        graphs = _captured.setdefault(step.holder, WeakKeyDictionary()).setdefault(step.module, {})
        failed = _not_captured.setdefault(step.module, set())
        if shape in failed:
            return None
        tensors = _tensors(step)
        sizes = tuple(x.shape for x in tensors)
        key = shape, sizes, self.state, tuple(x.data_ptr() for x in tensors if x.numel())
        if key in graphs:
            return graphs[key]

        def run(own: tuple[torch.Tensor, ...]) -> Any:
            return step.run(*own) if self.inner is None else self.inner(step, *own, sizes=sizes)

        while len(graphs) >= MOST_GRAPHS:
            del graphs[next(iter(graphs))]
        started = time.perf_counter()
        try:
            if (reason := step.why_not_captured()) is not None:
                raise RuntimeError(reason)
            graphs[key] = CapturedFunction(run, inputs, self.model)
        except Exception as error:  # CUDA, Triton and torch share no class of errors
            is_new = all(kind is not type(step) for kind, *_ in failed)
            failed.add(shape)
            if is_new:
                name = type(step.module).__name__
                logger.warning(_NOT_CAPTURED, name, (str(error) or repr(error)).splitlines()[0])
            return None
        finally:
            self.seconds += time.perf_counter() - started
        return graphs[key]

    def workspace(self, batch_size: int, max_length: int) -> "Workspace":
        """Return a workspace whose cache fits, or an empty one. It belongs to the caller until `keep`.

        Workspaces for another state of target or draft, for example on another device, are dropped.
        """
        with _workspaces_lock:
            state, workspaces = _workspaces.get(self.draft, (None, []))
            if state != self.state:
                _workspaces.pop(self.draft, None)
                workspaces = []
            for workspace in reversed(workspaces):
                cache = workspace.cache
                if cache is not None and cache.batch_size == batch_size and cache.max_length >= max_length:
                    workspaces.remove(workspace)
                    return workspace
        return Workspace()

    def keep(self, workspace: "Workspace", cache: SpeculativeCache) -> None:
        """Keep the workspace and the cache of a call that has returned neither, for the next call.

        The oldest workspaces beyond the bounds are dropped.
        """
        cache.reset()
        workspace.cache = cache
        with _workspaces_lock:
            state, workspaces = _workspaces.get(self.draft, (None, []))
            workspaces = [*(workspaces if state == self.state else []), workspace]
            device = self.model.device
            memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else math.inf
            most = MOST_MEMORY * memory
            while workspaces and (len(workspaces) > MOST_WORKSPACES or sum(one.nbytes for one in workspaces) > most):
                del workspaces[0]
            _workspaces[self.draft] = self.state, workspaces


class CapturedFunction:
    """Replay one graph on inputs that are copied into its own tensors.

    The inputs of the first call decide the shapes. See [`capture`] for `function` and `target`.
    """

    def __init__(self, function: Callable[..., Any], inputs: tuple[torch.Tensor, ...], target: torch.nn.Module):
        own = tuple(x.clone() for x in inputs)
        self.outputs, self.replay = capture(lambda: function(own), inputs[0].device, target)
        # by dtype, as torch copies such a list in one launch
        places: dict[torch.dtype, list[int]] = {}
        for place, x in enumerate(own):
            places.setdefault(x.dtype, []).append(place)
        self._copied = [(group, [own[place] for place in group]) for group in places.values()]

    def __call__(self, inputs: tuple[torch.Tensor, ...]) -> Any:
        for places, own in self._copied:
            torch._foreach_copy_(own, [inputs[place] for place in places])
        self.replay()
        return self.outputs


def capture(
    function: Callable[[], Any], device: torch.device, target: torch.nn.Module
) -> tuple[Any, Callable[[], None]]:
    """Capture a function without arguments; return its outputs and a function that computes them again in place.

    The function must be idempotent, as it runs several times before it is captured. Graphs of one target share the
    memory of intermediate results, as they never run at the same time. The outputs lie outside of it. After an error,
    stream and default generator are as before: a capture that ends early would change both. It would also leave torch
    2.11 recording into its memory, so later graphs get another one.
    """
    with _capturing, torch.cuda.device(device), _without_garbage_collection():
        stream, before = _streams.setdefault(device, torch.cuda.Stream()), torch.cuda.current_stream()
        pools = _pools.setdefault(target, {})
        pool, first = pools.pop(device, None) or (torch.cuda.graph_pool_handle(), None)
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        state = generator.clone_state()
        try:
            stream.wait_stream(before)
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP):  # kernels are compiled and chosen before the capture, which allows neither
                    if (results := function()) is None:
                        raise RuntimeError("it could not be compiled")
            before.wait_stream(stream)
            # In the shared memory, a graph that was captured earlier would overwrite results before they are read.
            outputs = tree_map_only(torch.Tensor, torch.empty_like, results)
            copies = _tensors(tree_leaves(outputs))
            if copies:
                torch._foreach_copy_(copies, _tensors(tree_leaves(results)))
            graph = torch.cuda.CUDAGraph()
            _clear_workspaces()
            # Other threads may go on to launch kernels, and to wait for them, on this device.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                results = function()
                if copies:
                    torch._foreach_copy_(copies, _tensors(tree_leaves(results)))
        except BaseException:
            torch.cuda.set_stream(before)
            generator.graphsafe_set_state(state)
            raise
        finally:
            _clear_workspaces()
        pools[device] = pool, first or graph
    return outputs, graph.replay


def _clear_workspaces() -> None:
    """Let cuBLAS allocate its workspaces anew.

    A graph then has one in its own memory. A workspace in the memory of another graph would end with that graph.
    """
    if (clear := getattr(torch._C, "_cuda_clearCublasWorkspaces", None)) is not None:
        clear()


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """A context in which no tensor or graph is freed by a collection, as a capture does not allow that."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def bucket(length: int, capacity: int, parts: int = 1) -> int:
    """Return the number of slots that a graph reads for `length` used ones, at most `capacity`.

    It is a power of two, or a number of `parts` of it.

    >>> [bucket(length, 5000) for length in (5, 1024, 1025, 4097)]
    [1024, 1024, 2048, 5000]
    >>> [bucket(length, 99999, 8) for length in (5, 1025, 4097, 16385)]
    [1024, 2048, 5120, 20480]
    """
    part = max(SMALLEST_BUCKET, (1 << (length - 1).bit_length()) // parts)
    return min(capacity, -(-length // part) * part)


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a value, its collections and dataclasses."""
    if isinstance(value, torch.Tensor):
        return [value]
    if is_dataclass(value) and not isinstance(value, type):
        value = list(vars(value).values())
    return [x for part in value for x in _tensors(part)] if isinstance(value, list | tuple) else []


def state_of(model: torch.nn.Module) -> int:
    """Return a number that changes when a model would compute something else, or with weights at other addresses.

    It covers the structure of the model, hooks, training mode, the settings of a draft, and those of torch that choose
    kernels. It does not depend on the values of weights, which a graph reads.
    """
    state: list[Any] = [id(model), *structure_of(model), torch.get_float32_matmul_precision()]
    state += [torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"), torch.is_inference_mode_enabled()]
    if isinstance(model, PreTrainedModel):
        state.append(model.config.to_json_string(use_diff=False))
        if getattr(model, "_is_longspec_draft", False):
            draft: Any = model
            state.append(repr([draft.setting(name) for name in draft.settings]))
    for module in model.modules():
        state += [id(module), module.training]
        state += (id(hook) for hooks in (module._forward_pre_hooks, module._forward_hooks) for hook in hooks.values())
        tensors = (*module._parameters.values(), *module._buffers.values())
        state += (0 if x is None else x.data_ptr() for x in tensors)
    return hash(tuple(state))


class Workspace:
    """Buffers of one call of `generate` that a later call may use again, with the graphs that are bound to them.

    Attributes:
        cache ([`SpeculativeCache`], *optional*): The target's cache.
        parts (`dict[tuple, Any]`): Buffers of the drafter, by what they were made for.
    """

    def __init__(self) -> None:
        self.cache: SpeculativeCache | None = None
        self.parts: dict[tuple, Any] = {}

    def part(self, key: tuple, make: Callable[[], Any]) -> Any:
        """Return the part of this key, made by `make` if no earlier call left one."""
        if key not in self.parts:
            self.parts[key] = make()
        return self.parts[key]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, without the memory of graphs."""
        parts = [*self.parts.values(), *([] if self.cache is None else [self.cache])]
        return sum(part.nbytes for part in parts)


# Most workspaces of a draft, one for each of the batch sizes that it decoded last, and the share of the device's memory
# that their buffers may take. Buffers that are not kept cost a capture of every step in the next call.
MOST_WORKSPACES = 4
MOST_MEMORY = 1 / 8
# Workspaces that no call is using, last used last, and the state of target and draft that they are valid for.
_workspaces: WeakKeyDictionary[torch.nn.Module, tuple[Any, list[Workspace]]] = WeakKeyDictionary()
_workspaces_lock = Lock()


def release_workspaces(draft: torch.nn.Module) -> None:
    """Drop the workspaces of a draft, with their graphs."""
    with _workspaces_lock:
        _workspaces.pop(draft, None)
