"""Graphs, their pools, streams and cuBLAS workspaces on the simulated device: what torch 2.11 and later refuse.

- A capture needs a stream of the device of the model. `torch.cuda.graph` without `stream` uses one stream of the
  process, on the device that captured first.
- A pool is counted: its first graph makes it, and the handle is dead once the last graph has ended while memory of the
  pool is still used. After a failed capture, torch goes on recording into its pool.
- A failed capture leaves its stream the current one, and the default generator in capture mode.
- A matrix product takes the workspace of its stream, or allocates one: during a capture in the pool of the graph. It is
  freed with the last graph of that pool, and graphs of other pools that took it must not be replayed any more.
- Graphs of one pool share memory: a replay overwrites what the graph before it has computed.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv"}


class NotCapturable(RuntimeError):
    """An operation that fails during the capture of a graph, or a capture that torch refuses."""


class WrongDevice(RuntimeError):
    """An operation on tensors of both devices, or on another device than the current one."""


class FreedMemory(RuntimeError):
    """A replay that would write to memory that torch has freed."""


@dataclass(eq=False)
class Stream:
    """`torch.cuda.Stream`."""

    index: int  # of its device
    wait: Callable[[], None]

    cuda_stream = 0

    def wait_stream(self, other: "Stream") -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def synchronize(self) -> None:
        self.wait()


@dataclass(eq=False)
class Pool:
    """Memory of graphs."""

    handle: tuple[int, int]
    graphs: int = 0
    is_recording: bool = False
    last_replayed: Callable[[], "SimulatedGraph | None"] = lambda: None


@dataclass(eq=False)
class CublasWorkspace:
    """Memory that matrix products of one stream write to; in no pool if it was allocated outside of a capture."""

    pool: Pool | None
    is_freed: bool = False


class DefaultGenerator:
    """A member of `torch.cuda.default_generators`."""

    is_capturing = False

    def clone_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def graphsafe_set_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)
        self.is_capturing = False


class SimulatedGraph:
    """`torch.cuda.CUDAGraph`: launches that are repeated on the same memory."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.launches: list[tuple[Callable[[], Any], list[torch.Tensor]]] = []
        self.names: Counter[str] = Counter()  # of the operations that a replay launches
        self.generators: set[int] = set()
        self.made: list[torch.Tensor] = []
        self.workspaces: list[CublasWorkspace] = []
        self.memory: Pool | None = None
        self.replays = 0
        self.on_replay: Callable[[], None] = lambda: None

    def record(self, run: Callable[[], Any], results: list[torch.Tensor]) -> None:
        """Append a launch that computes tensors of its own, or changes its inputs if `results` is empty."""
        self.launches.append((run, results))

    def replay(self) -> None:
        if any(workspace.is_freed and workspace.pool is not self.memory for workspace in self.workspaces):
            raise FreedMemory("a graph writes to a cuBLAS workspace that ended with the graphs of another pool")
        self.replays += 1
        self.on_replay()
        with _disable_current_modes(), torch.no_grad():
            if self.memory is not None:
                last, self.memory.last_replayed = self.memory.last_replayed(), weakref.ref(self)
                for tensor in [] if last in (None, self) else last.made:
                    poison(tensor)
            for run, results in self.launches:
                found = [x for x in tree_leaves(run()) if isinstance(x, torch.Tensor)]
                for result, new in zip(results, found, strict=False):  # no results if it changes its inputs
                    result.copy_(new)

    def register_generator_state(self, generator: torch.Generator) -> None:
        self.generators.add(generator._cdata)

    def pool(self) -> tuple[int, int]:
        return self.memory.handle

    def reset(self) -> None:
        self.launches.clear()


def poison(tensor: torch.Tensor) -> None:
    """Fill a tensor with numbers that nothing computes."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(torch.nan)
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max // 2)


@dataclass
class Capture:
    """A capture that is going on."""

    graph: SimulatedGraph
    kept: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = field(default_factory=dict)
    made: dict[int, torch.Tensor] = field(default_factory=dict)

    def keep(self, tensors: list[torch.Tensor]) -> None:
        """Keep memory that a launch is about to change, unless the graph allocated it."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.made and storage.data_ptr() not in self.kept:
                self.kept[storage.data_ptr()] = storage, storage.clone()

    def allocate(self, tensors: list[torch.Tensor]) -> None:
        self.made |= {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}

    def undo(self) -> None:
        """Restore the memory from before the capture, and fill what the graph allocated with NaN."""
        self.graph.made = list(self.made.values())
        for tensor in self.graph.made:
            poison(tensor)
        for storage, copy in self.kept.values():
            storage.copy_(copy)


class GraphMemory:
    """Streams, pools and workspaces of a process.

    Args:
        wait (`Callable[[], None]`): What a host does that waits for the device.
        devices (`int`): Number of devices.
    """

    def __init__(self, wait: Callable[[], None], devices: int):
        self.wait = wait
        self.current_device = 0
        self.generators = [DefaultGenerator() for _ in range(devices)]
        self.capture: Capture | None = None
        self._streams = {index: Stream(index, wait) for index in range(devices)}  # the current ones
        self._of_captures: Stream | None = None
        self._pools: dict[tuple[int, int], Pool] = {}
        self._handles = 0
        self._workspaces: dict[Stream, CublasWorkspace] = {}

    def stream(self, device: Any = None) -> Stream:
        """`torch.cuda.Stream`."""
        return Stream(self.current_device if device is None else torch.device(device).index, self.wait)

    def current_stream(self, device: Any = None) -> Stream:
        """`torch.cuda.current_stream`."""
        return self._streams[self.current_device if device is None else torch.device(device).index]

    def set_stream(self, stream: Stream) -> None:
        """`torch.cuda.set_stream`."""
        self._streams[stream.index] = stream

    @contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        """`torch.cuda.stream`."""
        before = self._streams[stream.index]
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(before)

    def handle(self) -> tuple[int, int]:
        """`torch.cuda.graph_pool_handle`."""
        self._handles += 1
        return 0, self._handles

    @contextmanager
    def capturing(self, graph: SimulatedGraph, pool: Any = None, stream: Stream | None = None) -> Iterator[None]:
        """`torch.cuda.graph`, as far as it concerns streams and pools."""
        if self.capture is not None:
            raise NotCapturable("a graph is being captured already")
        if stream is None:
            stream = self._of_captures = self._of_captures or self.stream()
        if stream.index != self.current_device:
            raise WrongDevice(f"a capture on cuda:{self.current_device} by a stream of cuda:{stream.index}")
        generator = self.generators[self.current_device]
        if generator.is_capturing:
            raise NotCapturable("the default generator is in capture mode, since an earlier capture failed")
        memory = graph.memory = self._enter(pool or self.handle())
        weakref.finalize(graph, self._leave, memory).atexit = False
        before = self._streams[stream.index]
        self.set_stream(stream)
        self.capture = capture = Capture(graph)
        memory.is_recording = generator.is_capturing = True
        try:
            yield
            memory.is_recording = generator.is_capturing = False
            self.set_stream(before)
        finally:
            self.capture = None
            with _disable_current_modes(), torch.no_grad():
                capture.undo()

    def _enter(self, handle: tuple[int, int]) -> Pool:
        pool = self._pools.setdefault(handle, Pool(handle))
        if pool.is_recording:
            raise NotCapturable("beginAllocateToPool: already recording to mempool_id")
        if not pool.graphs and any(workspace.pool is pool for workspace in self._workspaces.values()):
            raise NotCapturable("use_count > 0 INTERNAL ASSERT FAILED")
        pool.graphs += 1
        return pool

    def _leave(self, pool: Pool) -> None:
        pool.graphs -= 1
        if not pool.graphs:
            for workspace in self._workspaces.values():
                workspace.is_freed |= workspace.pool is pool

    def note_product(self) -> None:
        """Use the workspace of the current stream, or allocate one."""
        stream = self.current_stream()
        graph = self.capture.graph if self.capture else None
        workspace = self._workspaces.get(stream)
        if workspace is None or (workspace.is_freed and graph is None):
            workspace = self._workspaces[stream] = CublasWorkspace(graph.memory if graph else None)
        if graph is not None:
            graph.workspaces.append(workspace)

    def clear_workspaces(self) -> None:
        """`torch._C._cuda_clearCublasWorkspaces`."""
        for workspace in self._workspaces.values():
            workspace.is_freed = True
        self._workspaces.clear()
