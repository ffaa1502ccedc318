"""`WindowRing` against a dictionary from position to key."""

import pytest
import torch

from hf_longspec.modeling.shared.beams import WindowRing

WINDOW, SLOTS, HEADS, SIZE = 5, 4, 2, 3


def make_ring(batch=2, window=WINDOW, **sizes):
    return WindowRing(window, SLOTS, batch, HEADS, SIZE, dtype=torch.float32, device=torch.device("cpu"), **sizes)


def entries(batch, count, start=0.0):
    """Return keys in which every number is different, and their negatives as values."""
    keys = torch.arange(batch * HEADS * count * SIZE, dtype=torch.float32).view(batch, HEADS, count, SIZE) + start
    return keys, -keys


def stored(ring, row):
    """Return a dictionary from position to key `(heads, size)` of one row."""
    slots = ring.positions[row, : ring.size]
    assert torch.equal(ring.values[:, :, : ring.size], -ring.keys[:, :, : ring.size])
    return {int(p): ring.keys[row, :, slot] for slot, p in enumerate(slots) if p >= 0}


def test_a_prompt_and_accepted_nodes():
    """Rows are apart, padding is dropped, nodes replace the oldest tokens, and a finished row keeps nothing new."""
    ring = make_ring()
    assert not ring.visible(torch.tensor([[0], [3]])).any()
    keys, values = entries(2, 5)
    ring.fill(keys, values, torch.tensor([[7, 8, 9, 10, 11], [-3, -2, -1, 0, 1]]))
    first, second = stored(ring, 0), stored(ring, 1)
    assert sorted(first) == [7, 8, 9, 10, 11] and sorted(second) == [0, 1]
    assert all(torch.equal(first[7 + i], keys[0, :, i]) for i in range(5))
    assert torch.equal(second[0], keys[1, :, 3]) and torch.equal(second[1], keys[1, :, 4])
    nodes, negatives = entries(2, SLOTS, start=500.0)
    ring.stage(nodes[:, :, :1], negatives[:, :, :1], 0)
    ring.stage(nodes[:, :, 1:], negatives[:, :, 1:], 1)
    ring.keep(torch.tensor([[0, 2, 3], [0, 3, 3]]), torch.tensor([3, 0]), torch.tensor([12, 2]))
    after = stored(ring, 0)
    assert sorted(after) == [10, 11, 12, 13, 14] and sorted(stored(ring, 1)) == [0, 1]
    assert torch.equal(after[10], first[10])
    for position, node in ((12, 0), (13, 2), (14, 3)):
        assert torch.equal(after[position], nodes[0, :, node])


@pytest.mark.parametrize(("sinks", "room"), [(0, 3), (2, 0), (3, 4)])
def test_sinks_stay_and_later_tokens_hide_nothing_from_earlier_queries(sinks, room):
    """Tokens come in portions of at most `room + 1`; each query sees what a banded mask with sinks shows it."""
    ring, keys, values = make_ring(1, sinks=sinks, room=room), *entries(1, 23)
    for first in range(0, 23, room + 1):
        new = torch.arange(first, min(23, first + room + 1))
        ring.fill(keys[:, :, new], values[:, :, new], new[None])
        seen = ring.visible(new[None])[0]
        for query, slots in zip(new.tolist(), seen, strict=True):
            expected = [p for p in range(query + 1) if p < sinks or p > query - WINDOW]
            assert sorted(ring.positions[0, : ring.size][slots].tolist()) == expected
            assert all(torch.equal(stored(ring, 0)[p], keys[0, :, p]) for p in expected)
