"""Scores by the query of one node against sums of single products."""

import pytest
import torch

from hf_longspec.attention_backends.scores import QueryCapture, ScoreCapture

LENGTHS = (37, 21)
# float32 sums of a few products in another order; what is multiplied is the same in every dtype
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def collected(capture, dtype=torch.float32):
    """A capture that has seen one layer, number 3; and what it has seen."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 6, 5, 8, generator=generator).to(dtype)
    key = torch.randn(2, 2, 50, 8, generator=generator).to(dtype)
    where = {"lengths": torch.tensor(LENGTHS), "host_lengths": LENGTHS, "scaling": 0.3, "softcap": None}
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
        torch.testing.assert_close(found, expected, **TOLERANCE)


def test_scores_that_were_collected_for_all_nodes_are_the_same():
    early = ScoreCapture(torch.tensor([4, 4]), rows="each_row", score="logits", granularity="kv_head")
    late = QueryCapture()
    collected(early)
    collected(late)
    for row, length in enumerate(LENGTHS):
        for node in range(5):
            where = 3, row, torch.tensor([node]), length
            torch.testing.assert_close(early.of_node(*where), late.of_node(*where), **TOLERANCE)


def test_nothing_is_copied_and_skipped_layers_are_not_kept():
    capture = QueryCapture()
    query, key = collected(capture)
    assert [kept.data_ptr() for kept in capture.seen[3]] == [query.data_ptr(), key.data_ptr()]
    capture = QueryCapture(skipped_layers=frozenset({3}))
    collected(capture)
    assert not capture.seen
