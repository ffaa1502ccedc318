"""One run on a GPU: its sizes, its device, what is left of its time and memory, and the floors of what it measures."""

import gc
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from benchmarks.gpu_goals import SUITE
from benchmarks.harness import Run, Skip
from benchmarks.random_inputs import Shape, cache_bytes, full_cache, random_target
from benchmarks.records import of_kind, read_records
from benchmarks.roofline import Machine, Roofline, TargetShape, shape_from_config
from hf_longspec.attention_backends.registry import AttentionBackend, AttentionCall, select
from hf_longspec.cli.env import versions
from hf_longspec.cli.files import Record
from hf_longspec.cli.measuring import significant, summarize
from hf_longspec.generation.cache import SpeculativeCache

# Relative error against float64. In bfloat16 the rounding of inputs and output alone gives about 3e-3; in float32 a GPU
# that uses TF32 gives 3e-4, which is a bug here.
BUDGETS = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 1.5e-2}


@dataclass(frozen=True)
class Plan:
    """The measurements and their sizes."""

    shape: Shape  # sizes of the random target
    contexts: tuple[int, ...]  # contexts of iterations, most important first; that of forwards is the first
    points: tuple[tuple[int, int], ...]  # batch and context of the attention cases, most important first
    nodes: tuple[int, ...]  # nodes of a verification
    rotating: int  # layers that a timed pass goes through, so that no cache level holds what is read
    matrix: int  # rows and columns of the matrix product whose rate is the ceiling
    tokens: int  # tokens of a timed call of `generate` at most
    ms: float  # milliseconds of the repeats of one timing
    gamma: int = 6  # drafted tokens of SpecAttn
    patience: float = 1.0  # factor of the time limits of sections and rows
    # Widths of LongSpec's trees, the first first: 64 and 16 nodes with the root, which fill whole tiles of the kernels,
    # and the tree of the paper.
    trees: tuple[tuple[int, ...], ...] = ((4, 16, 16, 16, 11), (4, 4, 4, 3), (4, 16, 16, 16, 16))
    branching: tuple[int, ...] = (1, 3, 3, 3)  # of TokenSwift's tree, which is its default
    draft_weights: tuple[str, ...] = ("int4",)  # of SpecAttn's steps
    # Products with weights of 4 bits: rows and columns of the matrices, and how many vectors they multiply.
    matrices: tuple[tuple[int, int], ...] = ()
    vectors: tuple[int, ...] = (1,)
    # Of the bundled target: tokens of the prompt, and those that are timed.
    text: int = 15_000
    pair_tokens: int = 256
    # Of the hybrid target: its type, tokens of the prompt, and its sizes.
    hybrid: tuple[tuple[str, Any], ...] = ()


def _plan(name: str) -> Plan:
    """A plan of suites/gpu.yaml, whose lists become tuples."""

    def frozen(value: Any) -> Any:
        return tuple(map(frozen, value)) if isinstance(value, list) else value

    fields = {field: frozen(value) for field, value in SUITE["plans"][name].items()}
    return Plan(**fields | {"shape": Shape(**dict(fields["shape"]))})


GPU_PLAN = "llama-8b"  # the one that runs on a GPU
PLANS = {name: _plan(name) for name in SUITE["plans"]}
LLAMA_8B, SMOKE = PLANS[GPU_PLAN], PLANS["smoke"]


@dataclass(frozen=True)
class Timing:
    """The time of a call that does the same work every time."""

    milliseconds: list[float]  # one entry per repeat
    # "graph" (replay of a CUDA graph), "events" (calls between CUDA events, launches included), or "wall" (the clock of
    # the host)
    how: str
    note: str | None = None  # why it is not "graph"

    @property
    def median(self) -> float:
        """Milliseconds."""
        return statistics.median(self.milliseconds)

    def scaled(self, count: int) -> "Timing":
        """One of `count` equal parts of the call."""
        return Timing([value / count for value in self.milliseconds], self.how, self.note)

    def to_dict(self) -> Record:
        record: Record = {"ms": summarize(self.milliseconds), "how": self.how}
        return record if self.note is None else record | {"note": self.note}


# Calls that a timing makes at least, the warm-up included.
FEWEST_CALLS = 12


# What kernels and baselines depend on.
PACKAGES = ("triton", "flash_attn", "flashinfer-python", "gemlite", "xformers")
# Processes of the sections. A fork has imported everything already. Only a process that has never called CUDA can be
# forked, so the parent calls nothing of it.
FORK = multiprocessing.get_context("fork")
# Seconds before the limit of the run at which the last section ends, and that a killed process may take to end.
RESERVE = 5.0


class Stop(BaseException):
    """The reason for which a process can measure nothing more: its device is lost."""


class GpuRun(Run):
    """A run on one device.

    Args:
        memory_bytes (`int`, *optional*): Memory that may be used; by default the free memory of a GPU, and no limit on
            a CPU.

    The other arguments are those of [`Run`].
    """

    def __init__(
        self,
        *args: Any,
        plan: Plan,
        device: torch.device,
        dtype: torch.dtype,
        backends: Sequence[str],
        memory_bytes: int | None = None,
        **options: Any,
    ):
        super().__init__(*args, **options)
        self.plan, self.device, self.dtype, self.backends = plan, device, dtype, list(backends)
        self.budget = BUDGETS[dtype]
        self.machine: Machine | None = None
        self.refused: dict[str, str] = {}
        self.part = ""
        self._memory_bytes = memory_bytes

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @cached_property
    def model(self) -> Any:
        self.require(self.shape.stored_weights * self.dtype.itemsize, "the random target")
        self.say("drawing the random target")
        return random_target(self.plan.shape, max(self.plan.contexts) + 512, self.device, self.dtype)

    @cached_property
    def shape(self) -> TargetShape:
        return shape_from_config(self.plan.shape.config(1), "random target")

    def cache(self, batch: int, context: int, slots: int, room: int = 1) -> SpeculativeCache:
        model, length = self.model, context + slots + room  # the weights come first
        self.require(cache_bytes(self.plan.shape, batch, length, self.dtype), "the cache")
        return full_cache(model, batch, context, room, slots)

    def require(self, needed: float, what: str) -> None:
        """Raise [`Skip`] if `needed` bytes are not free, or no time is left."""
        self.require_time()
        free = self._memory_bytes
        if self.is_cuda and free is None:
            gc.collect()
            torch.cuda.empty_cache()
            free = torch.cuda.mem_get_info()[0]
        if free is not None and needed > free:
            raise Skip(f"{what} needs {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free")

    def apart(self, name: str, function: Callable[["GpuRun"], None], seconds: float, **what: Any) -> None:
        """Run a section in a process of its own, which is killed after `seconds`, and take over what it wrote."""
        what, seconds = {"section": name, **what}, min(seconds, self.left - RESERVE)
        if seconds <= 0:
            self.skip("no time left", **what)
            return
        self.say(f"{what}: {seconds:.0f} s of {self.left:.0f} s")
        sys.stdout.flush()
        process = FORK.Process(target=self._section, args=(function, seconds, what), daemon=True)
        process.start()
        process.join(seconds)
        reason = f"killed after {seconds:.1f} s" if process.is_alive() else f"its process ended with {process.exitcode}"
        process.kill()
        process.join(RESERVE)
        self._take_over()
        if process.exitcode != 0:
            self.write("failed", reason=reason, **what)
            self.say(f"FAILED {what}: {reason}")

    def _section(self, function: Callable[["GpuRun"], None], seconds: float, what: dict[str, Any]) -> None:
        """Run a section in this process; an error in it is a line."""
        started, self.part = self.elapsed, what["section"]
        self.seconds = min(self.seconds, started + seconds)
        # A fork's first call renews torch's pool of threads. Threads that load weights would renew it all at once, and
        # torch ends one of them with "Invalid thread pool!".
        torch.set_num_threads(torch.get_num_threads())
        torch.manual_seed(0)
        try:
            with self.attempt(**what):
                function(self)
        except Stop as reason:
            self.skip(f"{reason}: the rest of it", **what)
        self.write("section", **what, seconds=round(self.elapsed - started, 2))

    def _take_over(self) -> None:
        """Read what another process appended to the file, without a last line that was cut off."""
        content = self.path.read_bytes()
        os.truncate(self.path, content.rfind(b"\n") + 1)
        self.records = read_records(self.path)
        for record in of_kind(self.records, "gpu_ceilings"):
            self.machine = Machine("measured", record["tb_per_second"], record["tflops"])

    def require_time(self) -> None:
        if not self.left:
            raise Skip("no time left")

    @contextmanager
    def attempt(self, **what: Any) -> Iterator[None]:
        """A context that a missing package, memory or time, or an error ends with a line that has the reason.

        Raises:
            Stop: If the device does not answer any more.
        """
        where = {"section": self.part, **what}
        try:
            yield
        except Skip as reason:
            self.skip(str(reason), **where)
        except torch.OutOfMemoryError as error:
            self.skip(f"out of memory: {str(error).splitlines()[0]}", **where)
        except Exception as error:
            self.write("failed", reason=f"{type(error).__name__}: {str(error)[:500]}", **where)
            self.say(f"FAILED {where}: {type(error).__name__}: {str(error)[:200]}")
        if self.is_cuda:
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            except RuntimeError as error:  # after an illegal access every further call fails
                raise Stop(f"the device is lost: {str(error).splitlines()[0]}") from error

    def time(self, function: Callable[[], object], capture: bool = True) -> Timing:
        """Time a function: on a GPU by `triton.testing`, from a CUDA graph if it reads nothing back from the device.

        Args:
            capture (`bool`): False for a function that launches on the host what shall be timed with it.

        Raises:
            Skip: If one call takes so long that the measurement would not end in time.
        """
        self.require_time()
        once = min(self._seconds_until_done(function) for _ in range(2))  # the first may compile
        if once * FEWEST_CALLS > self.left:
            raise Skip(f"one call takes {once * 1e3:.0f} ms, {FEWEST_CALLS} do not fit into {self.left:.1f} s")
        ms = self.plan.ms
        if not self.is_cuda:
            from torch.utils.benchmark import Timer

            timer = Timer("function()", globals={"function": function}, num_threads=torch.get_num_threads())
            return Timing([seconds * 1e3 for seconds in timer.blocked_autorange(min_run_time=ms / 1e3).times], "wall")
        from triton.testing import do_bench, do_bench_cudagraph

        torch.cuda.empty_cache()  # a graph has memory of its own
        note = None
        try:
            if capture:
                return Timing(do_bench_cudagraph(function, rep=ms / 5, return_mode="all"), "graph")
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # such as a function that reads from the device
            torch.cuda.synchronize()
            note = f"not captured: {str(error).splitlines()[0]}"
        return Timing(do_bench(function, rep=ms, return_mode="all"), "events", note)

    def _seconds_until_done(self, function: Callable[[], object]) -> float:
        started = time.perf_counter()
        function()
        if self.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - started

    @property
    def usable(self) -> list[str]:
        """Backends under test that accept the device and the dtype and were not found wrong."""
        for name in self.backends:
            if name not in self.refused:
                try:
                    self.backend(name)
                except ValueError as error:  # its first two lines are the call and the reason, then comes a remedy
                    self.refused[name] = "; ".join(line.strip() for line in str(error).splitlines()[:2])
                    self.skip(f"not timed: {self.refused[name]}", backend=name)
        return [name for name in self.backends if name not in self.refused]

    def backend(self, name: str | None = None) -> AttentionBackend:
        """A backend by name, or the preferred one; ValueError if it refuses the device or the dtype."""
        size = self.plan.shape.head_dim
        return select(AttentionCall(self.device, self.dtype, size, size), name)

    def roofline(self, batch: int, context: int, **options: Any) -> Roofline:
        """Floors at the measured ceilings.

        Raises:
            Skip: If they were not measured.
        """
        if self.machine is None:
            raise Skip("the ceilings were not measured, and there is no floor without them")
        size = self.dtype.itemsize
        return Roofline(self.shape, self.machine, batch, context, **{"weight_bytes": size, "kv_bytes": size, **options})

    def write_timing(self, kind: str, timing: Timing, floor_ms: float, **values: Any) -> None:
        fields = {name: significant(value) if isinstance(value, float) else value for name, value in values.items()}
        times_floor = significant(timing.median / floor_ms) if floor_ms else None
        record = timing.to_dict() | {"floor_ms": significant(floor_ms), "times_floor": times_floor}
        self.write(kind, section=self.part, **fields, **record)
        self.say(f"{kind} {fields}: {timing.median:.3f} ms, {times_floor} times the floor")


def has_gpu() -> bool:
    """Whether there is a CUDA device. A process of its own asks, since this one is to be forked."""
    process = FORK.Process(target=lambda: sys.exit(not torch.cuda.is_available()))
    process.start()
    process.join()
    return process.exitcode == 0


def gpu_facts(device: torch.device) -> dict[str, Any]:
    """The GPU and its memory, and the versions that its kernels depend on; on a CPU the versions only."""
    facts: dict[str, Any] = {"device": device.type, "cuda": torch.version.cuda}
    facts |= versions(*PACKAGES)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["gpu"], facts["memory_gb"] = properties.name, round(properties.total_memory / 1e9, 1)
        facts["capability"] = f"{properties.major}.{properties.minor}"
    return facts
