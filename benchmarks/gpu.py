"""All measurements on a GPU, in one command that ends within nine minutes and needs torch, triton and transformers.

The run downloads and prefills nothing, and the package need not be installed. A wrong result is not timed; a
measurement that is not possible is a line with the reason. benchmarks/README.md describes the sections.

    python benchmarks/gpu.py
    python -m benchmarks.gpu --sections kernels,baselines --minutes 5
    python -m benchmarks.gpu --smoke --output runs/gpu.jsonl   # every path on a CPU; the times are meaningless
"""

import time

STARTED = time.perf_counter()  # imports take seconds of the time limit, too

import argparse
import signal
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise, takewhile
from operator import eq
from pathlib import Path
from typing import Any

import torch

if not __package__:  # run as a file: the root of the checkout takes the place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import hf_longspec
from benchmarks import harness
from benchmarks.gpu_attention import baselines, kernels
from benchmarks.gpu_run import LLAMA_8B, SMOKE, GpuRun, Plan, Stop, Timing, gpu_facts
from benchmarks.harness import Skip, integers, names
from benchmarks.random_inputs import dynamic_cache
from benchmarks.roofline import Machine
from hf_longspec.bench.calls import HF, PLAIN, Call, Decoding, HfMethod, changed, run_call
from hf_longspec.bench.report import significant
from hf_longspec.generation.cache import SpeculativeCache
from hf_longspec.generation.target import TargetView

BACKENDS = ["hf_longspec_triton", "hf_longspec_torch", "hf_longspec_fa"]
RESERVE = 5.0  # seconds before the limit at which the run stops whatever it does, and writes its last lines
CALLS = 2  # timed calls of `generate` per row
WARM_UP_TOKENS, FEWEST_TOKENS = 16, 8  # tokens of the call before them, and of each of them at least
ROW_SECONDS = 6.0  # that the timed calls of a row may take together


def ceilings(run: GpuRun) -> None:
    """Best rates of a copy and of a bfloat16 matrix product, on random data. Every floor divides by them."""
    size = run.plan.matrix
    matrix, other = (torch.randn(size, size, device=run.device).bfloat16() for _ in range(2))
    source = torch.randn(8 * size * size // 4, device=run.device)
    copy = torch.empty_like(source)
    copies = min(run.time(lambda: copy.copy_(source)).milliseconds)
    products = min(run.time(lambda: matrix @ other).milliseconds)
    rates = {"tb_per_second": 2 * source.nbytes / copies / 1e9, "tflops": 2 * size**3 / products / 1e9}
    run.machine = Machine("measured", **rates)
    run.write("gpu_ceilings", **{name: significant(value) for name, value in rates.items()}, **gpu_facts(run.device))
    run.say(f"ceilings: {rates}")


def first_drafts(target: Any, plan: Plan) -> dict[str, Any]:
    """No draft, with which the others are compared, stock `generate`, SpecAttn and LongSpec; with random weights."""
    specattn = hf_longspec.SpecAttnDraftModel.from_target(target, num_assistant_tokens=plan.gamma)
    methods = {PLAIN: hf_longspec.PlainDraftModel.from_target(target), HF: HfMethod()}
    return methods | {f"SpecAttn, gamma {plan.gamma}": specattn, **_longspec(target, plan.trees[:1])}


def other_drafts(target: Any, plan: Plan) -> dict[str, Any]:
    """No draft, further trees of LongSpec, TokenSwift and n-grams."""
    drafts = {PLAIN: hf_longspec.PlainDraftModel.from_target(target), **_longspec(target, plan.trees[1:])}
    for self_draft in ("verify_hidden", "partial_kv"):
        drafts[f"TokenSwift, {self_draft}"] = heads = hf_longspec.TokenSwiftDraftModel.from_target(target)
        heads.generation_config.self_draft = self_draft
    return drafts | {"n-grams": hf_longspec.NgramDraftModel.from_target(target)}


def _longspec(target: Any, trees: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    drafts = {}
    for widths in trees:
        drafts[f"LongSpec, {'+'.join(map(str, widths))}"] = draft = hf_longspec.LongSpecDraftModel.from_target(target)
        draft.generation_config.tree_widths = list(widths)
    return drafts


def iterations(run: GpuRun, make_drafts: Callable[[Any, Plan], dict[str, Any]]) -> None:
    """Whole iterations through `generate`: drafting, verification, acceptance, commit and what is between.

    Random weights give no information about acceptance. c is the time of a step without a draft over that of an
    iteration; its product with tau is the speed-up.
    """
    drafts = make_drafts(run.model, run.plan)
    for context in run.plan.contexts:
        with run.attempt(context=context):
            most = max(nodes_of(draft, run.model) for draft in drafts.values())
            cache = run.cache(1, context, slots=most, room=run.plan.tokens + most + 1)
            stored = context - most  # the same for all, so that they continue the same keys and values
            plain: dict[bool, tuple[float, list[int]]] = {}  # median and text without a draft, which comes first
            for name, draft in drafts.items():
                for compiled in (False, True):
                    what = {"draft": name, "compiled": compiled, "batch": 1, "context": context}
                    with run.attempt(**what):
                        _time_draft(run, draft, cache, stored, plain, what)


def nodes_of(method: Any, model: Any) -> int:
    """Nodes of a verification; stock `generate` has steps of one token."""
    return 1 if isinstance(method, HfMethod) else method.num_tree_nodes(TargetView(model))


def _time_draft(
    run: GpuRun, draft: Any, cache: SpeculativeCache, stored: int, plain: dict[bool, Any], what: dict[str, Any]
) -> None:
    """One row: calls of the same shapes, after one that compiles kernels and captures what later calls can reuse."""
    run.require_time()
    compiled, stock = what["compiled"], isinstance(draft, HfMethod)
    if compiled and not run.is_cuda:
        raise Skip("steps are captured as CUDA graphs, and there is no CUDA device")
    if compiled and (stock or "compile" not in draft.settings):
        raise Skip(f"{type(draft).__name__} has no setting `compile`")
    if stock:
        run.require(2 * cache.nbytes, "the cache of stock `generate` and its copy in every step")
    mode = {} if stock or "compile" not in draft.settings else {"compile": "graph" if compiled else "off"}
    with changed(draft, mode) if mode else nullcontext():
        first, milliseconds, _ = generate(run, draft, cache, what["context"], stored, WARM_UP_TOKENS)
        per_token = statistics.median(milliseconds) * len(milliseconds) / first.tokens / 1e3
        affordable = int(min(ROW_SECONDS, run.left) / CALLS / per_token)
        if affordable < min(FEWEST_TOKENS, run.plan.tokens):
            raise Skip(f"a token takes {per_token:.1f} s and {run.left:.0f} s are left")
        if run.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        tokens = min(affordable, run.plan.tokens)
        calls = [generate(run, draft, cache, what["context"], stored, tokens) for _ in range(CALLS)]
    milliseconds = [ms for _, every, _ in calls for ms in every]
    median, text = statistics.median(milliseconds), calls[0][0].text[0].tolist()
    if what["draft"] == PLAIN:
        plain[compiled] = median, text
    base, base_text = plain.get(compiled, (None, None))
    nodes = nodes_of(draft, run.model)
    values: dict[str, Any] = {
        "nodes": nodes,
        "backend": run.model.config._attn_implementation if stock else run.backend().name,
        "iterations": len(milliseconds),
        "speculated": sum(speculated for _, _, speculated in calls),
        "tau": sum(call.tokens for call, _, _ in calls) / sum(call.steps for call, _, _ in calls),
        "same_tokens": None if base_text is None else len(list(takewhile(bool, map(eq, text, base_text)))),
        "c": None if base is None else base / median,
    }
    if run.is_cuda:
        values["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    floor_ms = run.roofline(1, what["context"]).verify_ms(nodes)
    run.write_timing("iteration", Timing(milliseconds, "wall"), floor_ms, **what, **values)


def generate(
    run: GpuRun, draft: Any, cache: SpeculativeCache, context: int, stored: int, tokens: int
) -> tuple[Call, list[float], int]:
    """One greedy call after `context` random tokens, the first `stored` of which the cache holds.

    Returns:
        The call, milliseconds of its iterations but the first, in which buffers are made and graphs captured, and how
        many of them verified drafted tokens.
    """
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(run.plan.shape.vocab, (1, context), generator=generator)
    cache.rollback()
    past: Any = cache
    if isinstance(draft, HfMethod):
        past = dynamic_cache(cache, context - 1)
    else:
        cache.set_lengths([stored])
        draft.generation_config.gate = False  # speculation itself is measured
    arrivals: list[float] = []
    call = run_call(
        run.model,
        draft,
        (prompt, torch.ones_like(prompt)),
        decoding=Decoding(),
        tokens=min(tokens, run.plan.tokens),
        seed=0,
        cache=past,
        on_arrival=lambda _: arrivals.append(time.perf_counter()),
    )
    emitted, drafted = [1] * call.steps, [0] * call.steps
    if not isinstance(draft, HfMethod):
        stats = draft.last_speculation
        (emitted,), (drafted,) = stats.emitted_per_step, stats.drafted_per_step
    if len(emitted) < 2:
        raise Skip("the call ended with its first iteration")
    return call, iteration_ms(arrivals, emitted)[1:], sum(count > 0 for count in drafted[1:])


def iteration_ms(arrivals: Sequence[float], emitted: Sequence[int]) -> list[float]:
    """Milliseconds from the tokens of one iteration to those of the next.

    Args:
        arrivals (`Sequence[float]`): Times at which tokens reached the host; the first comes from the prompt.
        emitted (`Sequence[int]`): Tokens of every iteration.

    >>> iteration_ms([0.0, 1.0, 1.0, 3.0, 7.0], [2, 1, 1])
    [1000.0, 2000.0, 4000.0]
    """
    first_tokens = accumulate(emitted[:-1], initial=1)
    return [1e3 * (end - begin) for begin, end in pairwise([arrivals[0], *(arrivals[at] for at in first_tokens)])]


# The most important ones first.
SECTIONS: dict[str, Callable[[GpuRun], None]] = {
    "ceilings": ceilings,
    "iterations": partial(iterations, make_drafts=first_drafts),
    "kernels": kernels,
    "baselines": baselines,
    "drafts": partial(iterations, make_drafts=other_drafts),
}


def execute(run: GpuRun, sections: Sequence[str]) -> None:
    """Measure; say what was left out if the time ends or the device is lost."""
    queue = [name for name in SECTIONS if name in sections]
    try:
        while queue:
            run.section(queue[0], SECTIONS[queue[0]])
            queue.pop(0)
    except Stop as reason:
        run.skip(f"{reason}: the rest of it, and what follows", part=" ".join(queue))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def main(arguments: list[str] | None = None) -> None:
    started = STARTED if arguments is None else time.perf_counter()
    parser = argument_parser()
    args = parser.parse_args(arguments)
    if not args.smoke and not torch.cuda.is_available():
        parser.error("there is no CUDA device. --smoke runs every path on a CPU.")
    if unknown := sorted(set(args.sections) - set(SECTIONS)):
        parser.error(f"--sections {','.join(unknown)}: expected some of {', '.join(SECTIONS)}.")
    plan, device = (SMOKE, torch.device("cpu")) if args.smoke else (LLAMA_8B, torch.device("cuda"))
    if args.contexts:
        plan = replace(plan, contexts=tuple(args.contexts))
    sections = args.sections if "ceilings" in args.sections else ["ceilings", *args.sections]  # floors need them
    settings = {"shape": vars(plan.shape), "contexts": plan.contexts, "dtype": args.dtype, "sections": sections}
    settings |= {"backends": args.backends, "device": device.type, "minutes": args.minutes}
    torch.manual_seed(0)
    how = {"plan": plan, "device": device, "dtype": getattr(torch, args.dtype), "backends": args.backends}
    options = {"make": GpuRun, "facts": gpu_facts(device), "started": started}
    with harness.start(args, "gpu", settings, **how, **options) as run:
        signal.signal(signal.SIGALRM, _time_is_over)
        signal.setitimer(signal.ITIMER_REAL, max(0.1, run.left - RESERVE))
        execute(run, sections)


def _time_is_over(*_: object) -> None:
    raise Stop("no time left")


def argument_parser() -> argparse.ArgumentParser:
    parser = harness.parser(__doc__, "gpu", minutes=9)  # imports included
    add = parser.add_argument
    add("--sections", type=names, default=list(SECTIONS), help=f"default: {','.join(SECTIONS)}")
    add("--contexts", type=integers, help="of iterations (default: 8192,32768,131072)")
    add("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16", help="default: bfloat16")
    add("--backends", type=names, default=BACKENDS, help=f"default: {','.join(BACKENDS)}")
    add("--smoke", action="store_true", help="every path on a tiny target on the CPU; the times are meaningless")
    return parser


if __name__ == "__main__":
    main()
