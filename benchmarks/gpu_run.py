"""One run of the GPU benchmark: its sizes, the seconds of each section, the time that is left, and the result lines."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.floors import Machine, Roofline, dense_shape
from benchmarks.gpu_device import Device, Skip, Timing
from benchmarks.random_inputs import Shape
from hf_longspec.attention_backends.registry import AttentionBackend, AttentionCall, select
from hf_longspec.bench.progress import Progress
from hf_longspec.bench.results import ResultFile, TimeGuard
from hf_longspec.bench.summaries import significant

LLAMA_8B = Shape(layers=32, vocab=128256)
TINY = Shape(layers=2, hidden=32, intermediate=48, heads=4, kv_heads=2, head_dim=16, vocab=64)

# In the order in which they run. Later sections may use the time that earlier ones leave; the sum is within 9 minutes.
SECONDS = {
    "ceilings": 10.0,
    "correctness": 40.0,
    "kernels": 90.0,
    "baselines": 70.0,
    "forwards": 80.0,
    "iterations": 70.0,
    "profile": 15.0,
    "batches": 35.0,
    "quantised": 20.0,
    "long": 90.0,
}


@dataclass(frozen=True)
class Plan:
    """One run.

    Args:
        shape ([`Shape`]): Sizes of the random target.
        lengths (`tuple[int, ...]`): Prefix lengths that are checked for correctness.
        points (`tuple[tuple[int, int], ...]`): Batch and context of the attention cases, most important first.
        contexts (`tuple[int, ...]`): Contexts of whole forwards and iterations.
        long_context (`int`): The longest context, which comes last and only if there is time.
        nodes (`tuple[int, ...]`): Nodes of a verification.
        rotating (`int`): Layers that a timed pass goes through, so that no cache level holds what is read.
        matrix (`int`): Rows and columns of the matrix product whose rate is the ceiling.
        batches (`tuple[int, ...]`): Batch sizes at `batch_context` tokens.
        batch_context (`int`): Tokens per row in them.
        tokens (`int`): Iterations of a drafter that are timed at a time.
        gamma (`int`): Drafted tokens of SpecAttn.
        trees (`tuple[tuple[int, ...], ...]`): Widths of LongSpec's trees.
        prompt_seed (`int`): Tokens of the random prompts.
        repeats (`int`): Repeats of every timing.
        seconds (`dict[str, float]`): Time of every section.
    """

    shape: Shape
    lengths: tuple[int, ...]
    points: tuple[tuple[int, int], ...]
    contexts: tuple[int, ...]
    long_context: int
    nodes: tuple[int, ...]
    rotating: int
    matrix: int
    batches: tuple[int, ...]
    batch_context: int
    tokens: int
    gamma: int = 7
    trees: tuple[tuple[int, ...], ...] = ((4, 16, 16, 16, 16), (4, 4, 4, 4))
    prompt_seed: int = 0
    repeats: int = 20
    seconds: dict[str, float] = field(default_factory=lambda: dict(SECONDS))


PLANS = {
    "llama-3.1-8b": Plan(
        shape=LLAMA_8B,
        lengths=(1, 17, 4095, 5000, 33000),
        points=((1, 32768), (1, 8192), (4, 32768)),
        contexts=(8192, 32768),
        long_context=131072,
        nodes=(1, 7, 17, 69),
        rotating=8,
        matrix=8192,
        batches=(4, 16, 32, 64, 128),
        batch_context=2048,
        tokens=16,
    ),
    # every path of the above in seconds on a CPU; its numbers mean nothing
    "tiny": Plan(
        shape=TINY,
        lengths=(1, 17, 65),
        points=((1, 64), (2, 48)),
        contexts=(48, 96),
        long_context=160,
        nodes=(1, 5, 9),
        rotating=2,
        matrix=64,
        batches=(2, 3),
        batch_context=24,
        tokens=3,
        gamma=2,
        trees=((2, 2),),
        repeats=5,
    ),
}

# Relative error against float64. In bfloat16 the rounding of inputs and output alone gives about 3e-3; in float32 a GPU
# that uses TF32 gives 3e-4, which is a bug here.
BUDGETS = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 1.5e-2}
# One timing never takes longer, whatever time its section has left.
LONGEST_TIMING = 6.0


@dataclass
class GpuRun:
    """One run of the benchmark.

    Args:
        plan ([`Plan`]): The measurements and their sizes.
        device ([`Device`]): The device.
        dtype (`torch.dtype`): Weights, keys and values.
        backends (`list[str]`): Attention backends by name.
        results ([`ResultFile`]): Where the lines go.
        progress ([`Progress`]): Shows the present task.
        machine ([`Machine`], *optional*): The measured ceilings.
        refused (`dict[str, str]`): Backends that are not run, and why: missing, unfit for the device, or wrong.
    """

    plan: Plan
    device: Device
    dtype: torch.dtype
    backends: list[str]
    results: ResultFile
    progress: Progress
    machine: Machine | None = None
    refused: dict[str, str] = field(default_factory=dict)
    _until: float = field(default=float("inf"), init=False)
    _section: str = field(default="", init=False)

    @property
    def guard(self) -> TimeGuard:
        """The limit of the whole run."""
        return self.results.guard

    @property
    def left(self) -> float:
        """Seconds that the section may still take."""
        return max(0.0, min(self.guard.left, self._until - self.guard.elapsed))

    def section(self, name: str, function: Callable[[], None]) -> None:
        """Run a section within its seconds; an error in it ends the section, not the run."""
        self._section, self._until = name, self.guard.elapsed + self.plan.seconds[name]
        self.progress.say(f"{name}: at most {self.left:.0f} s")
        started = self.guard.elapsed
        self.attempt(function, part=name)
        self.results.write("section", section=name, seconds=round(self.guard.elapsed - started, 2))
        self.progress.step()

    def attempt(self, function: Callable[[], object], **what: Any) -> None:
        """Call a function; if there is no time, no memory, or an error, write a line with the reason and go on."""
        where = {"section": self._section, **what}
        if not self.left:
            self.results.skip("no time left", **where)
            return
        try:
            function()
        except Skip as reason:
            self.results.skip(str(reason), **where)
        except torch.OutOfMemoryError as error:
            self.results.skip(f"out of memory: {str(error).splitlines()[0]}", **where)
        except Exception as error:
            self.results.write("failed", reason=f"{type(error).__name__}: {str(error)[:500]}", **where)
            self.progress.say(f"FAILED {where}: {type(error).__name__}: {str(error)[:200]}")
        if self.device.is_cuda:
            torch.cuda.empty_cache()

    def time(self, function: Callable[[], object], graph: bool = True) -> Timing:
        """Median of the plan's repeats, within what the section has left."""
        return self.device.time(function, min(self.left, LONGEST_TIMING), graph)

    @property
    def usable(self) -> list[str]:
        """Backends under test that accept the device and the dtype and were not found wrong."""
        for name in self.backends:
            if name not in self.refused:
                try:
                    self.backend(name)
                except ValueError as error:  # its first two lines are the call and the reason, then comes a remedy
                    self.refuse(name, "; ".join(line.strip() for line in str(error).splitlines()[:2]))
        return [name for name in self.backends if name not in self.refused]

    def refuse(self, name: str, reason: str) -> None:
        """Leave a backend out from here on; write one line with the reason."""
        self.refused[name] = reason
        self.results.skip(f"not timed: {reason}", backend=name)
        self.progress.say(f"{name} is not timed: {reason}")

    def backend(self, name: str) -> AttentionBackend:
        """A backend by name; ValueError if there is none, or it refuses the device or the dtype."""
        size = self.plan.shape.head_dim
        return select(AttentionCall(self.device.device, self.dtype, size, size), name)

    def roofline(self, batch: int, context: int, **options: Any) -> Roofline:
        """Floors at the measured ceilings.

        Raises:
            Skip: If they were not measured.
        """
        if self.machine is None:
            raise Skip("the ceilings were not measured, and there is no floor without them")
        size = self.dtype.itemsize
        shape = dense_shape("random target", **vars(self.plan.shape))
        return Roofline(shape, self.machine, batch, context, **{"weight_bytes": size, "kv_bytes": size, **options})

    def write_timing(self, kind: str, timing: Timing, floor_ms: float, **values: Any) -> None:
        """Write a measured time and its floor."""
        shown = {name: significant(value) if isinstance(value, float) else value for name, value in values.items()}
        times_floor = significant(timing.median / floor_ms) if floor_ms else None
        record = timing.to_dict() | {"floor_ms": significant(floor_ms), "times_floor": times_floor}
        self.results.write(kind, section=self._section, **shown, **record)
        self.progress.say(f"{kind} {shown}: {timing.median:.3f} ms, {times_floor} times the floor")

    @property
    def budget(self) -> float:
        """Relative error that passes."""
        return BUDGETS[self.dtype]
