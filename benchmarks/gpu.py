"""Everything a GPU has to show, in one command that ends within nine minutes.

A random target of the sizes of Llama-3.1-8B is drawn on the device, behind random keys and values: nothing is
downloaded and nothing is prefilled. Measured ceilings, correctness against float64, kernels and baselines, whole
forwards eager and captured, iterations of every drafter, larger batches, FP8, 128K tokens. Each line is written as soon
as it is known; what is wrong is not timed, what is missing or does not fit is a line with the reason.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --device cpu --shape tiny --output runs/gpu.jsonl   # every path in seconds, no news
"""

import argparse
from pathlib import Path
from typing import Any

import torch

import hf_longspec
from hf_longspec.bench.arguments import names, parser, set_threads
from hf_longspec.bench.engine import PLAIN
from hf_longspec.bench.gpu import GpuBenchmark
from hf_longspec.bench.gpu_device import Device
from hf_longspec.bench.gpu_iterations import TimedDraft
from hf_longspec.bench.gpu_plan import PLANS, Plan
from hf_longspec.bench.gpu_report import gpu_report
from hf_longspec.bench.gpu_run import GpuRun
from hf_longspec.bench.progress import Progress
from hf_longspec.bench.results import ResultFile
from hf_longspec.bench.timing import TimeGuard

ROOT = Path(__file__).resolve().parents[1]
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
        progress = Progress(total=len(plan.seconds), quiet=args.quiet)
        run = GpuRun(plan, device, getattr(torch, args.dtype), args.backends, results, progress)
        torch.manual_seed(0)
        GpuBenchmark(run, make_drafts).execute()
    progress.close()
    print(args.output.with_suffix(".md").read_text(encoding="utf-8"))


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
    made = parser(__doc__, ROOT / "benchmarks" / "results" / "gpu.jsonl", minutes=9)
    made.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="default: %(default)s")
    made.add_argument("--shape", choices=list(PLANS), default="llama-3.1-8b", help="default: %(default)s")
    made.add_argument(
        "--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16", help="default: bfloat16"
    )
    made.add_argument("--backends", type=names, default=BACKENDS, help=f"default: {','.join(BACKENDS)}")
    return made


if __name__ == "__main__":
    main()
