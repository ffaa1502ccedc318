"""The GPU benchmark: everything that a GPU has to show, in one run that ends in time, most telling things first."""

from collections.abc import Callable
from functools import partial
from typing import Any

from ..attention_backends import interface  # noqa: F401 (registers the backends)
from .environment import gpu_environment
from .gpu_attention import AttentionSections
from .gpu_baseline_section import BaselineSection
from .gpu_forward import ForwardSections
from .gpu_iterations import IterationSection
from .gpu_predictions import PREDICTIONS
from .gpu_run import GpuRun
from .gpu_variants import VariantSections
from .roofline_shapes import Machine
from .summaries import significant


class GpuBenchmark:
    """All sections in their order.

    Args:
        run ([`GpuRun`]): Device, plan, result file.
        make_drafts (`Callable`): Takes the target and the plan; gives [`TimedDraft`]s by name.
    """

    def __init__(self, run: GpuRun, make_drafts: Callable[..., Any]):
        self.run = run
        self.attention = AttentionSections(run)
        self.baselines = BaselineSection(run, self.attention)
        self.forwards = ForwardSections(run)
        self.iterations = IterationSection(run, self.forwards, make_drafts)
        self.variants = VariantSections(run, self.forwards)

    def sections(self) -> dict[str, Callable[[], None]]:
        """What runs, in order. FP8 changes the target and comes last but for what needs no target of ours."""
        plan = self.run.plan
        return {
            "ceilings": self.ceilings,
            "correctness": self.attention.correctness,
            "kernels": partial(self.attention.kernels, plan.points),
            "baselines": partial(self.baselines.all, plan.points),
            "forwards": partial(self.forwards.all, plan.contexts),
            "iterations": partial(self.iterations.all, plan.contexts),
            "profile": self.forwards.profile,
            "batches": self.variants.batches,
            "long": self.long,
            "quantised": self.variants.quantised,
        }

    def execute(self) -> None:
        """Predict, measure, judge."""
        results = self.run.results
        for prediction in PREDICTIONS:
            results.write("prediction", name=prediction.name, text=prediction.text)
        for name, function in self.sections().items():
            self.run.section(name, function)
        for prediction in PREDICTIONS:
            results.write("outcome", **prediction.outcome(results.records))

    def ceilings(self) -> None:
        """Rates of the device, which every floor divides by."""
        run = self.run
        found = run.device.ceilings(min(run.left, 4.0), run.plan.matrix)
        run.machine = Machine("measured", found["tb_per_second"], found["tflops"])
        rounded = {name: significant(value) for name, value in found.items()}
        run.results.write("gpu_ceilings", **rounded, **gpu_environment(run.device.device))
        run.progress.say(f"ceilings: {rounded}")

    def long(self) -> None:
        """The longest context, for whatever time is left."""
        context = self.run.plan.long_context
        self.attention.kernels(((1, context),))
        self.forwards.all((context,))
        self.iterations.all((context,))
