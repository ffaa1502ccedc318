"""Compiled steps: one graph serves rows of all lengths, in any order, against eager steps."""

import random
from itertools import cycle

import pytest
import torch

from hf_longspec import NgramDraftModel, SpeculativeCache
from hf_longspec.attention_backends import torch_backend
from hf_longspec.generation.cache import CACHE_NAME
from hf_longspec.generation.compiled import compiled_steps as compiled
from hf_longspec.generation.compiled.compiled_steps import MOST_ROWS, CompiledRunner
from hf_longspec.generation.draft_tree import DraftTree
from hf_longspec.generation.target import TargetView
from tests.pairwise import soaked
from tests.rounding import rounding
from tests.tiny_targets import tiny_prompts, tiny_target

CAPACITY = 80
# Rows 0 and 1, 1 and 2, 0 and 2 are equally long in turn, then none are. 2 is the shortest compiled length.
RAGGED = [(33, 5, 19), (33, 33, 19), (34, 19, 19), (20, 6, 20), (5, 35, 20), (2, 36, 3), (36, 2, 2), (37, 38, 21)]
EQUAL = [(40, 40, 40), (7, 7, 7)]


@pytest.fixture
def no_masks(monkeypatch):
    """Make masks over the prefix an error."""

    def refuse(*args):
        raise AssertionError("a mask over the whole prefix")

    monkeypatch.setattr(torch_backend, "prefix_mask", refuse)


def small(name):
    """One layer where all are alike; test_step.py compiles several."""
    return tiny_target(name, **({"num_hidden_layers": 1} if name in ("llama", "mistral") else {}))


def filled_cache(model, rows):
    """Return a cache whose whole buffers hold random numbers, so that its lengths can be set at will."""
    cache = SpeculativeCache(model.config, rows, CAPACITY - 12, tree_slots=12)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        model(torch.ones(rows, 1, dtype=torch.long), **{CACHE_NAME: cache})
    for layer in cache.layers:
        for part in (layer.keys, layer.values):
            part.normal_(generator=generator)
    return cache


@torch.no_grad()
def compare_verifications(model, sequence, nodes, limit=None):
    """Compare compiled with eager logits, one verification after prefixes of each tuple of lengths."""
    rows = len(sequence[0])
    cache = filled_cache(model, rows)
    eager, fixed = TargetView(model), TargetView(model, CompiledRunner())
    generator = torch.Generator().manual_seed(1)
    with eager.attention():
        for lengths in sequence:
            cache.set_lengths(lengths)
            tokens = torch.randint(3, model.config.vocab_size, (rows, nodes), generator=generator)
            expected = eager.verify(DraftTree.chain(tokens), cache, limit=limit).logits
            cache.rollback()
            logits = fixed.verify(DraftTree.chain(tokens), cache, limit=limit, fixed_shape=True).logits
            cache.rollback()
            torch.testing.assert_close(logits, expected, **rounding(expected, model.config.num_hidden_layers))
    assert compiled._FAILED not in compiled._compiled[model].values()


@pytest.mark.parametrize(("name", "nodes"), [("mistral", 4), *soaked([("gemma2", 4), ("gemma3", 1), ("gemma3", 4)])])
def test_rows_of_any_lengths_share_one_graph(name, nodes, graphs, no_masks):
    """Covers full attention, softcaps, windows shorter and longer than the rows, and positions that are clamped."""
    model = small(name)
    compare_verifications(model, RAGGED, nodes, limit=max(RAGGED[-1]) + nodes - 1)
    assert graphs.frame_count == 1
    shuffled = random.Random(0)
    more = [(*shuffled.choices(range(2, 60), k=2), shuffled.randint(60, 62)) for _ in range(10)]
    with torch._dynamo.config.patch(error_on_recompile=True):
        compare_verifications(model, more, nodes, limit=60)
    assert graphs.frame_count == 1


def test_rows_of_equal_and_different_lengths_in_turn(graphs, no_masks):
    model = small("llama")
    turns = cycle(RAGGED)
    sequence = [lengths for equal in EQUAL * 4 for lengths in (next(turns), equal)]
    with torch._dynamo.config.patch(error_on_recompile=True):
        compare_verifications(model, sequence, 1)
    assert graphs.frame_count == 2


def test_texts_of_one_row_build_each_graph_once(graphs, monkeypatch):
    """Lengths are on both sides of `DENSE_KEYS`, up to which steps that run as they are attend in one call."""
    monkeypatch.setattr(torch_backend, "DENSE_KEYS", 24)
    model = small("llama")
    draft = NgramDraftModel.from_target(model, num_assistant_tokens=3, compile="compile", gate=False)
    for length in (9, 40, 17):
        prompt, mask = tiny_prompts(model.config.vocab_size, (length,))
        model.generate(prompt, attention_mask=mask, assistant_model=draft, max_new_tokens=12, eos_token_id=None)
        assert draft.last_speculation.num_spec_steps >= 2
    made = [*compiled._compiled[model].values(), *compiled._compiled.get(draft, {}).values()]
    assert compiled._FAILED not in made and graphs.frame_count == len(made)


@pytest.mark.soak
def test_large_batches_and_empty_rows_use_the_mask(graphs):
    model = small("llama")
    many = [tuple(range(first, first + MOST_ROWS + 1)) for first in (3, 41)]
    compare_verifications(model, many, 3)
    assert graphs.frame_count == 1
    compare_verifications(model, [(33, 1, 19), (20, 20, 0)], 3)
    assert graphs.frame_count == 2
