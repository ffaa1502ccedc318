"""The gate's benchmark: every way runs as its name says, and the report has what was decided."""

import pytest

import hf_longspec
from benchmarks import gate
from benchmarks.gate import GateBenchmark
from benchmarks.harness import Run
from hf_longspec.bench.calls import PLAIN
from hf_longspec.bench.results import read_records
from hf_longspec.generation.gate import gate_of

WAYS = [PLAIN, "useless, gated", "draft, gated", "draft, ungated"]


def measured(target, prompts, folder, **how):
    methods = {
        PLAIN: hf_longspec.PlainDraftModel.from_target(target),
        "useless": hf_longspec.LongSpecDraftModel.from_target(target, tree_widths=[3, 2]),
        "draft": hf_longspec.NgramDraftModel.from_target(target),
    }
    benchmark = GateBenchmark(
        target, methods, prompts, tokens=30, repeats=3, mode="greedy", gated_only=["useless"], **how
    )
    with Run(folder / "gate.jsonl", "gate", 60) as results:
        benchmark.measure(30, results)
    return {row["method"]: row for row in read_records(folder / "gate.jsonl") if row["kind"] == "gate"}


def test_ways_run_as_named(target, prompts, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_longspec.generation.gate.gate_of", gate_of)
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


def test_a_gated_way_is_compared_with_the_faster_one(target, prompts, tmp_path, monkeypatch):
    """Seconds that are made up: per text, the ways take 4, 6, 5 and 3."""
    times = dict(zip(WAYS, (4.0, 6.0, 5.0, 3.0), strict=True))
    named = []

    def seconds(steps):
        named.append(len(steps))
        return times[WAYS[(len(named) - 1) // 3]]

    monkeypatch.setattr(gate, "_seconds", seconds)
    rows = measured(target, prompts, tmp_path)
    assert [rows[name]["faster"] for name in WAYS] == [PLAIN, PLAIN, "draft, ungated", PLAIN]
    assert [rows[name]["time_over_faster"]["mean"] for name in WAYS] == pytest.approx([1, 1.5, 5 / 3, 0.75], rel=1e-3)
    assert rows["draft, gated"]["tokens_per_second"] == 30 / 5
    table = (tmp_path / "gate.md").read_text()
    assert "| +25.0% ± 0.0% |" in table and "+66.7% ± 0.0% over draft, ungated" in table


def test_a_gate_that_chooses_is_compared_with_the_fastest_tree(target, prompts):
    methods = {name: hf_longspec.NgramDraftModel.from_target(target) for name in ("small", "large", "choosing")}
    methods[PLAIN] = hf_longspec.PlainDraftModel.from_target(target)
    benchmark = GateBenchmark(
        target,
        methods,
        prompts,
        tokens=30,
        repeats=3,
        mode="greedy",
        gated_only=["choosing"],
        ungated_only=["large"],
        choices={"choosing": ["small", "large"]},
    )
    assert list(benchmark.ways) == [PLAIN, "small, gated", "small, ungated", "large, ungated", "choosing, gated"]
    wall = dict(zip(benchmark.ways, ([4.0], [3.0], [2.0], [1.0], [5.0]), strict=True))
    assert benchmark._faster_without_gate("choosing, gated", wall) == "large, ungated"
    assert benchmark._faster_without_gate("small, gated", wall) == "small, ungated"
    wall[PLAIN] = [0.5]
    assert benchmark._faster_without_gate("choosing, gated", wall) == PLAIN
