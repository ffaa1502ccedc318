"""The gate: every way to decode runs as it is named, in turns that change no text; the report has the decisions."""

from itertools import count

import pytest
import torch

import hf_longspec
from benchmarks.gate import (
    CATCH_UP,
    PLAIN_STEP,
    SPECULATION,
    TURN,
    GateBenchmark,
    SteppedRun,
    TimedStep,
    accounted,
    interleave,
)
from benchmarks.harness import Run
from hf_longspec.bench.calls import MODES, PLAIN
from hf_longspec.bench.results import read_records
from tests.gates import FlippingGate

WAYS = [PLAIN, "useless, gated", "draft, gated", "draft, ungated"]


def measured(target, prompts, folder):
    plain = hf_longspec.PlainDraftModel.from_target(target)
    useless = hf_longspec.LongSpecDraftModel.from_target(target, tree_widths=[3, 2])
    draft = hf_longspec.NgramDraftModel.from_target(target)
    ways = dict(zip(WAYS, ((plain, False), (useless, True), (draft, True), (draft, False)), strict=True))
    with Run(folder / "gate.jsonl", "gate", 60) as results:
        GateBenchmark(target, ways, prompts, tokens=30, repeats=3).measure(30, results)
    return {row["method"]: row for row in read_records(folder / "gate.jsonl") if row["kind"] == "gate"}


def test_ways_run_as_named(target, prompts, tmp_path):
    rows = measured(target, prompts, tmp_path)
    assert list(rows) == WAYS
    assert all(row["same_texts"] == row["texts"] == 3 for row in rows.values())
    assert list(rows[PLAIN]["kinds"]) == ["plain"] and rows[PLAIN]["kinds"]["plain"]["steps"] == 30
    assert rows[PLAIN]["time_over_plain"] == {"mean": 1.0, "low": 1.0, "high": 1.0, "count": 3}
    assert rows["useless, gated"]["kinds"]["plain"]["steps"] >= 4  # a call begins with them
    assert list(rows["draft, ungated"]["kinds"]) == ["speculation"] and not rows["draft, ungated"]["decisions"]
    assert rows["useless, gated"]["faster"] == PLAIN
    table = (tmp_path / "gate.md").read_text()
    assert all(f"| 30 | {name} |" in table for name in rows)


TOKENS, CONTEXT = 2 * TURN + 7, 31


@pytest.fixture
def flipping(monkeypatch):
    """Gates of LongSpec drafts open and shut at random; the plain loop has none."""
    monkeypatch.setattr("hf_longspec.generation.gate.gate_of", lambda wanted, *_: FlippingGate() if wanted else None)


def runs_of(target, prompts, mode, row=1):
    longspec = hf_longspec.LongSpecDraftModel.from_target(target, tree_widths=[3, 2])
    ways = {"plain": (hf_longspec.PlainDraftModel.from_target(target), False), "draft": (longspec, True)}
    runs = {}
    for name, (draft, gated) in ways.items():
        draft.generation_config.gate = gated
        runs[name] = SteppedRun(target, draft, prompts, row, CONTEXT, mode=mode, seed=5, tokens=TOKENS)
    return runs


@pytest.mark.parametrize("mode", ["greedy", "sample"])
def test_texts_are_those_of_generate(target, prompts, flipping, mode):
    """Times of one call of `generate` with the whole prompt, which shares no cache with the others."""
    runs = runs_of(target, prompts, mode)
    interleave(runs, TOKENS)
    torch.manual_seed(5)
    prompt = prompts.tokens[1:2, :CONTEXT]
    draft = hf_longspec.PlainDraftModel.from_target(target)
    whole = target.generate(prompt, assistant_model=draft, max_new_tokens=TOKENS + 1, **MODES[mode].options())
    assert runs["plain"].text == runs["draft"].text == whole[0, CONTEXT:].tolist()
    assert target.config._attn_implementation == "sdpa"


def test_every_step_is_timed_and_named(target, prompts, flipping):
    runs = runs_of(target, prompts, "greedy")
    order = []
    for name, run in runs.items():
        advance = run.advance
        run.advance = lambda *a, name=name, advance=advance: order.append(name) or advance(*a)
    ticks = count()
    interleave(runs, TOKENS, clocks=(lambda: 2.0 * next(ticks), lambda: 0.0))
    assert order == ["plain", "draft", "draft", "plain", "plain", "draft"]
    plain, draft = runs["plain"], runs["draft"]
    assert [step.turn for step in plain.steps] == [0] * TURN + [1] * TURN + [2] * 7
    assert {(step.kind, step.seconds, step.cpu_seconds) for step in plain.steps} == {(PLAIN_STEP, 2.0, 0.0)}
    kinds = [step.kind for step in draft.steps]
    stats = draft.session.stats
    assert kinds.count(SPECULATION) == stats.num_spec_steps > 0
    assert kinds.count(PLAIN_STEP) + kinds.count(CATCH_UP) == stats.num_plain_steps > 0
    # speculation after a pause begins with one step that the drafter observes
    first = [index for index, kind in enumerate(kinds) if kind == SPECULATION and kinds[index - 1] != SPECULATION]
    assert all(kinds[index - 1] == CATCH_UP for index in first if index)
    assert CATCH_UP in kinds


def steps(turn, *seconds, kind=PLAIN_STEP):
    return [TimedStep(turn, kind, time, 0.0) for time in seconds]


def test_the_account_follows_the_machine_and_leaves_out_disturbances():
    """In the second turn everything takes ten times as long, and one step of each run is disturbed."""
    base = steps(0, 1.0, 1.0, 1.0, 50.0) + steps(1, 10.0, 10.0, 10.0, 10.0)
    run = steps(0, 1.1, 1.1) + steps(0, 3.0, kind=SPECULATION)
    run += steps(1, 11.0, 99.0, 11.0) + steps(1, 30.0, kind=SPECULATION)
    ratio, kinds = accounted([run], [base])
    assert kinds == {
        PLAIN_STEP: {"steps": 5, "cost": pytest.approx(1.1)},
        SPECULATION: {"steps": 2, "cost": pytest.approx(3.0)},
    }
    assert ratio == pytest.approx((5 * 1.1 + 2 * 3.0) / 8)
    assert accounted([base, base], [base, base])[0] == pytest.approx(1.0)
