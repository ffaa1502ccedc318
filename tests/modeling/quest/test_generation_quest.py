"""Quest against what follows from its definition: loops over the cache choose what a step reads, at every step anew."""

from dataclasses import replace
from functools import partial
from math import ceil

import pytest
import torch

from hf_longspec import QuestDraftModel, SpeculativeCache
from hf_longspec.generation.cache import CACHE_NAME
from hf_longspec.generation.target import TargetView
from hf_longspec.modeling.quest.generation_quest import QuestDrafter
from hf_longspec.modeling.quest.pages import KeyPages, PageContext
from tests.modeling import calls
from tests.modeling.quest.test_pages import chosen_by_loops
from tests.tiny_targets import tiny_target
from tests.watching import after, before

LENGTHS = (57, 3, 39)
NEW_TOKENS, GAMMA, SINKS = 22, 4, 4
SPARSE = {"sparse_ratio": 0.3, "sparse_min_tokens": 7, "page_size": 3, "num_dense_layers": 0}


generate = partial(calls.generate, lengths=LENGTHS, max_new_tokens=NEW_TOKENS)


def pages_of(prefix, settings):
    """How many pages a step attends to after a prefix."""
    size, least = settings["page_size"], settings["sparse_min_tokens"]
    allowed = min(prefix, max(least, ceil(settings["sparse_ratio"] * prefix)))
    return min(prefix // size, max(ceil(SINKS / size), allowed // size))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_every_step_reads_the_pages_that_fit_its_own_query(name, monkeypatch):
    """In every step and layer, loops over the cache choose the same entries, which change with the query."""
    model = tiny_target(name)
    draft = QuestDraftModel.from_target(model, num_assistant_tokens=GAMMA, **SPARSE)
    sliding = TargetView(model).sliding_layers
    attend, committed, phases = PageContext.attend, [()], {}
    note = lambda drafter, root: committed.insert(0, drafter.binding.cache.lengths.host)  # noqa: E731

    def watched(self, backend, layer_idx, query, key, value, **options):
        read = []

        def sparse(query, key, value, slots, counts, **rest):
            read.append((slots.expand(-1, key.shape[1], -1), counts))
            return backend.sparse_attention(query, key, value, slots, counts, **rest)

        out = attend(self, replace(backend, sparse_attention=sparse), layer_idx, query, key, value, **options)
        assert len(read) == (layer_idx not in sliding)
        for slots, counts in read:
            chosen = [pages_of(prefix, SPARSE) for prefix in committed[0]]
            sizes = SPARSE["page_size"], SINKS
            expected = chosen_by_loops(query, key, self.lengths.host, committed[0], chosen, *sizes)
            for row, prefix in enumerate(committed[0]):
                used = [set(of_head[: counts[row]].tolist()) for of_head in slots[row]]
                assert used == expected[row]
                full = prefix // SPARSE["page_size"] * SPARSE["page_size"]
                phases.setdefault((layer_idx, row, prefix), []).append([{s for s in u if s < full} for u in used])
        return out

    before(monkeypatch, QuestDrafter, "propose", note)
    monkeypatch.setattr(PageContext, "attend", watched)
    assert torch.equal(generate(model, draft), generate(model, None))
    stats = draft.last_speculation
    assert 0 < stats.num_accepted_draft_tokens < stats.num_draft_tokens
    several = [choices for (_, row, _), choices in phases.items() if LENGTHS[row] > 30]
    assert {len(choices) % GAMMA for choices in several} == {0}  # some rows end earlier and are drafted for again
    assert sum(choices[0] != choices[-1] for choices in several) > len(several) / 2
    # heads of a layer choose for themselves
    assert any(heads[0] != heads[1] for choices in several for heads in choices)


def assert_bounds(paged, page_size):
    """The bounds of all full pages are those of the keys in the target's cache."""
    for layer in paged.sparse_layers:
        lowest, highest = paged.pages.bounds[layer]
        for row, length in enumerate(paged.cache.lengths.host):
            for page in range(length // page_size):
                entries = paged.cache.layers[layer].keys[row, :, page * page_size : (page + 1) * page_size]
                assert torch.equal(lowest[row, :, page], entries.amin(1))
                assert torch.equal(highest[row, :, page], entries.amax(1))


@pytest.mark.parametrize("page_size", [1, 3])
def test_bounds_are_up_to_date_after_every_commit(page_size, monkeypatch):
    """A commit computes those of the pages that it filled, not all of them again; two at a time."""
    monkeypatch.setattr("hf_longspec.modeling.quest.pages.PAGES_AT_ONCE", 2)
    model, computed, counts = tiny_target("llama"), [], []

    def check(_, own, verification):
        assert_bounds(own.sparse, page_size)
        (buffer,) = {layer.keys.shape for layer in own.binding.cache.layers}
        pages = buffer[2] // page_size + 1
        assert own.state_bytes == model.config.num_hidden_layers * 2 * 4 * buffer[0] * buffer[1] * pages * buffer[3]
        computed.append(max(counts, default=0))
        counts.clear()

    after(monkeypatch, QuestDrafter, "observe", check)
    before(monkeypatch, KeyPages, "update", lambda *inputs: counts.append(inputs[-1]))
    draft = QuestDraftModel.from_target(model, **(SPARSE | {"page_size": page_size, "num_assistant_tokens": GAMMA}))
    generate(model, draft)
    first, *others = computed
    assert first == max(LENGTHS) // page_size and len(others) > 4
    assert 0 < max(others) <= GAMMA // page_size + 1


def test_a_second_turn_and_a_cut_cache_have_their_own_bounds(monkeypatch):
    model = tiny_target("llama")
    after(monkeypatch, QuestDrafter, "observe", lambda _, drafter, *__: assert_bounds(drafter.sparse, 3))
    draft = QuestDraftModel.from_target(model, **SPARSE)
    cache = SpeculativeCache(model.config, 1, 40, tree_slots=draft.num_tree_nodes(TargetView(model)))
    first = generate(model, draft, lengths=(21,), **{CACHE_NAME: cache})
    cache.crop(-9)
    again = torch.cat([first[:, : cache.lengths.host[0] + 1], torch.tensor([[5, 9, 7, 7]])], 1)
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(again)}
    # longer than the cache was made for, so its buffers are replaced
    second = model.generate(again, assistant_model=draft, **{CACHE_NAME: cache}, **options)
    assert torch.equal(second, model.generate(again, **options))
    drafter = draft.candidate_generator(model, max_length=64)
    for end in (24, 30, 33):  # inside transformers' own loop the text goes on without a new drafter
        drafter.get_candidates(second[:, :end])
    assert drafter.binding.cache.lengths.host == (32,)


def test_first_layers_and_windows_read_everything():
    model = tiny_target("gemma3")
    sliding = TargetView(model).sliding_layers
    assert sliding == {0, 2}
    text = generate(model, None)
    for dense, paged in ((1, True), (2, False)):
        draft = QuestDraftModel.from_target(model, **(SPARSE | {"num_dense_layers": dense}))
        assert torch.equal(generate(model, draft), text)
        stats = draft.last_speculation
        assert (stats.draft_state_bytes > 0) == paged
        assert (stats.num_accepted_draft_tokens < stats.num_draft_tokens - 3 * GAMMA) == paged
