import pytest
import torch

from benchmarks.random_inputs import Shape, cast, random_layers, random_model, random_tree
from benchmarks.verification import AttentionCase, ForwardCase, VerificationBenchmark, block_mask, verification_report
from hf_longspec.bench.progress import Progress
from hf_longspec.bench.results import ResultFile, TimeGuard, read_records
from hf_longspec.generation.cache import SpeculativeCache
from hf_longspec.generation.draft_tree import DraftTree

SHAPE = Shape(layers=2, hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=16, vocab=50)
# longer than what the torch backend computes in one masked call
PREFIX = 2100


@pytest.fixture(scope="module")
def model():
    return random_model(SHAPE, PREFIX + 9).float()


def layers(dtype):
    return [(keys.to(dtype), values.to(dtype)) for keys, values in random_layers(SHAPE, PREFIX + 9)]


def attention_case(model, dtype=torch.float32, nodes=9, tree=None):
    return AttentionCase(model.model.layers[0].self_attn, layers(dtype), tree or random_tree(nodes, 50), PREFIX)


def forward_case(model, tree):
    cache = SpeculativeCache(model.config, 1, PREFIX, tree_slots=9)
    for layer, (keys, values) in zip(cache.layers, layers(torch.float32), strict=True):
        layer.update(keys[:, :, :PREFIX], values[:, :, :PREFIX])
    cache.set_lengths([PREFIX])
    return ForwardCase(model, cache, tree)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("nodes", [1, 2, 9])
def test_attention_of_both_sides_is_close_to_float64(model, dtype, nodes):
    case = attention_case(model, dtype, nodes)
    ours, hf, budget = case.errors()
    assert ours <= budget
    assert hf <= (2e-6 if dtype == torch.float32 else 1e-2)


def test_the_exact_attention_is_a_double_loop(model):
    case = attention_case(model, nodes=3)
    keys, values = (part.double() for part in case.layers[0])
    exact = case.exact(case.layers[0])
    seen = torch.cat([torch.ones(3, PREFIX, dtype=torch.bool), case.tree.mask[0]], dim=1)
    for node in range(3):
        for head in range(SHAPE.heads):
            group = head // (SHAPE.heads // SHAPE.kv_heads)
            places = seen[node].nonzero()[:, 0]
            scores = keys[0, group, places] @ case.query[0, head, node].double() * SHAPE.head_dim**-0.5
            assert torch.allclose(exact[0, node, head], scores.softmax(0) @ values[0, group, places])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_wrong_tree_mask_is_over_the_budget_of_attention(model, dtype):
    case = attention_case(model, dtype)
    case.tree.mask.copy_(torch.ones(9, 9).tril().bool())  # a chain instead of the tree
    exact = attention_case(model, dtype).exact
    case.exact = exact
    ours, _, budget = case.errors()
    assert ours > budget


def test_logits_of_both_forwards_agree(model):
    difference, budget, _ = forward_case(model, random_tree(9, 50)).errors()
    assert difference <= budget / 10


def test_a_wrong_tree_mask_is_over_the_budget_of_the_forward(model):
    tree = random_tree(9, 50)
    case = forward_case(model, tree)
    chain = DraftTree.chain(tree.tokens)
    case.mask = block_mask(DraftTree(tree.tokens, chain.parents, tree.valid), PREFIX)
    difference, budget, _ = case.errors()
    assert difference > budget


def test_the_model_is_random_and_its_rotary_frequencies_are_exact(model):
    weights = torch.cat([p.flatten() for p in model.parameters() if p.dim() > 1])
    assert abs(weights.std().item() - 0.02) < 1e-3
    first, second = (layer.mlp.up_proj.weight for layer in model.model.layers)
    assert not torch.equal(first, second)
    before = model.model.rotary_emb.inv_freq.clone()
    cast(model, torch.bfloat16)
    cast(model, torch.float32)
    assert torch.equal(model.model.rotary_emb.inv_freq, before)
    assert torch.equal(torch.cat([p.flatten() for p in model.parameters() if p.dim() > 1]), weights)


def test_a_lone_root_needs_no_mask():
    assert block_mask(random_tree(1, 50), 7) is None
    assert block_mask(random_tree(4, 50), 7).shape == (1, 1, 4, 11)


def test_the_model_keeps_its_attention_and_the_cache_its_prefix(model):
    case = forward_case(model, random_tree(4, 50))
    case.ours()
    case.hf()
    assert model.config._attn_implementation == "sdpa"
    assert case.cache.lengths.host == (PREFIX,)


def test_benchmark_writes_every_cell_and_refuses_wrong_results(tmp_path, monkeypatch):
    def run(name):
        with ResultFile(tmp_path / name, "verification", verification_report, TimeGuard(1), {}) as results:
            reporting = {"results": results, "progress": Progress(1, quiet=True)}
            VerificationBenchmark(SHAPE, 64, [1, 5], repeats=2, bandwidth=10.0, **reporting).run(
                ["float32", "bfloat16"]
            )
        return read_records(tmp_path / name)

    rows = [record for record in run("right.jsonl") if record["kind"] == "verification"]
    assert {(row["part"], row["dtype"], row["nodes"]) for row in rows} == {
        (part, dtype, nodes)
        for part in ("attention", "forward")
        for dtype in ("float32", "bfloat16")
        for nodes in (1, 5)
    }
    assert all(row["ratio"]["count"] == 2 and row["floor_ms"] > 0 for row in rows)

    monkeypatch.setattr(AttentionCase, "errors", lambda case: (float("nan"), 0.0, 1.0))
    records = run("wrong.jsonl")
    assert not any(record.get("part") == "attention" for record in records if record["kind"] == "verification")
    assert sum("over the budget" in record.get("reason", "") for record in records) == 4
