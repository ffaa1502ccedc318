"""All measurements on a GPU, in one command that ends within nine minutes.

A random target of the sizes of Llama-3.1-8B is drawn on the device, after random keys and values: nothing is
downloaded and nothing is prefilled. Measured ceilings, correctness against float64, kernels and baselines, whole
forwards eager and captured, iterations of every drafter, larger batches, FP8, 128K tokens. Each line is written as soon
as it is known. A wrong result is not timed; a measurement that is missing or does not fit is a line with the reason.

    python -m benchmarks.gpu
    python -m benchmarks.gpu --device cpu --shape tiny --output runs/gpu.jsonl   # every path in seconds; the numbers
    mean nothing
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import hf_longspec
from benchmarks.floors import Machine
from benchmarks.gpu_attention import AttentionSections, BaselineSection
from benchmarks.gpu_device import Device, gpu_environment
from benchmarks.gpu_forward import ForwardSections, VariantSections
from benchmarks.gpu_iterations import IterationSection, TimedDraft
from benchmarks.gpu_report import PREDICTIONS, gpu_report
from benchmarks.gpu_run import PLANS, GpuRun, Plan
from benchmarks.harness import names, parser, set_threads, show
from hf_longspec.bench.calls import PLAIN
from hf_longspec.bench.progress import Progress
from hf_longspec.bench.results import ResultFile, TimeGuard
from hf_longspec.bench.summaries import significant


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
        """The sections in their order. FP8 changes the target, so it comes last."""
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


# Tokens per iteration that a paper reports for the very setting: SpecAttn's gamma, LongSpec's tree, TokenSwift's mode.
PAPERS: dict[Any, tuple[float, str]] = {
    7: (6.11, "accepted of 7, Qwen3-8B on LongBench-v2: https://huggingface.co/papers/2602.07223"),
    (4, 16, 16, 16, 16): (3.25, "Llama-3.1-8B on GovReport, greedy, table 1: https://huggingface.co/papers/2502.17421"),
    "partial_kv": (3.28, "0.82 of 4, with n-grams, 100K tokens, figure 3: https://huggingface.co/papers/2502.18890"),
}
BACKENDS = ["hf_longspec_triton", "hf_longspec_torch", "hf_longspec_fa"]


def main(arguments: list[str] | None = None) -> None:
    made = argument_parser()
    args = made.parse_args(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        made.error("there is no CUDA device. --device cpu --shape tiny exercises every path on a processor.")
    set_threads(args.threads)
    plan, guard = PLANS[args.shape], TimeGuard(args.minutes)
    settings = {"shape": args.shape, "dtype": args.dtype, "backends": args.backends, "device": args.device}
    with ResultFile(args.output, "gpu", gpu_report, guard, settings) as results:
        device = Device(torch.device(args.device), plan.repeats)
        progress = Progress(len(plan.seconds), lines=True, quiet=args.quiet)
        run = GpuRun(plan, device, getattr(torch, args.dtype), args.backends, results, progress)
        torch.manual_seed(0)
        GpuBenchmark(run, make_drafts).execute()
    show(results, progress)


def make_drafts(target: torch.nn.Module, plan: Plan) -> dict[str, TimedDraft]:
    """Every drafter with random weights; plain decoding first, which the others are compared with."""
    drafts = {PLAIN: TimedDraft(hf_longspec.PlainDraftModel.from_target(target), "plain")}
    specattn = hf_longspec.SpecAttnDraftModel.from_target(target, num_assistant_tokens=plan.gamma)
    drafts[f"SpecAttn, gamma {plan.gamma}"] = TimedDraft(specattn, "specattn", *PAPERS.get(plan.gamma, ()))
    for widths in plan.trees:
        longspec = hf_longspec.LongSpecDraftModel.from_target(target)
        longspec.generation_config.tree_widths = list(widths)
        drafts[f"LongSpec, {'+'.join(map(str, widths))}"] = TimedDraft(longspec, "longspec", *PAPERS.get(widths, ()))
    for self_draft in ("verify_hidden", "partial_kv"):
        heads = hf_longspec.TokenSwiftDraftModel.from_target(target)
        heads.generation_config.self_draft = self_draft
        drafts[f"TokenSwift, {self_draft}"] = TimedDraft(heads, "tokenswift", *PAPERS.get(self_draft, ()))
    drafts["n-grams"] = TimedDraft(hf_longspec.NgramDraftModel.from_target(target), "ngram")
    return drafts


def argument_parser() -> argparse.ArgumentParser:
    made = parser(__doc__, "gpu", minutes=9)
    made.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="default: %(default)s")
    made.add_argument("--shape", choices=list(PLANS), default="llama-3.1-8b", help="default: %(default)s")
    made.add_argument(
        "--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16", help="default: bfloat16"
    )
    made.add_argument("--backends", type=names, default=BACKENDS, help=f"default: {','.join(BACKENDS)}")
    return made


if __name__ == "__main__":
    main()
