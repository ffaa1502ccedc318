"""Whether captures and kernels work on this GPU, before anything is timed."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu_attention import LSE_BUDGET, errors_of
from benchmarks.gpu_run import BUDGETS, GpuRun
from benchmarks.harness import Skip
from benchmarks.random_inputs import DeviceAttention, random_attention, relative_error
from hf_longspec.attention_backends.registry import AttentionCall, AttentionState, select
from hf_longspec.attention_backends.scores import ScoreCapture
from hf_longspec.generation.compiled.cuda_graphs import WARM_UP, capture

# What a case with features is drawn from.
FEATURES: dict[str, tuple[Any, ...]] = {
    "size": (64, 80, 128, 256),
    "groups": (1, 2, 4, 8, 16),
    "nodes": (1, 5, 16, 64),
    "dtype": (torch.bfloat16, torch.float16),
    "sliding_window": (None, 100, 1000),
    "softcap": (None, 30.0),
    "sinks": (False, True),
    "scores": (None, "logits", "weights"),
}
CASES, KV_HEADS = 10, 2  # every case compiles a variant of the kernels, for two to three seconds


def captures(run: GpuRun) -> None:
    """Capture, fail, capture again, let all graphs end and capture, and capture for two targets."""
    if not run.is_cuda:
        raise Skip("steps are captured as CUDA graphs, and there is no CUDA device")
    numbers = torch.randn(64, 64, device=run.device)
    expected = numbers @ numbers
    one, other = torch.nn.Module(), torch.nn.Module()
    alive: list[Callable[[], None]] = []
    calls: list[int] = []

    def product(target: torch.nn.Module) -> None:
        (found,), replay = capture(lambda: [numbers @ numbers], run.device, target)
        alive.append(replay)
        for again in alive:  # earlier graphs, too
            again()
        if not torch.equal(found, expected):
            raise RuntimeError("a replay computed something else")

    def reads_in_the_capture() -> list[torch.Tensor]:
        calls.append(len(calls))
        return [numbers * numbers.sum().item()] if len(calls) > WARM_UP else [numbers]

    def fail() -> None:
        try:
            capture(reads_in_the_capture, run.device, one)
        except RuntimeError:
            return
        raise AssertionError("a read during a capture did not fail")

    def drop() -> None:
        alive.clear()
        product(one)

    steps = {"first": lambda: product(one), "failure": fail, "after a failure": lambda: product(one)}
    steps |= {"after the end of all graphs": drop, "another target": lambda: product(other)}
    for name, step in steps.items():
        with run.attempt(step=name):
            step()
            run.write("capture", step=name)


def features(run: GpuRun) -> None:
    """Output, log-sum-exp and scores of the preferred backend against float64, in the tiles that it ships with."""
    draw = random.Random(0)
    # every value as often as another, in random combinations
    columns = [draw.sample((values * CASES)[:CASES], CASES) for values in FEATURES.values()]
    for case in zip(*columns, strict=True):
        what = dict(zip(FEATURES, case, strict=True))
        named = what | {"dtype": str(what["dtype"]).removeprefix("torch.")}
        with run.attempt(**named):
            run.require_time()
            run.write("features", **named, **_errors(run, **what))


def _errors(
    run: GpuRun, size: int, groups: int, nodes: int, dtype: torch.dtype, scores: str | None, sinks: bool, **options: Any
) -> dict[str, Any]:
    """The errors of one case, each within its budget; RuntimeError if one is not."""
    heads = groups * KV_HEADS
    shape = replace(run.plan.shape, heads=heads, kv_heads=KV_HEADS, head_dim=size)
    found = {name: value for name, value in options.items() if value is not None}
    if sinks:
        found["sinks"] = torch.linspace(-1, 2, heads, device=run.device)
    case = random_attention(shape, run.plan.prefixes, nodes, 1, run.device, dtype, **found)
    backend, exact = select(AttentionCall(run.device, dtype, size, size)), case.exact(case.layers[0])
    error, lse_error = errors_of(backend, case, exact)
    values = {"error": (error, BUDGETS[dtype]), "lse_error": (lse_error, LSE_BUDGET)}
    if scores is not None:
        last = torch.full((len(case.lengths),), nodes - 1, device=run.device)
        kept = ScoreCapture(last, score=scores)
        case.attend(backend, case.layers[0], case.context(kept))
        pairs = zip(kept.scores[0], _scores(case, exact, scores), case.lengths, strict=True)
        worst = [relative_error(own[0, :length], right) for own, right, length in pairs if length]
        # `logits`: without `attention_with_scores`, sums of queries are rounded to the dtype; `weights` are float32
        values["score_error"] = max(worst), BUDGETS[dtype] if scores == "logits" else LSE_BUDGET
    if over := [f"{name} {value:.1e} over {most:.1e}" for name, (value, most) in values.items() if not value <= most]:
        raise RuntimeError(f"{backend.name}: {', '.join(over)}")
    return {"backend": backend.name, **{name: float(f"{value:.2e}") for name, (value, _) in values.items()}}


def _scores(case: DeviceAttention, exact: AttentionState, score: str) -> list[torch.Tensor]:
    """The scores of every row's prefix in float64, summed over all heads, node 0 and the last node."""
    softcap, ends, rows = case.features.get("softcap"), [0, case.tree.num_nodes - 1], []
    keys = case.layers[0][0]
    for row, length in enumerate(case.lengths):
        query = case.query[row, :, ends].double().unflatten(0, (keys.shape[1], -1))  # [K, G, 2, D]
        products = query @ keys[row, :, None, :length].double().transpose(-1, -2)  # [K, G, 2, S]
        if score == "weights":
            products = products * case.scaling
            if softcap is not None:
                products = softcap * torch.tanh(products / softcap)
            products = (products - exact[1][row][:, ends].unflatten(0, (keys.shape[1], -1))[..., None]).exp()
        rows.append(products.sum((0, 1, 2)))
    return rows
