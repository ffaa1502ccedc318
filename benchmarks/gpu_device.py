"""One device to measure on: clocks, CUDA graphs, memory, outputs that start as NaN. A CPU has the same interface."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from hf_longspec.bench.machine import READ_BYTES
from hf_longspec.bench.summaries import summarize

WARM_UP = 3  # calls before a measurement: compilation, autotuning, the allocator
FEWEST = 5  # a median of fewer repeats is not one


class Skip(Exception):
    """The reason for leaving a measurement out; becomes a `skipped` line."""


@dataclass(frozen=True)
class Timing:
    """The time of a call.

    Args:
        milliseconds (`list[float]`): One entry per repeat.
        how (`str`): "graph" (replay of a CUDA graph), "events" (calls between CUDA events), or "wall" (a CPU).
        note (`str`, *optional*): Why it is not "graph".
    """

    milliseconds: list[float]
    how: str
    note: str | None = None

    @property
    def median(self) -> float:
        """Milliseconds."""
        return statistics.median(self.milliseconds)

    def scaled(self, count: int) -> "Timing":
        """One of `count` equal parts of the call."""
        return Timing([value / count for value in self.milliseconds], self.how, self.note)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        found: dict[str, Any] = {"ms": summarize(self.milliseconds), "how": self.how}
        return found if self.note is None else found | {"note": self.note}


@dataclass
class Device:
    """The device of the GPU benchmark.

    Args:
        device (`torch.device`): `cpu` or `cuda`.
        repeats (`int`): Repeats of every timing; the median counts.
        memory_bytes (`int`, *optional*): Memory that may be used; by default the free memory of a GPU, and no limit on
            a CPU.
    """

    device: torch.device
    repeats: int = 20
    memory_bytes: int | None = None
    is_cuda: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_cuda = self.device.type == "cuda"

    def synchronize(self) -> None:
        """Wait for everything that was launched."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def require(self, needed: float, what: str) -> None:
        """Raise [`Skip`] if `needed` bytes are not free."""
        free = self.memory_bytes
        if self.is_cuda and free is None:
            torch.cuda.empty_cache()
            free = torch.cuda.mem_get_info()[0]
        if free is not None and needed > free:
            raise Skip(f"{what} needs {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free")

    def time(self, function: Callable[[], object], limit: float, graph: bool = True) -> Timing:
        """Time a function that does the same work in every call.

        Args:
            function (`Callable`): Reads nothing back from the device, if it is to be captured.
            limit (`float`): Seconds that all repeats may take together.
            graph (`bool`, *optional*, defaults to `True`): Capture a CUDA graph where there is one to be had.

        Raises:
            Skip: If five repeats do not fit into the limit.
        """
        if not graph or not self.is_cuda:
            return Timing(self._repeat(function, limit), "events" if self.is_cuda else "wall")
        try:
            replay = self.capture(function)
        except Skip as reason:
            return Timing(self._repeat(function, limit), "events", str(reason))
        return Timing(self._repeat(replay, limit), "graph")

    def capture(self, function: Callable[[], object]) -> Callable[[], None]:
        """The function as a CUDA graph.

        Raises:
            Skip: On a CPU, or if the function cannot be captured, for instance because it reads from the device.
        """
        if not self.is_cuda:
            raise Skip("CUDA graphs need a CUDA device")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # the warm-up that capturing requires, away from the default stream
            for _ in range(WARM_UP):
                function()
        torch.cuda.current_stream().wait_stream(side)
        recorded = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(recorded):
                function()
        except RuntimeError as error:
            self.synchronize()
            raise Skip(f"not captured: {str(error).splitlines()[0]}") from error
        return recorded.replay

    def _repeat(self, function: Callable[[], object], limit: float) -> list[float]:
        once = 0.0
        for _ in range(WARM_UP):
            once = self._once(function)
            if once * FEWEST > limit * 1e3:
                raise Skip(f"one call takes {once:.0f} ms, and {FEWEST} do not fit into {limit:.1f} s")
        count = min(self.repeats, max(FEWEST, int(limit * 1e3 / max(once, 1e-6))))
        return [self._once(function) for _ in range(count)]

    def _once(self, function: Callable[[], object]) -> float:
        """Milliseconds of one call, launches included where they take longer than the work."""
        self.synchronize()
        if not self.is_cuda:
            started = time.perf_counter()
            function()
            return (time.perf_counter() - started) * 1e3
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        self.synchronize()
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds

    def ceilings(self, limit: float, size: int) -> dict[str, float]:
        """Best rates of a copy and of a bfloat16 matrix product, on random data. Every floor divides by them.

        Args:
            limit (`float`): Seconds for each.
            size (`int`): Rows and columns of the matrices; the copy reads 64 bytes for each of their numbers,
                `READ_BYTES` at most.
        """
        matrix = torch.randn(size, size, device=self.device).bfloat16()
        other = torch.randn(size, size, device=self.device).bfloat16()
        source = torch.randn(min(READ_BYTES, 64 * size * size) // 4, device=self.device)
        target = torch.empty_like(source)
        moved, operations = 2 * source.numel() * source.element_size(), 2 * size**3
        copies = self.time(lambda: target.copy_(source), limit)
        products = self.time(lambda: matrix @ other, limit)
        return {
            "tb_per_second": moved / min(copies.milliseconds) / 1e9,
            "tflops": operations / min(products.milliseconds) / 1e9,
        }


@contextmanager
def poisoned_outputs() -> Iterator[None]:
    """Tensors that are made without values hold NaN in this context, so that a place nobody wrote to is seen."""
    deterministic, warn = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    settings: Any = torch.utils.deterministic
    filled = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn)
        settings.fill_uninitialized_memory = filled


def gpu_environment(device: torch.device) -> dict[str, Any]:
    """The GPU with its memory and the versions that its kernels depend on; on a CPU the versions only."""
    found: dict[str, Any] = {"device": device.type, "cuda": torch.version.cuda}
    for package in ("triton", "flash_attn", "flashinfer-python", "xformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["gpu"], found["memory_gb"] = properties.name, round(properties.total_memory / 1e9, 1)
        found["capability"] = f"{properties.major}.{properties.minor}"
    return found
