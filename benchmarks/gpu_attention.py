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
from hf_longspec.attention_backends.merge import AttentionState, merge_attention_states
from hf_longspec.attention_backends.scores import ScoreCapture
from hf_longspec.attention_backends.torch_backend import tree_attention
from hf_longspec.attention_backends.torch_fused import one_head, pack, unpack
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
                        _check(run, name, rows, nodes, what)


def _check(run: GpuRun, name: str, lengths: tuple[int, ...], nodes: int, what: dict[str, Any]) -> None:
    case = draw(run, lengths, nodes, layers=1)
    with poisoned_outputs():
        found = case.state(run.backend(name), case.layers[0])
    error, lse_error = errors(found, case.exact(case.layers[0]))
    right = error <= run.budget and lse_error <= LSE_BUDGET  # false for NaN
    numbers = {"error": _number(error), "lse_error": _number(lse_error)}
    run.write("correctness", **what, **numbers, budget=run.budget, right=right)
    if not right:
        where = f"{nodes} nodes after {', '.join(map(str, lengths))}"
        run.refuse(name, f"{where}: error {error:.1e} over {run.budget:.1e}, lse {lse_error:.1e}")


def draw(run: GpuRun, lengths: tuple[int, ...], nodes: int, layers: int) -> DeviceAttention:
    """A random case, if there is memory for it."""
    shape = run.plan.shape
    numbers = 2 * len(lengths) * shape.kv_heads * (max(lengths) + nodes + 16) * shape.head_dim
    exact = 8 * (max(lengths) + nodes) * shape.heads * (4 * shape.head_dim + 4 * nodes)
    run.require(layers * numbers * run.dtype.itemsize + exact, "the case with its float64 reference")
    return random_attention(shape, lengths, nodes, layers, run.device, run.dtype)


def errors(found: AttentionState, exact: AttentionState) -> tuple[float, float]:
    """Relative L2 error of the output, largest relative error of the log-sum-exp; NaN stays NaN."""
    lse = exact[1]
    off = (found[1].double() - lse).abs() / lse.abs().clamp_min(1.0)
    return relative_error(found[0], exact[0]), off.max().item()


def _number(value: float) -> float | str:
    """For JSON, which has no NaN."""
    return significant(value) if value == value and value != float("inf") else str(value)


def kernels(run: GpuRun) -> None:
    """Times per layer at every point, with and without SpecAttn's score rows, against the time to read the bytes."""
    for case, exact, what in _cases(run):
        for name in run.usable:
            named = {"backend": name, **what}
            with run.attempt(**named):
                _time_backend(run, name, case, exact, named)


def baselines(run: GpuRun) -> None:
    """Every other way to compute the same attention at the points of the kernels."""
    missing: set[str] = set()
    for case, exact, what in _cases(run):
        for name, make in BASELINES.items():
            named = {"baseline": name, **what}
            if name not in missing:
                with run.attempt(**named):
                    try:
                        attend = make(case)
                    except ImportError as error:  # reported once
                        missing.add(name)
                        raise Skip(f"{error.name or error} is not installed") from error
                    _time_baseline(run, attend, case, exact[0], named)


def _cases(run: GpuRun) -> Iterator[tuple[DeviceAttention, AttentionState, dict[str, int]]]:
    """Random cases at the points of the plan, with the state in float64."""
    for batch, context in run.plan.points:
        for nodes in run.plan.nodes:
            what, found = {"batch": batch, "context": context, "nodes": nodes}, None
            with run.attempt(**what):
                case = draw(run, (context,) * batch, nodes, run.plan.rotating)
                found = case, case.exact(case.layers[0]), what
            if found is not None:
                yield found


def _time_backend(run: GpuRun, name: str, case: DeviceAttention, exact: AttentionState, what: dict[str, Any]) -> None:
    """One backend on one case, checked on these very inputs before it is timed."""
    backend, layers = run.backend(name), len(case.layers)
    error, _ = errors(case.state(backend, case.layers[0]), exact)
    if not error <= run.budget:
        raise Skip(f"not timed: its error is {error:.1e}, over {run.budget:.1e}")
    at = run.roofline(what["batch"], what["context"])
    floor = at.attention_ms(what["nodes"]) / run.plan.shape.layers
    last = torch.full((what["batch"],), what["nodes"] - 1, device=run.device)
    context = case.context()  # outside: made from host numbers, which a graph cannot copy

    def plain() -> None:
        for index, layer in enumerate(case.layers):
            case.attend(backend, layer, context, index)

    def scored() -> None:
        context.capture = ScoreCapture(last)
        plain()
        context.capture = None

    timing = run.time(plain).scaled(layers)
    read = at.kv_bytes_per_token / run.plan.shape.layers * what["batch"] * what["context"]
    run.write_timing("kernel", timing, floor, **what, error=error, tb_per_second=read / timing.median / 1e9)
    with_scores = run.time(scored).scaled(layers)
    run.write_timing("score_rows", with_scores, floor, **what, overhead=with_scores.median / timing.median - 1)


def _time_baseline(
    run: GpuRun, attend: Attend, case: DeviceAttention, exact: torch.Tensor, what: dict[str, Any]
) -> None:
    error = relative_error(attend(case.layers[0]), exact)
    if what["baseline"] != LOWER_BOUND and not error <= run.budget:
        raise Skip(f"not timed: its error is {error:.1e}, over {run.budget:.1e}")

    def through_all() -> None:
        for layer in case.layers:
            attend(layer)

    floor = run.roofline(what["batch"], what["context"]).attention_ms(what["nodes"]) / run.plan.shape.layers
    run.write_timing("baseline", run.time(through_all).scaled(len(case.layers)), floor, **what, error=error)


def flash_and_tree(case: DeviceAttention, layer: Layer) -> torch.Tensor:
    """Torch's flash kernel on the prefix, plain products on the tree, merged."""
    prefix = flash(case.query, *case.prefix(layer), case.scaling)
    return merge_attention_states([prefix, _tree(case, layer)])[0]


def packed_flash_and_tree(case: DeviceAttention, layer: Layer) -> torch.Tensor:
    """The same with the query heads of a group packed into rows, so that keys are read once for all of them."""
    keys, values = (one_head(part, 0, case.lengths[0]) for part in layer)
    packed = flash(pack(case.query, layer[0].shape[1]), keys, values, case.scaling)
    return merge_attention_states([unpack(packed, case.query.shape), _tree(case, layer)])[0]


def flash_only(case: DeviceAttention, layer: Layer) -> torch.Tensor:
    """Torch's fused attention to all slots without any mask."""
    return scaled_dot_product_attention(case.query, *case.written(layer), scale=case.scaling, enable_gqa=True)


def compiled_flex(case: DeviceAttention) -> Attend:
    """Torch's flex_attention under a block mask; compiled on a GPU, as it is meant to be used."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    length, mask, nodes = case.lengths[0], case.tree.mask[0], case.tree.num_nodes
    device = case.query.device
    if device.type == "cuda" and (nodes != FLEX_NODES or len(case.lengths) > 1):
        raise Skip(f"compiled anew for every case, which takes long: timed for {FLEX_NODES} nodes and one row")

    def visible(batch: Any, head: Any, node: Any, slot: Any) -> Any:
        return (slot < length) | mask[node, (slot - length).clamp(0, nodes - 1)]

    blocks = create_block_mask(visible, None, None, nodes, length + nodes, device=str(device))
    function = torch.compile(flex_attention, dynamic=False) if device.type == "cuda" else flex_attention

    def attend(layer: Layer) -> torch.Tensor:
        keys, values = case.written(layer)
        out: Any = function(case.query, keys, values, block_mask=blocks, scale=case.scaling, enable_gqa=True)
        return out

    return attend


def flashinfer_masked(case: DeviceAttention) -> Attend:
    """FlashInfer's prefill kernel with a custom mask; it takes one row at a time."""
    import flashinfer

    if len(case.lengths) > 1:
        raise Skip("flashinfer's custom mask is for a single row")
    nodes = case.tree.num_nodes
    seen = torch.ones(nodes, case.lengths[0], dtype=torch.bool, device=case.query.device)
    mask = torch.cat([seen, case.tree.mask[0]], dim=1).contiguous()
    query = case.query[0].transpose(0, 1).contiguous()

    def attend(layer: Layer) -> torch.Tensor:
        keys, values = (part[0] for part in case.written(layer))
        out = flashinfer.single_prefill_with_kv_cache(
            query, keys, values, custom_mask=mask, kv_layout="HND", sm_scale=case.scaling
        )
        found: torch.Tensor = out.transpose(0, 1)[None]
        return found

    return attend


def xformers_tree(case: DeviceAttention) -> Attend:
    """xformers' tree attention: the same split into prefix and tree, with its own kernels."""
    from xformers.ops.fmha.attn_bias import BlockDiagonalPaddedKeysMask
    from xformers.ops.tree_attention import tree_attention as xformers_attention

    nodes, kv_heads = case.tree.num_nodes, case.layers[0][0].shape[1]
    own = torch.zeros(nodes, nodes, device=case.query.device, dtype=case.query.dtype)
    own.masked_fill_(~case.tree.mask[0], -torch.inf)
    batch, heads = case.query.shape[:2]
    sizes = {"q_seqlen": [nodes] * batch, "kv_seqlen": list(case.lengths)}
    before = BlockDiagonalPaddedKeysMask.from_seqlens(**sizes, kv_padding=case.lengths[0])
    query = case.query.transpose(1, 2).unflatten(2, (kv_heads, heads // kv_heads))

    def heads_last(part: torch.Tensor) -> torch.Tensor:
        return part.transpose(1, 2)[:, :, :, None].expand(-1, -1, -1, heads // kv_heads, -1)

    def attend(layer: Layer) -> torch.Tensor:
        cached, staged = case.prefix(layer), case.staged(layer)
        out = xformers_attention(query, *map(heads_last, staged), *map(heads_last, cached), own, before)
        found: torch.Tensor = out.flatten(2, 3).transpose(1, 2)
        return found

    return attend


# Computes less than the others, and so is a bound instead of a competitor.
LOWER_BOUND = "flash, no mask (lower bound)"
BASELINES: dict[str, Callable[[DeviceAttention], Attend]] = {
    "transformers sdpa, repeated keys and mask": hf_attention,
    "torch flash + tree": lambda case: partial(flash_and_tree, case),
    "torch flash, packed + tree": lambda case: partial(packed_flash_and_tree, case),
    LOWER_BOUND: lambda case: partial(flash_only, case),
    "flex_attention": compiled_flex,
    "flashinfer": flashinfer_masked,
    "xformers tree attention": xformers_tree,
}


def flash(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> AttentionState:
    """Torch's flash kernel over all keys, `(B, H, N, D)` and `(B, K, S, D)`, with its log-sum-exp."""
    if query.device.type == "cpu":
        state: AttentionState = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, 0.0, False, scale=scaling
        )
        return state
    inputs = (part.transpose(1, 2) for part in (query, keys, values))
    lengths = query.shape[2], keys.shape[2]
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *inputs, None, None, *lengths, 0.0, False, False, scale=scaling
    )
    return out.transpose(1, 2), lse


def _tree(case: DeviceAttention, layer: Layer) -> AttentionState:
    return tree_attention(case.query, *case.staged(layer), case.tree.mask, scaling=case.scaling)
