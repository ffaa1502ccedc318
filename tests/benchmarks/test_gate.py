"""The gate: every way to decode runs as it is named, and changes no text; the account of times."""

import pytest

import hf_longspec
from benchmarks.gate import GateBenchmark
from benchmarks.runner import Run
from hf_longspec.cli.files import read_records
from hf_longspec.cli.measuring import PLAIN

WAYS = [PLAIN, "useless, gated", "draft, gated", "draft, ungated"]


def test_ways_run_as_named(target, prompts, tmp_path):
    plain = hf_longspec.PlainDraftModel.from_target(target)
    useless = hf_longspec.LongSpecDraftModel.from_target(target, tree_widths=[3, 2])
    draft = hf_longspec.NgramDraftModel.from_target(target)
    ways = dict(zip(WAYS, ((plain, False), (useless, True), (draft, True), (draft, False)), strict=True))
    with Run(tmp_path / "gate.jsonl", "gate", 60) as results:
        GateBenchmark(target, ways, prompts, tokens=30, repeats=3).measure(30, results)
    rows = {row["method"]: row for row in read_records(tmp_path / "gate.jsonl") if row["kind"] == "gate"}
    assert list(rows) == WAYS
    assert all(row["same_texts"] == row["texts"] == 3 for row in rows.values())
    assert list(rows[PLAIN]["kinds"]) == ["plain"] and rows[PLAIN]["kinds"]["plain"]["steps"] == 30
    for row in rows.values():  # in steps of the plain loop, which takes 30
        cost = sum(kind["steps"] * kind["cost"] for kind in row["kinds"].values())
        assert row["accounted_over_plain"] == pytest.approx(cost / 30, rel=5e-3)
    assert rows[PLAIN]["time_over_plain"] == {"mean": 1.0, "low": 1.0, "high": 1.0, "count": 3}
    assert rows["useless, gated"]["kinds"]["plain"]["steps"] >= 4  # a call begins with them
    assert list(rows["draft, ungated"]["kinds"]) == ["speculation"] and not rows["draft, ungated"]["decisions"]
    assert rows["useless, gated"]["faster"] == PLAIN
    table = (tmp_path / "gate.md").read_text()
    assert all(f"| 30 | {name} |" in table for name in rows)
