"""Attention alone on the GPU: its correctness, its time, and the time that SpecAttn's scores add."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_baselines import BASELINES, LOWER_BOUND, Attend, NotInstalled
from benchmarks.gpu_device import Skip, poisoned_outputs
from benchmarks.gpu_run import GpuRun
from benchmarks.random_inputs import DeviceAttention, random_attention, relative_error
from hf_longspec.attention_backends.merge import AttentionState
from hf_longspec.attention_backends.scores import ScoreCapture
from hf_longspec.bench.summaries import significant

# The log-sum-exp is computed in float32 from products of exact inputs, whatever the dtype of these.
LSE_BUDGET = 1e-3


class AttentionSections:
    """Correctness and speed of the backends under test.

    Args:
        run ([`GpuRun`]): The run.
    """

    def __init__(self, run: GpuRun):
        self.run = run

    def correctness(self) -> None:
        """Every backend at every length and number of nodes; one miss, and the backend is not timed anywhere."""
        plan = self.run.plan
        ragged = (plan.lengths[-2], plan.lengths[-1])
        for name in self.run.usable:
            for lengths in [*((length,) for length in plan.lengths), ragged]:
                for nodes in plan.nodes:
                    self.run.attempt(
                        partial(self._check, name, lengths, nodes),
                        backend=name,
                        lengths=list(lengths),
                        nodes=nodes,
                    )

    def kernels(self, points: tuple[tuple[int, int], ...]) -> None:
        """Times per layer at every point `(batch, context)`, and those with SpecAttn's score rows."""
        for batch, context in points:
            for nodes in self.run.plan.nodes:
                what = {"batch": batch, "context": context, "nodes": nodes}
                self.run.attempt(partial(self._time_point, **what), **what)

    def case(self, lengths: tuple[int, ...], nodes: int, layers: int) -> DeviceAttention:
        """A random case, if there is memory for it."""
        run, shape = self.run, self.run.plan.shape
        numbers = 2 * len(lengths) * shape.kv_heads * (max(lengths) + nodes + 16) * shape.head_dim
        exact = 8 * (max(lengths) + nodes) * shape.heads * (4 * shape.head_dim + 4 * nodes)
        run.device.require(layers * numbers * run.dtype.itemsize + exact, "the case with its float64 reference")
        return random_attention(shape, lengths, nodes, layers, run.device.device, run.dtype)

    def _check(self, name: str, lengths: tuple[int, ...], nodes: int) -> None:
        run = self.run
        if name in run.refused:
            return
        backend = run.backend(name)
        case = self.case(lengths, nodes, layers=1)
        with poisoned_outputs():
            found = case.state(backend, case.layers[0])
        error, lse_error = errors(found, case.exact(case.layers[0]))
        right = error <= run.budget and lse_error <= LSE_BUDGET  # false for NaN
        run.results.write(
            "correctness",
            backend=name,
            lengths=list(lengths),
            nodes=nodes,
            error=_number(error),
            lse_error=_number(lse_error),
            budget=run.budget,
            right=right,
        )
        if not right:
            where = f"{nodes} nodes after {', '.join(map(str, lengths))}"
            run.refuse(name, f"{where}: error {error:.1e} over {run.budget:.1e}, lse {lse_error:.1e}")

    def _time_point(self, batch: int, context: int, nodes: int) -> None:
        """All backends on one case, each checked on these very inputs before it is timed."""
        case = self.case((context,) * batch, nodes, self.run.plan.rotating)
        exact = case.exact(case.layers[0])
        for name in self.run.usable:
            what = {"backend": name, "batch": batch, "context": context, "nodes": nodes}
            self.run.attempt(partial(self._time, name, case, exact, what), **what)

    def _time(self, name: str, case: DeviceAttention, exact: AttentionState, what: dict[str, Any]) -> None:
        run, layers = self.run, len(case.layers)
        backend = run.backend(name)
        error, _ = errors(case.state(backend, case.layers[0]), exact)
        if not error <= run.budget:
            raise Skip(f"not timed: its error is {error:.1e}, over {run.budget:.1e}")
        at = run.roofline(what["batch"], what["context"])
        floor = at.attention_ms(what["nodes"]) / run.plan.shape.layers
        last = torch.full((what["batch"],), what["nodes"] - 1, device=run.device.device)
        context = case.context()  # outside: made from host numbers, which a graph cannot copy

        def plain() -> None:
            for index, layer in enumerate(case.layers):
                case.attend(backend, layer, context, index)

        def scored() -> None:
            context.capture = ScoreCapture(last, score="weights")
            plain()
            context.capture = None

        timing = run.time(plain).scaled(layers)
        read = at.kv_bytes_per_token / run.plan.shape.layers * what["batch"] * what["context"]
        run.write_timing("kernel", timing, floor, **what, error=error, tb_per_second=read / timing.median / 1e9)
        with_scores = run.time(scored).scaled(layers)
        share = with_scores.median / timing.median - 1
        run.write_timing("score_rows", with_scores, floor, **what, overhead=share)


def errors(found: AttentionState, exact: AttentionState) -> tuple[float, float]:
    """Relative L2 error of the output, largest relative error of the log-sum-exp; NaN stays NaN."""
    lse = exact[1]
    off = (found[1].double() - lse).abs() / lse.abs().clamp_min(1.0)
    return relative_error(found[0], exact[0]), off.max().item()


def _number(value: float) -> float | str:
    """For JSON, which has no NaN."""
    return significant(value) if value == value and value != float("inf") else str(value)


class BaselineSection:
    """Time the baselines at the points of the kernels.

    Args:
        run ([`GpuRun`]): The run.
        attention ([`AttentionSections`]): Draws the cases.
    """

    def __init__(self, run: GpuRun, attention: AttentionSections):
        self.run = run
        self.attention = attention
        self._missing: set[str] = set()

    def all(self, points: tuple[tuple[int, int], ...]) -> None:
        """Every baseline at every point and number of nodes."""
        for batch, context in points:
            for nodes in self.run.plan.nodes:
                what = {"batch": batch, "context": context, "nodes": nodes}
                self.run.attempt(partial(self._point, **what), **what)

    def _point(self, batch: int, context: int, nodes: int) -> None:
        case = self.attention.case((context,) * batch, nodes, self.run.plan.rotating)
        exact = case.exact(case.layers[0])[0]
        for name, make in BASELINES.items():
            if name in self._missing:
                continue
            what = {"baseline": name, "batch": batch, "context": context, "nodes": nodes}
            self.run.attempt(partial(self._time, make, case, exact, what), **what)

    def _time(
        self,
        make: Callable[[DeviceAttention], Attend],
        case: DeviceAttention,
        exact: torch.Tensor,
        what: dict[str, Any],
    ) -> None:
        run = self.run
        try:
            attend = make(case)
        except NotInstalled:
            self._missing.add(what["baseline"])
            raise
        error = relative_error(attend(case.layers[0]), exact)
        if what["baseline"] != LOWER_BOUND and not error <= run.budget:
            raise Skip(f"not timed: its error is {error:.1e}, over {run.budget:.1e}")

        def through_all() -> None:
            for layer in case.layers:
                attend(layer)

        floor = run.roofline(what["batch"], what["context"]).attention_ms(what["nodes"]) / run.plan.shape.layers
        run.write_timing("baseline", run.time(through_all).scaled(len(case.layers)), floor, **what, error=error)
