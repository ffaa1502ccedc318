"""Whole forwards and whole iterations on a GPU, as they are and captured as CUDA graphs."""

import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, takewhile
from operator import eq
from typing import Any
from unittest import mock

import torch
from transformers import StaticCache

import hf_longspec
from benchmarks.gpu_goals import FUSED, GRAPH, OFF
from benchmarks.gpu_run import GpuRun, Plan, Timing
from benchmarks.harness import Skip
from benchmarks.random_inputs import HfForward, block_mask, dynamic_cache, random_tree
from hf_longspec.cli.measuring import HF, PLAIN, HfMethod, Measurement, changed, run_call
from hf_longspec.generation.compiled import cuda_graphs
from hf_longspec.generation.compiled.compiled_steps import runner_of
from hf_longspec.generation.target import TargetView

CALLS = 2  # timed calls of `generate` per row
WARM_UP_TOKENS, FEWEST_TOKENS = 16, 8  # tokens of the call before them, and of each of them at least
ROW_SECONDS = 4.0  # that the timed calls of a row may take together


@dataclass
class GraphCounts:
    """Captures and replays of CUDA graphs, and what was logged meanwhile."""

    captures: int = 0
    replays: int = 0
    warnings: list[str] = field(default_factory=list)

    def take(self) -> dict[str, Any]:
        """What has been added since the last call, which is forgotten."""
        counts = {"captures": self.captures, "replays": self.replays, "warnings": list(dict.fromkeys(self.warnings))}
        self.captures = self.replays = 0
        self.warnings.clear()
        return counts


@contextmanager
def counted_graphs() -> Iterator[GraphCounts]:
    """Count the captures of the package, and the replays of what is captured in this context."""
    counts, capture = GraphCounts(), cuda_graphs.capture

    def counting(*args: Any) -> tuple[Any, Callable[[], None]]:
        outputs, replay = capture(*args)
        counts.captures += 1

        def counted() -> None:
            counts.replays += 1
            replay()

        return outputs, counted

    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: counts.warnings.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(hf_longspec.__name__)
    logger.addHandler(handler)
    try:
        with mock.patch.object(cuda_graphs, "capture", counting):
            yield counts
    finally:
        logger.removeHandler(handler)


def require_replays(mode: str, counts: dict[str, Any]) -> None:
    if mode != OFF and not counts["replays"]:
        raise Skip(f"no graph was replayed: {'; '.join(counts['warnings']) or 'no step was captured'}")


def modes_of(run: GpuRun, method: Any, modes: Sequence[str]) -> Sequence[str]:
    """The modes in which steps of a method of this package can be run here."""
    return modes if run.is_cuda and "compile" in method.settings else (OFF,)


@torch.no_grad()
def forwards(run: GpuRun) -> None:
    """One forward over a tree after the first context: ours in every mode, and that of transformers."""
    context, nodes = run.plan.contexts[0], run.plan.nodes
    cache, model = run.cache(1, context, max(nodes)), run.model
    draft = hf_longspec.PlainDraftModel.from_target(model)
    trees = {count: random_tree(count, run.plan.shape.vocab, device=run.device) for count in nodes}
    with counted_graphs() as graphs:
        for mode in (FUSED, GRAPH, OFF) if run.is_cuda else (OFF,):
            for count, tree in trees.items():
                what = {"forward": "ours", "mode": mode, "context": context, "nodes": count}
                with run.attempt(**what), changed(draft, {"compile": mode}):  # graphs of another mode are not reused
                    graphs.take()
                    target = TargetView(model, runner_of(mode, model, draft, run.device))

                    def verify(target: TargetView = target, tree: Any = tree) -> None:
                        target.verify(tree, cache, fixed_shape=True)
                        cache.rollback()

                    with target.attention():
                        timing = run.time(verify, capture=False)
                    require_replays(mode, counts := graphs.take())
                    run.write_timing("forward", timing, run.roofline(1, context).verify_ms(count), **what, **counts)
    run.require(2 * cache.nbytes, "the cache of transformers and its copy in every step")
    stock = HfForward(model, cache)
    for count, tree in trees.items():
        what = {"forward": "transformers", "mode": "sdpa", "context": context, "nodes": count}
        with run.attempt(**what):
            mask = block_mask(tree, context)
            timing = run.time(lambda tree=tree, mask=mask: stock(tree, mask), capture=False)
            run.write_timing("forward", timing, run.roofline(1, context).verify_ms(count), **what)


def no_drafts(target: Any, plan: Plan) -> dict[str, Any]:
    """The loop without a draft, with which drafts are compared, and stock `generate`."""
    return {PLAIN: hf_longspec.PlainDraftModel.from_target(target), HF: HfMethod()}


def first_drafts(target: Any, plan: Plan) -> dict[str, Any]:
    """The above, LongSpec and SpecAttn; with random weights."""
    specattn = hf_longspec.SpecAttnDraftModel.from_target(target, num_assistant_tokens=plan.gamma)
    named = {f"SpecAttn, gamma {plan.gamma}": specattn}
    return {**no_drafts(target, plan), **_longspec(target, plan.trees[:1]), **named}


def other_drafts(target: Any, plan: Plan) -> dict[str, Any]:
    """No draft, further trees of LongSpec, TokenSwift and n-grams."""
    drafts = {PLAIN: hf_longspec.PlainDraftModel.from_target(target), **_longspec(target, plan.trees[1:])}
    for self_draft in ("verify_hidden", "partial_kv"):
        drafts[f"TokenSwift, {self_draft}"] = heads = hf_longspec.TokenSwiftDraftModel.from_target(target)
        heads.generation_config.update(self_draft=self_draft, tree_branching=list(plan.branching))
    return drafts | {"n-grams": hf_longspec.NgramDraftModel.from_target(target)}


def cheap_drafts(target: Any, plan: Plan) -> dict[str, Any]:
    """No draft, the smaller tree of LongSpec, and SpecAttn whose steps read weights of few bits."""
    drafts = {PLAIN: hf_longspec.PlainDraftModel.from_target(target), **_longspec(target, plan.trees[1:2])}
    for weights in plan.draft_weights:
        for selection, name in (("two_rows", "SpecAttn"), ("all", "SpecAttn, all entries")):
            settings = {"num_assistant_tokens": plan.gamma, "draft_weights": weights, "selection": selection}
            draft = hf_longspec.SpecAttnDraftModel.from_target(target, **settings)
            drafts[f"{name}, {weights}, gamma {plan.gamma}"] = draft
    return drafts


def _longspec(target: Any, trees: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    drafts = {}
    for widths in trees:
        drafts[f"LongSpec, {'+'.join(map(str, widths))}"] = draft = hf_longspec.LongSpecDraftModel.from_target(target)
        draft.generation_config.tree_widths = list(widths)
    return drafts


def iterations(
    run: GpuRun,
    make_drafts: Callable[[Any, Plan], dict[str, Any]],
    modes: Sequence[str],
    hf_modes: Sequence[str] = (),
    context: int | None = None,
) -> None:
    """Whole iterations through `generate`: drafting, verification, acceptance, commit and what is between.

    Random weights give no information about acceptance. Stock `generate` has two implementations of attention, and a
    cache of fixed size, with which transformers compiles its steps on a GPU: `hf_modes` names them.
    """
    context = context or run.plan.contexts[0]
    drafts = make_drafts(run.model, run.plan)
    with counted_graphs() as graphs:
        calls = GreedyCalls(run, context, drafts, graphs)
        for name, draft in drafts.items():
            for mode in hf_modes if isinstance(draft, HfMethod) else modes_of(run, draft, modes):
                what = {"draft": name, "mode": mode, "batch": 1, "context": context}
                with run.attempt(**what):
                    calls.time(draft, what)


def nodes_of(method: Any, model: Any) -> int:
    return 1 if isinstance(method, HfMethod) else method.num_tree_nodes(TargetView(model))


@contextmanager
def _running(model: Any, method: Any, mode: str) -> Iterator[None]:
    with ExitStack() as stack:
        if mode == "eager":
            stack.callback(model.set_attn_implementation, model.config._attn_implementation)
            model.set_attn_implementation("eager")
        if not isinstance(method, HfMethod) and "compile" in method.settings:
            stack.enter_context(changed(method, {"compile": mode}))
        yield


class GreedyCalls:
    """Greedy calls of several drafts after the same `context` random tokens, in one cache."""

    def __init__(self, run: GpuRun, context: int, drafts: dict[str, Any], graphs: GraphCounts):
        most = max(nodes_of(draft, run.model) for draft in drafts.values())
        self.run, self.context, self.graphs = run, context, graphs
        self.cache = run.cache(1, context, slots=most, room=run.plan.tokens + most + 1)
        self.stored = context - most  # tokens of it that drafts continue: the same for all
        self.plain: dict[str, list[int]] = {}  # text without a draft, which comes first, by mode

    def time(self, draft: Any, what: dict[str, Any]) -> None:
        """One row: calls of the same shapes, after one that compiles kernels and captures what later ones can reuse."""
        run, stock, mode = self.run, isinstance(draft, HfMethod), what["mode"]
        run.require_time()
        self.graphs.take()
        if stock:
            run.require(2 * self.cache.nbytes, "the cache of stock `generate` and its copy in every step")
        with _running(run.model, draft, mode):
            first, milliseconds, _ = self.generate(draft, WARM_UP_TOKENS, mode)
            per_token = statistics.median(milliseconds) * len(milliseconds) / first.tokens / 1e3
            affordable = int(min(ROW_SECONDS * run.plan.patience, run.left) / CALLS / per_token)
            if affordable < min(FEWEST_TOKENS, run.plan.tokens):
                raise Skip(f"a token takes {per_token:.1f} s and {run.left:.0f} s are left")
            if run.is_cuda:
                torch.cuda.reset_peak_memory_stats()
            calls = [self.generate(draft, min(affordable, run.plan.tokens), mode) for _ in range(CALLS)]
        counts = self.graphs.take()
        if not stock:
            require_replays(mode, counts)
        milliseconds = [ms for _, every, _ in calls for ms in every]
        text = calls[0][0].text[0].tolist()
        if what["draft"] == PLAIN:
            self.plain[mode] = text
        base = self.plain.get(mode) or next(iter(self.plain.values()), None)
        nodes = nodes_of(draft, run.model)
        values: dict[str, Any] = {
            "nodes": nodes,
            "backend": mode if stock else run.backend().name,
            "iterations": len(milliseconds),
            "speculated": sum(speculated for _, _, speculated in calls),
            "tau": sum(call.tokens for call, _, _ in calls) / sum(call.steps for call, _, _ in calls),
            "same_tokens": None if base is None else equal_first(text, base),
        }
        if isinstance(draft, hf_longspec.SpecAttnDraftModel):  # the floor of the whole iteration, in plain steps
            share = 1.0 if draft.setting("selection") == "all" else draft.setting("sparse_ratio")
            floor = run.roofline(1, self.context).specattn(run.plan.gamma, share, draft.setting("draft_weights"))
            values["floor_steps"] = floor.break_even_tau
        if run.is_cuda:
            values["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        floor_ms = run.roofline(1, self.context).verify_ms(nodes)
        run.write_timing("iteration", Timing(milliseconds, "wall"), floor_ms, **what, **values, **counts)

    def generate(self, draft: Any, tokens: int, mode: str) -> tuple[Measurement, list[float], int]:
        """One call.

        Returns:
            The call, milliseconds of its iterations but the first, in which buffers are made and graphs captured, and
            how many of them verified drafted tokens.
        """
        run, past, stock = self.run, self.cache, isinstance(draft, HfMethod)
        generator = torch.Generator().manual_seed(0)
        prompt = torch.randint(run.plan.shape.vocab, (1, self.context), generator=generator)
        self.cache.rollback()
        if stock:
            length = self.context + run.plan.tokens
            copy = StaticCache(run.model.config, length) if mode == "static cache" else None
            past = dynamic_cache(self.cache, self.context - 1, copy)
        else:
            self.cache.set_lengths([self.stored])
            draft.generation_config.gate = False  # speculation itself is measured
        arrivals: list[float] = []

        def arrived(_: int) -> None:
            arrivals.append(time.perf_counter())

        how: dict[str, Any] = {"tokens": min(tokens, run.plan.tokens), "cache": past, "on_arrival": arrived}
        call = run_call(run.model, draft, (prompt, torch.ones_like(prompt)), seed=0, **how)
        emitted, drafted = [1] * call.steps, [0] * call.steps
        if not stock:
            stats = draft.last_speculation
            (emitted,), (drafted,) = stats.emitted_per_step, stats.drafted_per_step
        if len(emitted) < 2:
            raise Skip("the call ended with its first iteration")
        return call, iteration_ms(arrivals, emitted)[1:], sum(count > 0 for count in drafted[1:])


def equal_first(text: Sequence[int], other: Sequence[int]) -> int:
    """Number of first tokens that two texts share.

    >>> equal_first([7, 8, 9], [7, 8, 1])
    2
    """
    return sum(1 for _ in takewhile(bool, map(eq, text, other)))


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
