"""Which entries drafting reads, against sorts and loops, and their compact copies."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_longspec import SpeculativeCache
from hf_longspec.modeling.shared.sparse_caches import SINK_TOKENS, SelectedCache, budget, select_top, select_window
from tests.tiny_targets import tiny_target


@given(prefix=st.integers(0, 3000), ratio=st.floats(0.001, 1.0, exclude_min=True), floor=st.integers(1, 600))
def test_budget_is_the_share_between_floor_and_prefix(prefix, ratio, floor):
    count = budget(prefix, ratio, floor)
    assert count == sorted([floor, math.ceil(ratio * prefix), prefix])[1] if floor <= prefix else count == prefix


def best_by_sorting(scores, prefix, count):
    """Sinks first, then the best others: a sort of pairs."""
    others = sorted(range(SINK_TOKENS, prefix), key=lambda slot: -scores[slot])
    return (list(range(min(SINK_TOKENS, prefix))) + others)[:count]


@given(
    prefixes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    heads=st.integers(1, 3),
    share=st.floats(0.05, 1.0),
    seed=st.integers(0, 10**6),
)
def test_top_entries_equal_a_sort(prefixes, heads, share, seed):
    """Ragged rows: what lies beyond a row's prefix is junk, here the highest scores of all."""
    longest = max(prefixes)
    scores = torch.randn(len(prefixes), heads, longest, generator=torch.Generator().manual_seed(seed))
    for row, prefix in enumerate(prefixes):
        scores[row, :, prefix:] = 100.0
    counts = [budget(prefix, share, SINK_TOKENS) for prefix in prefixes]
    chosen = select_top(scores.clone(), torch.tensor(prefixes), max(counts))
    assert chosen.shape == (len(prefixes), heads, max(counts))
    for row, (prefix, count) in enumerate(zip(prefixes, counts, strict=True)):
        for head in range(heads):
            expected = best_by_sorting(scores[row, head].tolist(), prefix, count)
            assert sorted(chosen[row, head, :count].tolist()) == sorted(expected)


@given(prefixes=st.lists(st.integers(1, 60), min_size=1, max_size=4), ratio=st.floats(0.05, 1.0))
def test_window_is_sinks_and_the_most_recent(prefixes, ratio):
    counts = [budget(prefix, ratio, 7) for prefix in prefixes]
    chosen = select_window(torch.tensor(prefixes), torch.tensor(counts), max(counts))
    assert chosen.shape == (len(prefixes), 1, max(counts))
    for row, (prefix, count) in enumerate(zip(prefixes, counts, strict=True)):
        sinks = min(SINK_TOKENS, count)
        expected = [*range(sinks), *range(prefix - (count - sinks), prefix)]
        assert chosen[row, 0, :count].tolist() == expected


def filled_cache(lengths, num_layers=3, max_length=60, tree_slots=6):
    """Every slot of the cache holds its own number, committed or not."""
    model = tiny_target("llama", num_hidden_layers=num_layers)
    cache = SpeculativeCache(model.config, len(lengths), max_length, tree_slots=tree_slots)
    capacity = max_length + tree_slots
    keys = torch.arange(len(lengths) * 2 * capacity * 3.0).view(len(lengths), 2, capacity, 3)
    for layer in range(num_layers):
        cache.update(keys + 10_000 * layer, -keys[..., :2] - 10_000 * layer, layer)
    cache.set_lengths(lengths)
    return cache


@pytest.mark.parametrize("counts", [(6, 6), (9, 5)], ids=["equal counts", "unequal counts"])
@pytest.mark.parametrize("any_counts", [False, True], ids=["of this phase", "of any phase"])
def test_all_layers_select_together(counts, any_counts):
    """Scores of one shape at once; a row may take fewer entries than another."""
    cache, prefixes, tails = filled_cache((40, 30), num_layers=4), (37, 28), (3, 2)
    selected = SelectedCache(cache, frozenset({1}), room=3)
    layers, shapes = [0, 2, 3], [(2, 1, 40), (2, 2, 40), (2, 1, 40)]
    generator = torch.Generator().manual_seed(0)
    scores = [torch.randn(shape, generator=generator) for shape in shapes]
    for row, prefix in enumerate(prefixes):
        for of_layer in scores:
            of_layer[row, :, prefix:] = torch.nan  # arbitrary
    before = [of_layer.clone() for of_layer in scores]
    selected.begin(counts, tails)
    selected.allocate(layers)
    selected.fill_top(layers, scores, torch.tensor(prefixes), selected.table(torch.device("cpu")), any_counts)
    for of_layer, earlier in zip(scores, before, strict=True):  # a graph writes them there again
        torch.testing.assert_close(of_layer, earlier, rtol=0, atol=0, equal_nan=True)
    for layer, of_layer in zip(layers, scores, strict=True):
        own, copy = cache.layers[layer], selected.layers[layer]
        for row, (length, prefix, count, tail) in enumerate(zip((40, 30), prefixes, counts, tails, strict=True)):
            for head in range(2):
                best = best_by_sorting(of_layer[row, head % of_layer.shape[1]].tolist(), prefix, count)
                found = copy.keys[row, head, :count, 0].sort().values
                assert torch.equal(found, own.keys[row, head, sorted(best), 0])
                assert torch.equal(
                    copy.values[row, head, count : count + tail], own.values[row, head, length - tail : length]
                )
