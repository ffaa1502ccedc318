"""One recurrence is measured."""

from benchmarks import hybrid
from benchmarks.harness import Run
from hf_longspec.bench.results import read_records

SMALL = hybrid.SHAPE | {"vocab_size": 50, "hidden_size": 64, "intermediate_size": 96, "head_dim": 8}


def test_a_row_for_each_recurrence(tmp_path, monkeypatch):
    monkeypatch.setattr(hybrid, "SHAPE", SMALL)
    with Run(tmp_path / "hybrid.jsonl", "hybrid", 600, quiet=True) as results:
        hybrid.measure(results, {"qwen3_5_text": hybrid.MODELS["qwen3_5_text"]}, 70, repeats=2)
    (row,) = [record for record in read_records(tmp_path / "hybrid.jsonl") if record["kind"] == "hybrid"]
    assert row["recurrence"] == "gated delta rule"
    assert all(row[name]["count"] == 2 and row[name]["median"] > 0 for name in ("stock", "commit", "chain", "tree"))
