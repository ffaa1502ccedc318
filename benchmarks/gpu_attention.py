"""Attention alone on the GPU: its time, that of SpecAttn's scores, and other ways to compute it."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu_goals import HF_ATTENTION
from benchmarks.gpu_run import GpuRun
from benchmarks.harness import Skip
from benchmarks.random_inputs import (
    DeviceAttention,
    Layer,
    hf_attention,
    poisoned_outputs,
    random_attention,
    relative_error,
)
from hf_longspec.attention_backends.registry import AttentionBackend, AttentionState
from hf_longspec.attention_backends.scores import ScoreCapture

# The log-sum-exp is computed in float32 from products of exact inputs, whatever the dtype of these.
LSE_BUDGET = 1e-3

Attend = Callable[[Layer], torch.Tensor]


def errors_of(backend: AttentionBackend, case: DeviceAttention, exact: AttentionState) -> tuple[float, float]:
    """Relative L2 error of a backend's output on these very inputs, largest relative error of its log-sum-exp."""
    with poisoned_outputs():
        out, lse = case.state(backend, case.layers[0])
    lse_error = ((lse.double() - exact[1]).abs() / exact[1].abs().clamp_min(1.0)).max().item()
    return relative_error(out, exact[0]), lse_error


def checked(run: GpuRun, name: str, case: DeviceAttention, exact: AttentionState) -> float:
    """The error of a backend's output.

    Raises:
        Skip: If it, or that of the log-sum-exp, is over its budget.
    """
    error, lse_error = errors_of(run.backend(name), case, exact)
    if not (error <= run.budget and lse_error <= LSE_BUDGET):  # also for NaN
        raise Skip(f"not timed: error {error:.1e} over {run.budget:.1e}, lse {lse_error:.1e}")
    return error


def kernels(run: GpuRun, points: slice) -> None:
    """Times per layer at some points of the plan, with and without SpecAttn's score rows."""
    for case, exact, what in _cases(run, points):
        for name in run.usable:
            with run.attempt(backend=name, **what):
                _time_backend(run, name, case, exact, what)


def baselines(run: GpuRun, points: slice) -> None:
    """Every other way to compute the same attention at the points of the kernels."""
    for case, exact, what in _cases(run, points):
        for name, make in BASELINES.items():
            point = {"baseline": name, **what}
            with run.attempt(**point):
                attend = make(case)
                error = relative_error(attend(case.layers[0]), exact[0])
                if name != LOWER_BOUND and not error <= run.budget:
                    raise Skip(f"not timed: its error is {error:.1e}, over {run.budget:.1e}")
                timing = run.time(lambda attend=attend, layers=case.layers: [attend(layer) for layer in layers])
                run.write_timing("baseline", timing.scaled(len(case.layers)), _floor(run, what), **point, error=error)


def _cases(run: GpuRun, points: slice) -> Iterator[tuple[DeviceAttention, AttentionState, dict[str, int]]]:
    """Random cases at the points of the plan for which there is memory, with the state in float64."""
    shape, layers = run.plan.shape, run.plan.rotating
    for (batch, context), nodes in product(run.plan.points[points], run.plan.nodes):
        what, entry = {"batch": batch, "context": context, "nodes": nodes}, None
        with run.attempt(**what):
            numbers = 2 * batch * shape.kv_heads * (context + nodes + 16) * shape.head_dim
            exact = 8 * (context + nodes) * shape.heads * (4 * shape.head_dim + 4 * nodes)
            run.require(layers * numbers * run.dtype.itemsize + exact, "the case with its float64 reference")
            case = random_attention(shape, (context,) * batch, nodes, layers, run.device, run.dtype)
            entry = case, case.exact(case.layers[0]), what
        if entry is not None:
            yield entry


def _floor(run: GpuRun, what: dict[str, Any]) -> float:
    return run.roofline(what["batch"], what["context"]).attention_ms(what["nodes"]) / run.plan.shape.layers


def _attention(case: DeviceAttention, backend: AttentionBackend, scores: bool) -> Callable[[], None]:
    """A function that computes the attention of all layers of a case, with or without SpecAttn's score rows."""
    last = torch.full((len(case.lengths),), case.tree.num_nodes - 1, device=case.query.device)
    context = case.context()  # outside: made from host numbers, which a graph cannot copy

    def attend() -> None:
        context.capture = ScoreCapture(last) if scores else None
        for index, layer in enumerate(case.layers):
            case.attend(backend, layer, context, index)

    return attend


def _time_backend(run: GpuRun, name: str, case: DeviceAttention, exact: AttentionState, what: dict[str, Any]) -> None:
    point = {"backend": name, **what}
    try:
        error = checked(run, name, case, exact)
    except Skip as reason:  # the backend is refused from here on
        run.refused[name] = str(reason)
        raise
    backend, layers = run.backend(name), len(case.layers)
    timing, with_scores = (run.time(_attention(case, backend, scores)).scaled(layers) for scores in (False, True))
    at, floor = run.roofline(what["batch"], what["context"]), _floor(run, what)
    read = at.kv_bytes_per_token / run.plan.shape.layers * what["batch"] * what["context"]
    run.write_timing("kernel", timing, floor, **point, error=error, tb_per_second=read / timing.median / 1e9)
    run.write_timing("score_rows", with_scores, floor, **point, overhead=with_scores.median / timing.median - 1)


def flashinfer_attention(case: DeviceAttention) -> Attend:
    """FlashInfer's kernel for one row under a mask of all keys."""
    try:
        from flashinfer import single_prefill_with_kv_cache
    except ImportError:
        raise Skip("flashinfer is not installed") from None
    if len(case.lengths) > 1:
        raise Skip("a kernel for one row")
    nodes = case.tree.num_nodes
    mask = torch.ones(nodes, case.end, dtype=torch.bool, device=case.query.device)
    mask[:, -nodes:] = case.tree.mask[0]

    def attend(layer: Layer) -> torch.Tensor:
        query, (keys, values) = case.query[0].transpose(0, 1).contiguous(), (part[0] for part in case.written(layer))
        options = {"custom_mask": mask, "kv_layout": "HND", "sm_scale": case.scaling}
        return single_prefill_with_kv_cache(query, keys, values, **options).transpose(0, 1)[None]

    return attend


# Computes less than the others, and so is a bound instead of a competitor.
LOWER_BOUND = "flash, no mask (lower bound)"
BASELINES: dict[str, Callable[[DeviceAttention], Attend]] = {
    HF_ATTENTION: hf_attention,
    LOWER_BOUND: lambda case: (
        lambda layer: scaled_dot_product_attention(
            case.query, *case.written(layer), scale=case.scaling, enable_gqa=True
        )
    ),
    "flashinfer, mask": flashinfer_attention,
}
