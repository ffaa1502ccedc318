"""The baselines on the GPU: each is checked against float64 on the very inputs that it is timed on."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .gpu_attention import AttentionSections
from .gpu_baselines import BASELINES, LOWER_BOUND, Attend, NotInstalled
from .gpu_device import Skip
from .gpu_inputs import DeviceAttention
from .gpu_run import GpuRun
from .verification_cases import relative_error


class BaselineSection:
    """Times the baselines at the points of the kernels.

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
