"""All measurements on a GPU, in one command that ends within nine minutes and needs torch, triton and transformers.

The run downloads and prefills nothing, and the package need not be installed. A wrong result is not timed; a
measurement that is not possible is a line with the reason. Every section is a process of its own with a time limit, so
that a lost device or a kernel that hangs ends one section alone. benchmarks/README.md describes the sections.

    python benchmarks/gpu.py
    python -m benchmarks.gpu --sections kernels,baselines --minutes 5
    python -m benchmarks.gpu --smoke --output runs/gpu.jsonl   # every path on a CPU; the times are meaningless
"""

import time

STARTED = time.perf_counter()  # imports take seconds of the time limit, too

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

if not __package__:  # run as a file: the root of the checkout takes the place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import gpu_run, harness
from benchmarks.gpu_attention import baselines, kernels
from benchmarks.gpu_checks import captures
from benchmarks.gpu_goals import COMPILE, FUSED, GRAPH, OFF
from benchmarks.gpu_iterations import (
    cheap_drafts,
    first_drafts,
    forwards,
    iterations,
    no_drafts,
    other_drafts,
)
from benchmarks.gpu_products import few_bit_drafts, products
from benchmarks.gpu_run import GpuRun, gpu_facts
from benchmarks.gpu_targets import hybrid, pair
from benchmarks.harness import integers, names
from hf_longspec.cli.env import versions
from hf_longspec.cli.measuring import significant

BACKENDS = ["hf_longspec_triton", "hf_longspec_torch", "hf_longspec_fa"]


def ceilings(run: GpuRun) -> None:
    """Best rates of memory and of a matrix product in the dtype of the run. Every floor divides by them.

    Memory is read faster than it is copied, and a step mostly reads, so the floor is by the faster of both.
    """
    size = run.plan.matrix
    matrix, other = (torch.randn(size, size, device=run.device).to(run.dtype) for _ in range(2))
    source = torch.randn(8 * size * size // 4, device=run.device)
    copy = torch.empty_like(source)
    copies = min(run.time(lambda: copy.copy_(source)).milliseconds)
    reads = min(run.time(lambda: source.sum()).milliseconds)
    products = min(run.time(lambda: matrix @ other).milliseconds)
    of_memory = {"copy": 2 * source.nbytes / copies / 1e9, "read": source.nbytes / reads / 1e9}
    rates = {"tb_per_second": max(of_memory.values()), "tflops": 2 * size**3 / products / 1e9}
    rates |= {f"{name}_tb_per_second": rate for name, rate in of_memory.items()}
    run.write("gpu_ceilings", **{name: significant(value) for name, value in rates.items()}, **gpu_facts(run.device))
    run.say(f"ceilings: {rates}")


class Section(NamedTuple):
    """Measurements in a process of its own, or in one for every context."""

    measure: Callable[..., None]
    seconds: float  # after which the process is killed
    by_context: bool = False


def _iterations(
    make_drafts: Callable[..., dict[str, Any]], modes: Sequence[str], hf_modes: Sequence[str] = ()
) -> Callable[..., None]:
    return partial(iterations, make_drafts=make_drafts, modes=modes, hf_modes=hf_modes)


# The most important ones first. By the seconds that sections took on an H100 (benchmarks/results/gpu.jsonl), those up
# to `iterations`, which give all goals, end within four minutes.
SECTIONS: dict[str, Section] = {
    "ceilings": Section(ceilings, 15),
    "captures": Section(captures, 15),
    "kernels": Section(partial(kernels, points=slice(1)), 30),
    "baselines": Section(partial(baselines, points=slice(1)), 20),
    "forwards": Section(forwards, 25),
    "iterations": Section(_iterations(first_drafts, (FUSED, GRAPH), ("sdpa",)), 80, by_context=True),
    # mostly compilation, which the next two then need not do
    "products": Section(products, 90),
    "few bits": Section(_iterations(few_bit_drafts, (FUSED,)), 60),
    "cheap drafts": Section(_iterations(cheap_drafts, (FUSED,)), 60, by_context=True),
    "hybrid": Section(hybrid, 40),
    "pair": Section(pair, 80),
    "drafts": Section(_iterations(other_drafts, (FUSED,)), 60, by_context=True),
    "more kernels": Section(partial(kernels, points=slice(1, None)), 50),
    "more baselines": Section(partial(baselines, points=slice(1, None)), 30),
    "uncaptured": Section(_iterations(no_drafts, (OFF,), ("eager",)), 40),
    "compiled": Section(_iterations(no_drafts, (COMPILE,), ("static cache",)), 90),
}


def processes(sections: Sequence[str], contexts: Sequence[int]) -> Iterator[tuple[str, Section, dict[str, Any]]]:
    """The sections in their order, once for every context where a section has contexts."""
    for name, section in SECTIONS.items():
        if name in sections:
            for what in [{"context": context} for context in contexts] if section.by_context else [{}]:
                yield name, section, what


def main(arguments: list[str] | None = None) -> None:
    started = STARTED if arguments is None else time.perf_counter()
    parser = argument_parser()
    args = parser.parse_args(arguments)
    is_for_gpu = args.plan == gpu_run.GPU_PLAN
    if is_for_gpu and not gpu_run.has_gpu():
        parser.error("there is no CUDA device. --smoke runs every path on a CPU.")
    if unknown := sorted(set(args.sections) - set(SECTIONS)):
        parser.error(f"--sections {','.join(unknown)}: expected some of {', '.join(SECTIONS)}.")
    plan, device = gpu_run.PLANS[args.plan], "cuda" if is_for_gpu else "cpu"
    if args.contexts:
        plan = replace(plan, contexts=tuple(args.contexts))
    sections = args.sections if "ceilings" in args.sections else ["ceilings", *args.sections]  # floors need them
    settings = {"shape": vars(plan.shape), "contexts": plan.contexts, "dtype": args.dtype, "sections": sections}
    settings |= {"backends": args.backends, "device": device, "minutes": args.minutes}
    how = {"plan": plan, "device": torch.device(device), "dtype": getattr(torch, args.dtype), "backends": args.backends}
    facts = {"device": device, "cuda": torch.version.cuda, **versions(*gpu_run.PACKAGES)}
    with harness.start(args, "gpu", settings, **how, make=GpuRun, facts=facts, started=started) as run:
        for name, section, what in processes(sections, plan.contexts):
            run.apart(name, partial(section.measure, **what), section.seconds * plan.patience, **what)


def argument_parser() -> argparse.ArgumentParser:
    parser = harness.parser(__doc__, "gpu", minutes=9)  # imports included
    add = parser.add_argument
    add("--sections", type=names, default=list(SECTIONS), help=f"default: {','.join(SECTIONS)}")
    add("--contexts", type=integers, help="of iterations (default: 32768,131072)")
    add("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16", help="default: bfloat16")
    add("--backends", type=names, default=BACKENDS, help=f"default: {','.join(BACKENDS)}")
    add("--plan", choices=[*gpu_run.PLANS], default=gpu_run.GPU_PLAN, help="sizes (default: %(default)s)")
    add(
        "--smoke",
        dest="plan",
        action="store_const",
        const="smoke",
        help="every path on a tiny target on the CPU; the times are meaningless",
    )
    return parser


if __name__ == "__main__":
    main()
