"""Both sides of a verification compute the same, a wrong mask is noticed, and only right results are timed."""

import pytest
import torch

from benchmarks.harness import Run
from benchmarks.random_inputs import Shape, block_mask, cast, full_cache, random_target, random_tree
from benchmarks.verification import AttentionCase, ForwardCase, measure
from hf_longspec.bench.results import read_records
from hf_longspec.generation.draft_tree import DraftTree

SHAPE = Shape(layers=2, hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=16, vocab=50)
# longer than what the torch backend computes in one masked call
PREFIX = 2100
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return random_target(SHAPE, PREFIX + 9, CPU, torch.bfloat16).float()


def test_a_wrong_tree_mask_is_over_the_budget_of_the_forward(model):
    cast(model, torch.float32)
    case = ForwardCase(model, full_cache(model, 1, PREFIX, 1, 9), random_tree(9, 50))
    chain = DraftTree.chain(case.tree.tokens)
    case.mask = block_mask(DraftTree(case.tree.tokens, chain.parents, case.tree.valid), PREFIX)
    difference, budget, _, _ = case.check()
    assert difference > budget


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
