"""The gate's benchmark: every way runs as its name says, and the report has what was decided."""

import hf_longspec
from hf_longspec.bench.engine import PLAIN
from hf_longspec.bench.gated import GateBenchmark, gate_report
from hf_longspec.bench.results import ResultFile, read_records
from hf_longspec.bench.timing import TimeGuard
from hf_longspec.generation import decoding
from hf_longspec.generation.gating import gate_of


def test_ways_run_as_named(target, prompts, tmp_path, monkeypatch):
    monkeypatch.setattr(decoding, "gate_of", gate_of)
    methods = {
        PLAIN: hf_longspec.PlainDraftModel.from_target(target),
        "draft": hf_longspec.LongSpecDraftModel.from_target(target, tree_widths=[3, 2]),
    }
    benchmark = GateBenchmark(target, methods, prompts, tokens=30, repeats=2)
    with ResultFile(tmp_path / "gate.jsonl", "gate", gate_report, TimeGuard(1), {}) as results:
        benchmark.measure(40 - 10, results)
    rows = {row["method"]: row for row in read_records(tmp_path / "gate.jsonl") if row["kind"] == "gate"}
    assert list(rows) == [PLAIN, "draft, gated", "draft, ungated"]
    assert rows["draft, gated"]["plain_share"] > 0
    assert rows["draft, ungated"]["plain_share"] == rows[PLAIN]["plain_share"] == 0
    assert rows[PLAIN]["ratio_to_plain"]["median"] == 1.0
    assert rows["draft, ungated"]["decisions"] == []
    table = (tmp_path / "gate.md").read_text()
    assert all(f"| 30 | {name} |" in table for name in rows)
