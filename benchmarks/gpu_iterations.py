"""Whole iterations of the drafters, through `generate`: drafting, verification, acceptance, commit and what is between.

Random weights give no information about acceptance. The benchmark measures c, the time of a step without a draft over
that of an iteration. The product of c and the tau of a paper is the speed-up that this tau would give.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.floors import Iteration as DraftFloor
from benchmarks.floors import Roofline
from benchmarks.gpu_device import Skip, Timing
from benchmarks.gpu_forward import ForwardSections
from benchmarks.gpu_run import GpuRun
from hf_longspec.bench.calls import PLAIN
from hf_longspec.bench.summaries import summarize
from hf_longspec.generation.cache import SpeculativeCache
from hf_longspec.generation.target import TargetView

RUNS = 3
COMPILED_STEP = "hf_longspec.generation.compiled_steps"


@dataclass(frozen=True)
class TimedDraft:
    """A draft on the device.

    Args:
        draft (`DraftModel`): With random weights, or none.
        kind (`str`): "plain", "longspec", "specattn", "tokenswift" or "ngram".
        tau (`float`, *optional*): Tokens per iteration that its paper reports.
        source (`str`): Place in the paper that reports it.
    """

    draft: Any
    kind: str
    tau: float | None = None
    source: str = ""


class IterationSection:
    """Iterations of every draft.

    Args:
        run ([`GpuRun`]): The run.
        forwards ([`ForwardSections`]): Has the target and makes caches.
        make_drafts (`Callable`): Gives [`TimedDraft`]s by name for a target; one of them is `PLAIN`.
    """

    def __init__(self, run: GpuRun, forwards: ForwardSections, make_drafts: Any):
        self.run = run
        self.forwards = forwards
        self.make_drafts = make_drafts
        self._drafts: Mapping[str, TimedDraft] | None = None

    @property
    def drafts(self) -> Mapping[str, TimedDraft]:
        """Made when first needed."""
        if self._drafts is None:
            self._drafts = self.make_drafts(self.forwards.model, self.run.plan)
        return self._drafts

    def all(self, contexts: tuple[int, ...], batch: int = 1) -> None:
        """Every draft at every context, eager and, where this version can, compiled."""
        for context in contexts:
            what = {"batch": batch, "context": context}
            self.run.attempt(partial(self._context, **what), **what)

    def _context(self, batch: int, context: int) -> None:
        most = max(draft.draft.num_tree_nodes(TargetView(self.forwards.model)) for draft in self.drafts.values())
        cache = self.forwards.cache(batch, context, slots=most, room=self.run.plan.tokens + most + 1)
        for compiled in (False, True) if can_compile(self.run, self.drafts) else (False,):
            steps: dict[str, float] = {}  # of the loop without a draft, which is measured first
            for name, timed in self.drafts.items():
                what = {"draft": name, "compiled": compiled, "batch": batch, "context": context}
                self.run.attempt(partial(self._time, timed, cache, steps, what), **what)

    def _time(self, timed: TimedDraft, cache: SpeculativeCache, steps: dict[str, float], what: dict[str, Any]) -> None:
        draft = timed.draft
        with compiled_step(draft, what["compiled"]):
            started = self.run.guard.elapsed
            self.iterate(draft, cache, what["context"])  # warms up
            if (expected := RUNS * (self.run.guard.elapsed - started)) > self.run.left:
                raise Skip(f"it would take {expected:.0f} s and {self.run.left:.0f} s are left")
            milliseconds = [self.iterate(draft, cache, what["context"]) for _ in range(RUNS)]
        found = summarize(milliseconds)["median"]
        if what["draft"] == PLAIN:
            steps[PLAIN] = found
        c = steps[PLAIN] / found if PLAIN in steps else None
        at = self.run.roofline(what["batch"], what["context"])
        floor = iteration_floor(timed, at)
        values: dict[str, Any] = {"c": c, "tau_of_paper": timed.tau, "source": timed.source}
        if floor is not None:
            values["c_floor"] = floor.c
        if c is not None and timed.tau is not None:
            values["c_times_tau"] = c * timed.tau
        nodes = draft.num_tree_nodes(TargetView(self.forwards.model))
        floor_ms = at.ar_ms if timed.kind == "plain" else floor.iteration_ms if floor else at.verify_ms(nodes)
        self.run.write_timing("iteration", Timing(milliseconds, "wall"), floor_ms, **what, nodes=nodes, **values)

    def iterate(self, draft: Any, cache: SpeculativeCache, context: int) -> float:
        """Milliseconds per iteration of one call of `generate` after `context` random tokens."""
        model, plan = self.forwards.model, self.run.plan
        batch, nodes = cache.batch_size, draft.num_tree_nodes(TargetView(model))
        generator = torch.Generator().manual_seed(plan.prompt_seed)
        prompt = torch.randint(plan.shape.vocab, (batch, context), generator=generator).to(model.device)
        cache.rollback()
        cache.set_lengths([context - nodes] * batch)
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            assistant_model=draft,
            past_key_values=cache,
            max_new_tokens=plan.tokens + 1,
            do_sample=False,
        )
        stats = draft.last_speculation
        if not stats.num_forwards:
            raise Skip("the call ended without an iteration")
        return 1e3 * stats.decode_seconds / stats.num_forwards


def can_compile(run: GpuRun, drafts: Mapping[str, TimedDraft]) -> bool:
    """Whether this version has compiled steps; a line notes it if not."""
    if any("compile" in timed.draft.settings for timed in drafts.values()):
        return True
    missing = find_spec(COMPILED_STEP) is None
    run.results.skip(
        f"this version has no {COMPILED_STEP}" if missing else "no draft has a setting `compile`", compiled=True
    )
    return False


@contextmanager
def compiled_step(draft: Any, compiled: bool) -> Iterator[None]:
    """The draft with its step compiled or captured, or with its own forward.

    Raises:
        Skip: If the draft has no such setting.
    """
    if "compile" not in draft.settings:
        if compiled:
            raise Skip(f"{type(draft).__name__} has no setting `compile`")
        yield
        return
    if compiled and not torch.cuda.is_available():
        raise Skip("steps are captured as CUDA graphs, and there is no CUDA device")
    before = draft.setting("compile")
    draft.generation_config.compile = "graph" if compiled else "off"
    try:
        yield
    finally:
        draft.generation_config.compile = before


def iteration_floor(timed: TimedDraft, at: Roofline) -> DraftFloor | None:
    """The floor of a draft with its present settings, for kinds that have one."""
    setting = timed.draft.setting
    if timed.kind == "longspec":
        return at.longspec(list(setting("tree_widths")), timed.draft.config.window)
    if timed.kind == "specattn":
        prefix = max(at.context, 1)
        share = min(1.0, max(setting("sparse_ratio"), setting("sparse_min_tokens") / prefix))
        return at.specattn(setting("num_assistant_tokens"), share)
    if timed.kind == "tokenswift":
        budget = setting("partial_kv_budget") if setting("self_draft") == "partial_kv" else None
        return at.tokenswift(list(setting("tree_branching")), budget=budget)
    return None
