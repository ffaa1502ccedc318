"""The collected scores against SpecAttn's Eq. 3 taken literally, one query row and one head at a time."""

import math

import pytest
import torch

from hf_longspec.attention_backends import scores
from hf_longspec.attention_backends.lengths import SeqLens
from hf_longspec.attention_backends.scores import QueryCapture, ScoreCapture
from tests.pairwise import pairwise

# float32 sums of a few hundred products in another order
TOLERANCE = {"rtol": 1e-5, "atol": 1e-4}
# float32 sums of a few products in another order; what is multiplied is the same in every dtype
FEW_PRODUCTS = {"rtol": 1e-5, "atol": 1e-5}
# queries are summed, and products rounded, in the type of the model: 2 to 3 digits of scores around 10
HALF_TOLERANCE = {torch.bfloat16: {"rtol": 2e-2, "atol": 0.3}, torch.float16: {"rtol": 2e-3, "atol": 0.03}}
LENGTHS = (37, 21)


def inputs(heads=6, kv_heads=2, nodes=5, size=8, slots=50, seed=0):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(len(LENGTHS), heads, nodes, size, generator=generator)
    key = torch.randn(len(LENGTHS), kv_heads, slots, size, generator=generator)
    return query, key


def collect(query, key, lse=None, softcap=None, scaling=0.3, **options):
    last_node = torch.tensor([4, 2])  # the second row has two padding nodes
    capture = ScoreCapture(last_node=last_node, **options)
    if lse is None:
        lse = torch.zeros(query.shape[:3])
    capture.collect(3, query, key, lse, lengths=SeqLens(LENGTHS), scaling=scaling, softcap=softcap)
    return capture.scores[3]


def literal(query, key, rows_of, score=lambda dot, b, h, n: dot):
    """Sum over the counted rows and all heads of a KV head of `score(q . k)`: `(B, K, S)`."""
    batch, heads, _, _ = query.shape
    kv_heads = key.shape[1]
    found = torch.zeros(batch, kv_heads, max(LENGTHS))
    for b in range(batch):
        for h in range(heads):
            kv = h // (heads // kv_heads)
            for n in rows_of(b):
                for slot in range(max(LENGTHS)):
                    found[b, kv, slot] += score(float(query[b, h, n] @ key[b, kv, slot]), b, h, n)
    return found


LAST = (4, 2)
ROWS = {"two_rows": lambda b: (0, LAST[b]), "all_rows": lambda b: range(LAST[b] + 1)}


@pytest.mark.parametrize("rows", sorted(ROWS))
@pytest.mark.parametrize("granularity", ["layer", "kv_head"])
def test_logits_are_equation_3(rows, granularity):
    """One product with the summed queries ranks as the mean of all single logits: the mean differs by a factor."""
    query, key = inputs()
    expected = literal(query, key, ROWS[rows])
    if granularity == "layer":
        expected = expected.sum(1, keepdim=True)
    found = collect(query, key, rows=rows, granularity=granularity)
    torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize("rows", sorted(ROWS))
@pytest.mark.parametrize("softcap", [None, 2.5])
def test_weights_are_probabilities_of_single_heads(rows, softcap):
    query, key = inputs(seed=1)
    lse = torch.randn(query.shape[:3], generator=torch.Generator().manual_seed(2)) + 3

    def weight(dot, b, h, n):
        logit = 0.3 * dot
        if softcap is not None:
            logit = softcap * math.tanh(logit / softcap)
        return math.exp(logit - float(lse[b, h, n]))

    expected = literal(query, key, ROWS[rows], weight)
    found = collect(query, key, lse, softcap, rows=rows, score="weights", granularity="kv_head")
    torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize(
    ("dtype", "capability", "cast_block"), pairwise(tuple(HALF_TOLERANCE), ("AVX2", "AVX512"), (64, 2**20))
)
def test_half_types_cast_in_blocks_or_not_at_all(monkeypatch, dtype, capability, cast_block):
    """Whether the processor multiplies half types itself, and however many keys are cast at a time."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(scores, "CAST_BLOCK", cast_block)
    query, key = (values.to(dtype) for values in inputs(seed=5))
    lse = torch.full(query.shape[:3], 3.0)
    logits = literal(query.float(), key.float(), ROWS["two_rows"])
    found = collect(query, key, granularity="kv_head")
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, logits, **HALF_TOLERANCE[dtype])
    assert torch.equal(found, found.to(dtype).float()) == (capability == "AVX512")
    weights = literal(query.float(), key.float(), ROWS["all_rows"], lambda dot, b, h, n: math.exp(0.3 * dot - 3.0))
    found = collect(query, key, lse, rows="all_rows", score="weights", granularity="kv_head")
    torch.testing.assert_close(found, weights, **TOLERANCE)


def test_each_row_keeps_the_nodes_apart():
    query, key = inputs(seed=3)
    found = collect(query, key, rows="each_row", granularity="layer")
    for node in range(query.shape[2]):
        expected = literal(query, key, lambda b, node=node: (node,)).sum(1, keepdim=True)
        torch.testing.assert_close(found[:, :, node], expected, **TOLERANCE)


def collected(capture, dtype=torch.float32):
    """A capture that has seen one layer, number 3; and what it has seen."""
    query, key = (values.to(dtype) for values in inputs())
    where = {"lengths": SeqLens(LENGTHS), "scaling": 0.3, "softcap": None}
    capture.collect(3, query, key, torch.zeros(2, 6, 5), **where)
    return query, key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scores_are_sums_over_the_heads_of_a_group(dtype):
    capture = QueryCapture()
    query, key = collected(capture, dtype)
    for row, node, length in ((0, 0, 37), (0, 4, 37), (1, 2, 21), (1, 1, 1), (1, 3, 0)):
        expected = torch.zeros(2, length)
        for head in range(6):
            for slot in range(length):
                product = query[row, head, node].float() @ key[row, head // 3, slot].float()
                expected[head // 3, slot] += product
        found = capture.of_node(3, row, torch.tensor([node]), length)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, **FEW_PRODUCTS)


def test_nothing_is_copied_and_skipped_layers_are_not_kept():
    capture = QueryCapture()
    query, key = collected(capture)
    assert [kept.data_ptr() for kept in capture.inputs[3]] == [query.data_ptr(), key.data_ptr()]
    skipped = {"skipped_layers": frozenset({3})}
    late, early = QueryCapture(**skipped), ScoreCapture(last_node=torch.tensor([4, 2]), **skipped)
    for capture in (late, early):
        collected(capture)
    assert not late.inputs and not early.scores
