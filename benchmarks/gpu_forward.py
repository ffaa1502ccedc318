"""Whole forwards of a random target: transformers, our verification eager and as a CUDA graph, batches, FP8, commit."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from benchmarks.gpu_run import GpuRun
from benchmarks.harness import Skip
from benchmarks.hf_side import HfForward
from benchmarks.random_inputs import LOGIT_BUDGET, cache_bytes, random_tree, relative_error
from hf_longspec.bench.report import significant
from hf_longspec.generation.cache import SpeculativeCache
from hf_longspec.generation.draft_tree import DraftTree
from hf_longspec.generation.target import TargetView

HF_NODES = 8  # nodes of a masked block of transformers
COMMITTED = 6  # nodes of an accepted path


@torch.no_grad()
def forwards(run: GpuRun) -> None:
    """Transformers' step and masked block, our verification of every number of nodes, and the commit."""
    nodes = sorted({*run.plan.nodes, HF_NODES})
    for context in run.plan.contexts:
        with run.attempt(context=context):
            cache, where = run.cache(1, context, max(nodes)), {"batch": 1, "context": context}
            logits: dict[int, torch.Tensor] = {}
            with run.attempt(side="transformers", **where):
                _transformers(run, cache, nodes, logits)
            for name in run.usable:
                for count in nodes:
                    what = {"backend": name, "nodes": count, **where}
                    with run.attempt(**what):
                        _ours(run, cache, logits.get(count), what)
            with run.attempt(side="commit", **where):
                _commit(run, cache)


def _transformers(run: GpuRun, cache: SpeculativeCache, nodes: list[int], logits: dict[int, torch.Tensor]) -> None:
    """Put transformers' logits for every number of nodes into `logits`; time its plain step and one block."""
    run.require(2 * cache.nbytes, "transformers' cache and its copy in every step")
    forward, context = HfForward(run.model, cache), cache.lengths.host[0]
    logits.update((count, forward(_tree(run, count))) for count in nodes)
    for count in (1, HF_NODES):
        what = {"side": "transformers", "nodes": count, "batch": 1, "context": context}
        with run.attempt(**what):
            floor = run.roofline(1, context).masked_verify_ms(count)
            _eager_and_captured(run, partial(forward, _tree(run, count)), floor, what)


def _ours(run: GpuRun, cache: SpeculativeCache, expected: torch.Tensor | None, what: dict[str, Any]) -> None:
    """Our verification, eager and captured, once its logits are those of transformers."""
    run.require_time()
    if expected is None:
        raise Skip("not timed: there are no logits of transformers to compare with")
    with running_on(run.model, what["backend"]):
        verify = _verification(run, cache, _tree(run, what["nodes"]))
        error, allowed = relative_error(verify(), expected.double()), LOGIT_BUDGET[run.dtype]
        if not error <= allowed:
            raise Skip(f"not timed: its logits are off by {error:.1e}, over {allowed:.1e}")
        floor = run.roofline(1, what["context"]).verify_ms(what["nodes"])
        _eager_and_captured(run, verify, floor, {"side": "ours", **what, "error": error})


def _eager_and_captured(run: GpuRun, step: Callable[[], object], floor_ms: float, what: dict[str, Any]) -> None:
    run.write_timing("forward", run.time(step, graph=False), floor_ms, mode="eager", **what)
    captured = run.time(step) if run.is_cuda else None
    if captured is None or captured.how != "graph":
        raise Skip("CUDA graphs need a CUDA device" if captured is None else str(captured.note))
    run.write_timing("forward", captured, floor_ms, mode="captured", **what)


def _verification(run: GpuRun, cache: SpeculativeCache, tree: DraftTree) -> Callable[[], torch.Tensor]:
    """One verification that leaves the cache as it was."""
    target = TargetView(run.model)

    def verify() -> torch.Tensor:
        logits = target.verify(tree, cache).logits
        cache.rollback()
        return logits

    return verify


def _commit(run: GpuRun, cache: SpeculativeCache) -> None:
    """Moving accepted nodes of every layer after the prefix."""
    moved = min(COMMITTED, cache.tree_slots)
    path = torch.arange(moved, device=run.device).mul(cache.tree_slots // moved)[None]

    def commit() -> None:
        for layer in cache.layers:
            layer.move(path)

    floor = 2 * cache_bytes(run.plan.shape, 1, moved, run.dtype) / run.roofline(1, 1).machine.tb_per_second / 1e9
    run.write_timing("commit", run.time(commit), floor, nodes=moved, context=cache.lengths.host[0])


def _tree(run: GpuRun, nodes: int, batch: int = 1) -> DraftTree:
    return random_tree(nodes, run.plan.shape.vocab, batch, run.device)


@contextmanager
def running_on(model: PreTrainedModel, backend: str) -> Iterator[None]:
    """The model under one attention backend, insisted on by name."""
    before = model.config._attn_implementation
    model.set_attn_implementation(backend)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@torch.no_grad()
def profile(run: GpuRun) -> None:
    """The operations of one step of transformers and of one of ours."""
    cache, tree = run.cache(1, run.plan.contexts[0], HF_NODES), _tree(run, HF_NODES)
    with run.attempt(side="transformers"):
        _profile(run, "transformers", partial(HfForward(run.model, cache), tree))
    for name in run.usable:
        with run.attempt(side="ours", backend=name), running_on(run.model, name):
            _profile(run, f"ours, {name}", _verification(run, cache, tree))


def _profile(run: GpuRun, side: str, step: Callable[[], object]) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if run.is_cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    step()
    with torch.profiler.profile(activities=activities) as profiler:
        step()
        if run.is_cuda:
            torch.cuda.synchronize()
    name = "self_device_time_total" if run.is_cuda else "self_cpu_time_total"
    found = sorted(profiler.key_averages(), key=lambda event: -getattr(event, name))
    top = [
        {"name": event.key[:80], "calls": event.count, "ms": significant(getattr(event, name) / 1e3)}
        for event in found[:12]
    ]
    launches = sum(event.count for event in found if event.key.startswith(("cudaLaunchKernel", "cuLaunchKernel")))
    total = significant(sum(getattr(event, name) for event in found) / 1e3)
    what = {"side": side, "nodes": HF_NODES, "context": run.plan.contexts[0]}
    run.write("profile", **what, ms=total, launches=launches, top=top)


@torch.no_grad()
def batches(run: GpuRun) -> None:
    """Our step and our verification at every batch size, as far as memory goes."""
    for batch in run.plan.batches:
        what = {"batch": batch, "context": run.plan.batch_context}
        with run.attempt(**what):
            _time_ours(run, "batch", **what)


FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
FP8_CAPABILITY = (8, 9)  # Ada and Hopper on


@torch.no_grad()
def quantised(run: GpuRun) -> None:
    """The same in FP8. The target stays so: nothing that needs its own weights may come later."""
    if run.is_cuda and torch.cuda.get_device_capability() < FP8_CAPABILITY:
        raise Skip(f"FP8 products need compute capability {FP8_CAPABILITY}")
    if run.dtype != torch.bfloat16:
        raise Skip(f"FP8 products give bfloat16, and the run has {run.dtype}")
    quantise(run.model)
    _time_ours(run, "fp8", 1, run.plan.contexts[0], weight_bytes=1)


def _time_ours(run: GpuRun, kind: str, batch: int, context: int, **floor: int) -> None:
    cache, at = run.cache(batch, context, max(run.plan.nodes)), run.roofline(batch, context, **floor)

    for count in run.plan.nodes:
        for name in run.usable:
            what = {"backend": name, "nodes": count, "batch": batch, "context": context}
            with run.attempt(**what), running_on(run.model, name):
                step = _verification(run, cache, _tree(run, count, batch))
                if not bool(torch.isfinite(step()).all()):
                    raise Skip("not timed: its logits are not finite")
                run.write_timing(kind, run.time(step), at.verify_ms(count), **what)


class Fp8Linear(nn.Module):
    """A linear layer without bias in FP8, with one scale per tensor, that of the input found in every call.

    Args:
        linear (`nn.Linear`): Its weights are rounded.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.scale = linear.weight.abs().max().float() / LARGEST
        self.weight = nn.Parameter((linear.weight / self.scale).to(FP8), requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`(..., in)` to `(..., out)` in the dtype of `hidden`."""
        rows = hidden.flatten(0, -2)
        scale = (rows.abs().max().float() / LARGEST).clamp_min(1e-12)
        rounded = (rows / scale).clamp(-LARGEST, LARGEST).to(FP8)
        out = torch._scaled_mm(rounded, self.weight.t(), scale_a=scale, scale_b=self.scale, out_dtype=hidden.dtype)
        return out.unflatten(0, hidden.shape[:-1])


def quantise(model: nn.Module) -> int:
    """Replace every linear layer, the language-model head included; returns how many there were."""
    replaced = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, Fp8Linear(child))
                replaced += 1
    return replaced
