"""Whole forwards of a random target: transformers, our verification in eager mode and as a CUDA graph, the commit."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache, LlamaForCausalLM

from ..generation.cache import SpeculativeCache
from ..generation.draft_tree import DraftTree
from ..generation.target import TargetView
from .gpu_device import Skip, Timing
from .gpu_inputs import cache_bytes, device_tree, full_cache, random_target
from .gpu_run import GpuRun
from .roofline_shapes import dense_shape
from .summaries import significant
from .verification_cases import LOGIT_BUDGET, relative_error

HF_NODES = 8  # a masked block of transformers, beside its plain step
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
        run, (batch, context) = self.run, (cache.batch_size, cache.host_lengths[0])
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
        """Moving accepted nodes of every layer behind the prefix."""
        run, before = self.run, cache.host_lengths
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
        """Which operations one step consists of, transformers' and ours."""
        context = self.run.plan.contexts[0]
        cache = self.cache(1, context, HF_NODES)
        tree, forward = self.tree(HF_NODES, 1), HfForward(self.model, cache)
        step = partial(self._profiled, "transformers", context, partial(forward, tree))
        self.run.attempt(step, side="transformers")
        for name in self.run.usable:
            self.run.attempt(partial(self._profile_ours, name, cache, tree), side="ours", backend=name)

    def _profile_ours(self, name: str, cache: SpeculativeCache, tree: DraftTree) -> None:
        with running_on(self.model, name):
            self._profiled(f"ours, {name}", cache.host_lengths[0], self.verification(cache, tree))

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
        self.prefix = cache.host_lengths[0]
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
