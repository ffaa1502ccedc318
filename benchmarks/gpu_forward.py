"""Whole forwards of a random target: transformers, our verification eager and as a CUDA graph, batches, FP8, commit."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, LlamaForCausalLM

from benchmarks.floors import dense_shape
from benchmarks.gpu_device import Skip, Timing
from benchmarks.gpu_run import GpuRun
from benchmarks.random_inputs import LOGIT_BUDGET, cache_bytes, device_tree, full_cache, random_target, relative_error
from hf_longspec.bench.summaries import significant
from hf_longspec.generation.cache import SpeculativeCache
from hf_longspec.generation.draft_tree import DraftTree
from hf_longspec.generation.target import TargetView

HF_NODES = 8  # nodes of a masked block of transformers
COMMITTED = 6  # nodes of an accepted path


class ForwardSections:
    """The target in one step.

    Args:
        run ([`GpuRun`]): The run.
    """

    def __init__(self, run: GpuRun):
        self.run = run
        self._model: LlamaForCausalLM | None = None

    @property
    def model(self) -> LlamaForCausalLM:
        """The random target, drawn when it is first needed."""
        run, shape = self.run, self.run.plan.shape
        if self._model is None:
            weights = dense_shape("random target", **vars(shape)).stored_weights
            run.device.require(weights * run.dtype.itemsize, "the random target")
            run.progress.say("drawing the random target")
            most = run.plan.long_context + 256
            self._model = random_target(shape, most, run.device.device, run.dtype)
        return self._model

    def cache(self, batch: int, context: int, slots: int, room: int = 1) -> SpeculativeCache:
        """A full cache, if there is memory for it."""
        model, length = self.model, context + slots + room  # the weights come first
        self.run.device.require(cache_bytes(self.run.plan.shape, batch, length, self.run.dtype), "the cache")
        return full_cache(model, batch, context, room, slots)

    @torch.no_grad()
    def all(self, contexts: tuple[int, ...], batch: int = 1) -> None:
        """Every forward at every context."""
        nodes = sorted({*self.run.plan.nodes, HF_NODES})
        for context in contexts:
            what = {"batch": batch, "context": context}
            self.run.attempt(partial(self._context, nodes, **what), **what)

    def _context(self, nodes: list[int], batch: int, context: int) -> None:
        cache, run = self.cache(batch, context, max(nodes)), self.run
        where = {"batch": batch, "context": context}
        logits: dict[int, torch.Tensor] = {}
        run.attempt(partial(self.transformers, cache, nodes, logits), side="transformers", **where)
        for name in run.usable:
            for count in nodes:
                what = {"backend": name, "nodes": count, "batch": batch, "context": context}
                run.attempt(partial(self.ours, cache, logits.get(count), what), **what)
        run.attempt(partial(self.commit, cache), side="commit", **where)

    def transformers(self, cache: SpeculativeCache, nodes: list[int], logits: dict[int, torch.Tensor]) -> None:
        """Put transformers' logits for every number of nodes into `logits`; time its plain step and one block."""
        run, (batch, context) = self.run, (cache.batch_size, cache.lengths.host[0])
        run.device.require(2 * cache.nbytes, "transformers' cache and its copy in every step")
        forward = HfForward(self.model, cache)
        floors = run.roofline(batch, context)
        for count in (1, HF_NODES):
            what = {"side": "transformers", "nodes": count, "batch": batch, "context": context}
            step = partial(forward, self.tree(count, batch))
            run.attempt(partial(self._time, step, floors.masked_verify_ms(count), what), **what)
        logits.update((count, forward(self.tree(count, batch))) for count in nodes)

    def ours(self, cache: SpeculativeCache, expected: torch.Tensor | None, what: dict[str, Any]) -> None:
        """Our verification, eager and captured, once its logits are those of transformers."""
        run, name = self.run, what["backend"]
        if expected is None:
            raise Skip("not timed: there are no logits of transformers to compare with")
        tree, floor = self.tree(what["nodes"], what["batch"]), run.roofline(what["batch"], what["context"])
        with running_on(self.model, name):
            verify = self.verification(cache, tree)
            error, allowed = relative_error(verify(), expected.double()), LOGIT_BUDGET.get(run.dtype, 5e-2)
            if not error <= allowed:
                raise Skip(f"not timed: its logits are off by {error:.1e}, over {allowed:.1e}")
            self._time(verify, floor.verify_ms(what["nodes"]), {"side": "ours", **what, "error": error})

    def _time(self, step: Callable[[], object], floor_ms: float, what: dict[str, Any]) -> None:
        """Either side in eager mode, and replayed from a CUDA graph."""
        run = self.run
        run.write_timing("forward", run.time(step, graph=False), floor_ms, mode="eager", **what)
        replayed = run.time(run.device.capture(step), graph=False)
        run.write_timing("forward", Timing(replayed.milliseconds, "graph"), floor_ms, mode="captured", **what)

    def verification(self, cache: SpeculativeCache, tree: DraftTree) -> Callable[[], torch.Tensor]:
        """One verification that leaves the cache as it was."""
        target = TargetView(self.model)

        def verify() -> torch.Tensor:
            logits = target.verify(tree, cache).logits
            cache.rollback()
            return logits

        return verify

    def commit(self, cache: SpeculativeCache) -> None:
        """Moving accepted nodes of every layer after the prefix."""
        run, before = self.run, cache.lengths.host
        moved = min(COMMITTED, cache.tree_slots)
        path = torch.arange(moved, device=run.device.device).mul(cache.tree_slots // moved).expand(len(before), -1)

        def commit() -> None:
            for layer in cache.layers:
                layer.move(path)

        numbers = cache_bytes(run.plan.shape, len(before), moved, run.dtype)
        floor = 2 * numbers / run.roofline(1, 1).machine.tb_per_second / 1e9
        run.write_timing("commit", run.time(commit), floor, nodes=moved, context=before[0])

    def tree(self, nodes: int, batch: int) -> DraftTree:
        """A random tree; its mask is made before anything is timed."""
        tree = device_tree(nodes, self.run.plan.shape.vocab, batch, self.run.device.device)
        assert tree.mask.shape[-1] == tree.depths.shape[-1]
        return tree

    @torch.no_grad()
    def profile(self) -> None:
        """The operations of one step of transformers and of one of ours."""
        context = self.run.plan.contexts[0]
        cache = self.cache(1, context, HF_NODES)
        tree, forward = self.tree(HF_NODES, 1), HfForward(self.model, cache)
        step = partial(self._profiled, "transformers", context, partial(forward, tree))
        self.run.attempt(step, side="transformers")
        for name in self.run.usable:
            self.run.attempt(partial(self._profile_ours, name, cache, tree), side="ours", backend=name)

    def _profile_ours(self, name: str, cache: SpeculativeCache, tree: DraftTree) -> None:
        with running_on(self.model, name):
            self._profiled(f"ours, {name}", cache.lengths.host[0], self.verification(cache, tree))

    def _profiled(self, side: str, context: int, step: Callable[[], object]) -> None:
        cuda, activities = self.run.device.is_cuda, [torch.profiler.ProfilerActivity.CPU]
        if cuda:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        step()
        self.run.device.synchronize()
        with torch.profiler.profile(activities=activities) as profiler:
            step()
            self.run.device.synchronize()
        name = "self_device_time_total" if cuda else "self_cpu_time_total"
        found = sorted(profiler.key_averages(), key=lambda event: -getattr(event, name))
        top = [
            {"name": event.key[:80], "calls": event.count, "ms": significant(getattr(event, name) / 1e3)}
            for event in found[:12]
        ]
        launches = sum(event.count for event in found if event.key.startswith(("cudaLaunchKernel", "cuLaunchKernel")))
        total = significant(sum(getattr(event, name) for event in found) / 1e3)
        self.run.results.write(
            "profile", side=side, nodes=HF_NODES, context=context, ms=total, launches=launches, top=top
        )


class HfForward:
    """Transformers' forward of a tree on a `DynamicCache` with the same keys and values, which it forgets again.

    Args:
        model (`LlamaForCausalLM`): Under `sdpa`.
        cache ([`SpeculativeCache`]): Holds the prefix.
    """

    def __init__(self, model: LlamaForCausalLM, cache: SpeculativeCache):
        self.model = model
        self.prefix = cache.lengths.host[0]
        self.past = DynamicCache()
        for index, layer in enumerate(cache.layers):
            self.past.update(layer.keys[:, :, : self.prefix], layer.values[:, :, : self.prefix], index)
        self._stored = [(layer.keys, layer.values) for layer in self.past.layers]

    @torch.no_grad()
    def __call__(self, tree: DraftTree) -> torch.Tensor:
        """Logits of the nodes, `(B, N, vocab)`."""
        mask = None
        if tree.num_nodes > 1:
            batch, nodes = tree.tokens.shape
            seen = torch.ones(batch, nodes, self.prefix, dtype=torch.bool, device=tree.tokens.device)
            mask = torch.cat([seen, tree.mask], dim=2)[:, None]
        positions = self.prefix + tree.depths
        logits: torch.Tensor = self.model(
            input_ids=tree.tokens, position_ids=positions, past_key_values=self.past, attention_mask=mask
        ).logits
        for layer, (keys, values) in zip(self.past.layers, self._stored, strict=True):
            layer.keys, layer.values = keys, values  # the step appended to a copy of them
        return logits


@contextmanager
def running_on(model: LlamaForCausalLM, backend: str) -> Iterator[None]:
    """The model under one attention backend, insisted on by name."""
    before = model.config._attn_implementation
    model.set_attn_implementation(backend)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
FP8_CAPABILITY = (8, 9)  # Ada and Hopper on


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


class VariantSections:
    """Batches and FP8.

    Args:
        run ([`GpuRun`]): The run.
        forwards ([`ForwardSections`]): Has the target and makes caches.
    """

    def __init__(self, run: GpuRun, forwards: ForwardSections):
        self.run = run
        self.forwards = forwards

    @torch.no_grad()
    def batches(self) -> None:
        """Our step and our verification at every batch size, as far as memory goes."""
        plan = self.run.plan
        for batch in plan.batches:
            what = {"batch": batch, "context": plan.batch_context}
            self.run.attempt(partial(self._time, "batch", plan.nodes, **what), **what)

    @torch.no_grad()
    def quantised(self) -> None:
        """The same in FP8. The target stays so: nothing that needs its own weights may come later."""
        run, context = self.run, self.run.plan.contexts[0]
        if run.device.is_cuda and torch.cuda.get_device_capability() < FP8_CAPABILITY:
            raise Skip(f"FP8 products need compute capability {FP8_CAPABILITY}")
        if run.dtype != torch.bfloat16:
            raise Skip(f"FP8 products give bfloat16, and the run has {run.dtype}")
        quantise(self.forwards.model)
        self._time("fp8", run.plan.nodes, 1, context, weight_bytes=1)

    def _time(self, kind: str, nodes: tuple[int, ...], batch: int, context: int, **floor: int) -> None:
        cache = self.forwards.cache(batch, context, max(nodes))
        at = self.run.roofline(batch, context, **floor)
        for count in nodes:
            for name in self.run.usable:
                what = {"backend": name, "nodes": count, "batch": batch, "context": context}
                self.run.attempt(partial(self._verify, kind, cache, at.verify_ms(count), what), **what)

    def _verify(self, kind: str, cache: SpeculativeCache, floor_ms: float, what: dict[str, Any]) -> None:
        with running_on(self.forwards.model, what["backend"]):
            verify = self.forwards.verification(cache, self.forwards.tree(what["nodes"], what["batch"]))
            if not bool(torch.isfinite(verify()).all()):
                raise Skip("not timed: its logits are not finite")
            self.run.write_timing(kind, self.run.time(verify), floor_ms, **what)
