"""Attention alone on the GPU: its correctness, its time, that of SpecAttn's scores, and other ways to compute it."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu_run import GpuRun
from benchmarks.harness import Skip
from benchmarks.hf_side import hf_attention
from benchmarks.random_inputs import DeviceAttention, Layer, poisoned_outputs, random_attention, relative_error
from hf_longspec.attention_backends.registry import AttentionState
from hf_longspec.attention_backends.scores import ScoreCapture
from hf_longspec.bench.report import significant

# The log-sum-exp is computed in float32 from products of exact inputs, whatever the dtype of these.
LSE_BUDGET = 1e-3
FLEX_NODES = 16

Attend = Callable[[Layer], torch.Tensor]


def correctness(run: GpuRun) -> None:
    """Every backend at every length and number of nodes; one miss, and the backend is not timed from here on."""
    lengths = [(length,) for length in run.plan.lengths]
    for name in run.usable:
        for rows in [*lengths, run.plan.lengths[-2:]]:  # the last is a ragged batch
            for nodes in run.plan.nodes:
                what = {"backend": name, "lengths": list(rows), "nodes": nodes}
                if name not in run.refused:
                    with run.attempt(**what):
                        case = draw(run, rows, nodes, layers=1)
                        error, lse_error = check(run, name, case, case.exact(case.layers[0]))
                        run.write("correctness", **what, error=significant(error), lse_error=significant(lse_error))


def check(run: GpuRun, name: str, case: DeviceAttention, exact: AttentionState) -> tuple[float, float]:
    """Errors of a backend on these very inputs, see [`errors`].

    Raises:
        Skip: If one is over its budget; the backend is refused from here on.
    """
    with poisoned_outputs():
        error, lse_error = errors(case.state(run.backend(name), case.layers[0]), exact)
    if not (error <= run.budget and lse_error <= LSE_BUDGET):  # also true for NaN
        run.refused[name] = f"error {error:.1e} over {run.budget:.1e}, lse {lse_error:.1e}"
        where = f"{case.tree.num_nodes} nodes after {', '.join(map(str, case.lengths))}"
        raise Skip(f"not timed from here on: {run.refused[name]}, for {where}")
    return error, lse_error


def draw(run: GpuRun, lengths: tuple[int, ...], nodes: int, layers: int) -> DeviceAttention:
    """A random case, if there is memory for it."""
    shape = run.plan.shape
    numbers = 2 * len(lengths) * shape.kv_heads * (max(lengths) + nodes + 16) * shape.head_dim
    exact = 8 * (max(lengths) + nodes) * shape.heads * (4 * shape.head_dim + 4 * nodes)
    run.require(layers * numbers * run.dtype.itemsize + exact, "the case with its float64 reference")
    return random_attention(shape, lengths, nodes, layers, run.device, run.dtype)


def errors(state: AttentionState, exact: AttentionState) -> tuple[float, float]:
    """Relative L2 error of the output, largest relative error of the log-sum-exp; NaN stays NaN."""
    lse = exact[1]
    off = (state[1].double() - lse).abs() / lse.abs().clamp_min(1.0)
    return relative_error(state[0], exact[0]), off.max().item()


def kernels(run: GpuRun) -> None:
    """Times per layer at every point, with and without SpecAttn's score rows, against the time to read the bytes."""
    for case, exact, what in _cases(run):
        for name in run.usable:
            point = {"backend": name, **what}
            with run.attempt(**point):
                _time_backend(run, name, case, exact, point)


def baselines(run: GpuRun) -> None:
    """Every other way to compute the same attention at the points of the kernels."""
    for case, exact, what in _cases(run):
        for name, make in BASELINES.items():
            point = {"baseline": name, **what}
            with run.attempt(**point):
                attend = make(case)
                error = relative_error(attend(case.layers[0]), exact[0])
                if name != LOWER_BOUND and not error <= run.budget:
                    raise Skip(f"not timed: its error is {error:.1e}, over {run.budget:.1e}")
                timing = run.time(lambda attend=attend, layers=case.layers: [attend(layer) for layer in layers])
                run.write_timing("baseline", timing.scaled(len(case.layers)), _floor(run, what), **point, error=error)


def _cases(run: GpuRun) -> Iterator[tuple[DeviceAttention, AttentionState, dict[str, int]]]:
    """Random cases at the points of the plan, with the state in float64."""
    for batch, context in run.plan.points:
        for nodes in run.plan.nodes:
            what, entry = {"batch": batch, "context": context, "nodes": nodes}, None
            with run.attempt(**what):
                case = draw(run, (context,) * batch, nodes, run.plan.rotating)
                entry = case, case.exact(case.layers[0]), what
            if entry is not None:
                yield entry


def _floor(run: GpuRun, what: dict[str, Any]) -> float:
    """Least milliseconds of one layer."""
    return run.roofline(what["batch"], what["context"]).attention_ms(what["nodes"]) / run.plan.shape.layers


def _time_backend(run: GpuRun, name: str, case: DeviceAttention, exact: AttentionState, what: dict[str, Any]) -> None:
    error, _ = check(run, name, case, exact)
    backend, layers = run.backend(name), len(case.layers)
    last = torch.full((what["batch"],), what["nodes"] - 1, device=run.device)
    context = case.context()  # outside: made from host numbers, which a graph cannot copy

    def plain() -> None:
        for index, layer in enumerate(case.layers):
            case.attend(backend, layer, context, index)

    def scored() -> None:
        context.capture = ScoreCapture(last)
        plain()
        context.capture = None

    timing, with_scores = run.time(plain).scaled(layers), run.time(scored).scaled(layers)
    at, floor = run.roofline(what["batch"], what["context"]), _floor(run, what)
    read = at.kv_bytes_per_token / run.plan.shape.layers * what["batch"] * what["context"]
    run.write_timing("kernel", timing, floor, **what, error=error, tb_per_second=read / timing.median / 1e9)
    run.write_timing("score_rows", with_scores, floor, **what, overhead=with_scores.median / timing.median - 1)


def flash_only(case: DeviceAttention, layer: Layer) -> torch.Tensor:
    """Torch's fused attention to all slots without any mask."""
    return scaled_dot_product_attention(case.query, *case.written(layer), scale=case.scaling, enable_gqa=True)


def compiled_flex(case: DeviceAttention) -> Attend:
    """Torch's flex_attention under a block mask; compiled on a GPU, as it is meant to be used."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    length, mask, nodes = case.lengths[0], case.tree.mask[0], case.tree.num_nodes
    device = case.query.device
    if device.type == "cuda" and (nodes != FLEX_NODES or len(case.lengths) > 1):
        raise Skip(f"recompiled for every case: timed only for {FLEX_NODES} nodes and one row")

    def visible(batch: Any, head: Any, node: Any, slot: Any) -> Any:
        return (slot < length) | mask[node, (slot - length).clamp(0, nodes - 1)]

    blocks = create_block_mask(visible, None, None, nodes, length + nodes, device=str(device))
    function = torch.compile(flex_attention, dynamic=False) if device.type == "cuda" else flex_attention

    def attend(layer: Layer) -> torch.Tensor:
        keys, values = case.written(layer)
        out: Any = function(case.query, keys, values, block_mask=blocks, scale=case.scaling, enable_gqa=True)
        return out

    return attend


# Computes less than the others, and so is a bound instead of a competitor.
LOWER_BOUND = "flash, no mask (lower bound)"
BASELINES: dict[str, Callable[[DeviceAttention], Attend]] = {
    "transformers sdpa, repeated keys and mask": hf_attention,
    LOWER_BOUND: lambda case: partial(flash_only, case),
    "flex_attention": compiled_flex,
}
