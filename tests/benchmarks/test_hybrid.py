"""Every kind of recurrence is measured, and the caches of both sides hold the same text."""

import torch

from benchmarks import hybrid
from benchmarks.runner import Run
from hf_longspec.cli.files import read_records
from hf_longspec.generation.cache import CACHE_NAME

SMALL = hybrid.SHAPE | {"vocab_size": 50, "hidden_size": 64, "intermediate_size": 96, "head_dim": 8}


def test_a_row_for_each_recurrence(tmp_path, monkeypatch):
    monkeypatch.setattr(hybrid, "SHAPE", SMALL)
    with Run(tmp_path / "hybrid.jsonl", "hybrid", 600, quiet=True) as results:
        hybrid.measure(results, {"qwen3_5_text": hybrid.SUITE["models"]["qwen3_5_text"]}, 70, repeats=2)
    (row,) = [record for record in read_records(tmp_path / "hybrid.jsonl") if record["kind"] == "hybrid"]
    assert row["recurrence"] == "gated delta rule"
    assert all(row[name]["count"] == 2 and row[name]["median"] > 0 for name in ("stock", "commit", "chain", "tree"))


@torch.no_grad()
def test_both_sides_continue_the_same_text():
    torch.manual_seed(0)
    settings = {name: value for name, value in hybrid.SUITE["models"]["qwen3_5_text"].items() if name != "recurrence"}
    case = hybrid.HybridCase("qwen3_5_text", SMALL | settings, 70, 40)
    position = torch.tensor([[70]])
    stock = case.model(input_ids=case.token, position_ids=position, **{CACHE_NAME: case.stock}).logits
    with case.target.attention():
        ours = case.target.verify(case.trees["plain"][0], case.cache).logits
    torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-4)
