"""Which entries drafting reads, against sorts and loops, and their compact copies."""

import pytest
import torch

from hf_longspec import SpeculativeCache
from hf_longspec.modeling.shared.sparse_caches import SINK_TOKENS, SelectedCache
from tests.tiny_targets import tiny_target


def best_by_sorting(scores, prefix, count):
    """Sinks first, then the best others: a sort of pairs."""
    others = sorted(range(SINK_TOKENS, prefix), key=lambda slot: -scores[slot])
    return (list(range(min(SINK_TOKENS, prefix))) + others)[:count]


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
