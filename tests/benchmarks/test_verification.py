"""Every cell of the benchmark is written, and only right results are timed."""

from benchmarks.random_inputs import Shape
from benchmarks.runner import Run
from benchmarks.verification import AttentionCase, measure
from hf_longspec.cli.files import read_records

SHAPE = Shape(layers=2, hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=16, vocab=50)


def test_benchmark_writes_every_cell_and_refuses_wrong_results(tmp_path, monkeypatch):
    def run(name):
        with Run(tmp_path / name, "verification", 60) as results:
            measure(results, SHAPE, 64, [1, 5], ["float32", "bfloat16"], repeats=2, bandwidth=10.0)
        return read_records(tmp_path / name)

    rows = [record for record in run("right.jsonl") if record["kind"] == "verification"]
    assert [(row["part"], row["dtype"], row["nodes"]) for row in rows] == [
        (part, dtype, nodes)
        for dtype in ("float32", "bfloat16")
        for part in ("attention", "forward")
        for nodes in (1, 5)
    ]
    assert all(row["ratio"]["count"] == 2 and row["floor_ms"] > 0 for row in rows)

    monkeypatch.setattr(AttentionCase, "check", lambda case: (float("nan"), 1.0, 0.0, {}))
    records = run("wrong.jsonl")
    assert not any(record.get("part") == "attention" for record in records if record["kind"] == "verification")
    assert sum("over the budget" in record.get("reason", "") for record in records) == 4
