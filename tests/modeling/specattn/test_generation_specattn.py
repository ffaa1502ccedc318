"""SpecAttn against what follows from its definition: full selection is the target itself, and nothing is disturbed."""

import math

import pytest
import torch

from hf_longspec import SpecAttnDraftModel
from hf_longspec.attention_backends.lengths import SeqLens
from hf_longspec.generation.cache import SpeculativeCache
from hf_longspec.generation.drafter import Binding, Verification
from hf_longspec.generation.target import TargetView, chain_of_last_tokens
from hf_longspec.modeling.shared.sparse_caches import SINK_TOKENS
from tests.tiny_targets import tiny_prompts, tiny_target

LENGTHS = [57, 3, 39]


def seeded_drafter(model, lengths=LENGTHS, **settings):
    """A drafter whose cache holds the prompts, as the loop leaves it after seeding; and the roots."""
    target = TargetView(model)
    draft = SpecAttnDraftModel.from_target(model, **settings)
    prompts = [ids[m.bool()] for ids, m in zip(*tiny_prompts(128, lengths), strict=True)]
    cache = SpeculativeCache(model.config, len(lengths), 100, tree_slots=draft.max_nodes(target))
    drafter = draft.make_drafter(Binding(target, cache, None, 100))
    heads = [prompt[: max(0, len(prompt) - drafter.seed_tokens)] for prompt in prompts]
    target.prefill(torch.nn.utils.rnn.pad_sequence(heads, batch_first=True), cache, None)
    cache.set_lengths([len(head) for head in heads])
    tree, sizes = chain_of_last_tokens(prompts, drafter.seed_tokens)
    before, capture = cache.lengths, drafter.capture(tree)
    with target.attention():
        target.verify(tree, cache, capture)
    cache.commit(None, sizes)
    path = torch.arange(max(sizes)).expand(len(sizes), -1)
    drafter.observe(Verification(path, SeqLens(sizes), before, capture))
    return drafter, torch.tensor([7, 8, 9][: len(lengths)])


@pytest.mark.parametrize("selection", ["two_rows", "all_rows", "accepted_rows", "last_accepted", "window"])
@torch.no_grad()
def test_compact_buffers_hold_budget_and_tail(selection):
    """Each row reads `max(floor, ceil(ratio * prefix))` entries of its prefix, sinks among them, and what follows."""
    ratio, floor = 0.3, 8
    model = tiny_target("llama")
    drafter, _ = seeded_drafter(model, selection=selection, sparse_ratio=ratio, sparse_min_tokens=floor)
    cache, selected = drafter.binding.cache, drafter.sparse
    for row, length in enumerate(LENGTHS):
        prefix = max(0, length - drafter.seed_tokens)
        count = min(prefix, max(floor, math.ceil(ratio * prefix)))
        tail = length - prefix
        assert selected.used.lengths.host[row] == count + tail
        for source, compact in zip(cache.layers, selected.layers, strict=True):
            kept = compact.keys[row, 0, : count + tail]
            # every entry is one of the row's own, none twice
            match = (kept[:, None] == source.keys[row, 0, :length][None]).all(-1)
            assert match.sum(1).tolist() == [1] * (count + tail)
            slots = match.int().argmax(1)
            assert slots[count:].tolist() == list(range(prefix, length))
            assert set(range(min(SINK_TOKENS, count))) <= set(slots[:count].tolist())
            if selection == "window" and count:
                recent = range(prefix - count + SINK_TOKENS, prefix)
                assert sorted(slots[:count].tolist()) == [*range(SINK_TOKENS), *recent]


@pytest.mark.parametrize("selection", ["two_rows", "accepted_rows"])
@torch.no_grad()
def test_selection_takes_the_entries_with_the_highest_scores(selection):
    """Exactly the best of invented scores, of which the largest belong to a node that is not accepted."""
    small = {"sparse_min_tokens": 12, "sparse_ratio": 0.01}
    drafter, _ = seeded_drafter(tiny_target("qwen2"), lengths=[57], selection=selection, **small)
    cache = drafter.binding.cache
    invented = torch.randn(1, 1, 3, 57, generator=torch.Generator().manual_seed(5))
    invented[:, :, 2] *= 100
    scores = invented if selection == "accepted_rows" else invented[:, :, :2].sum(2)
    capture = drafter.capture(chain_of_last_tokens([torch.arange(5)], 5)[0])
    capture.scores = {index: scores.clone() for index in range(len(cache.layers))}
    drafter.observe(Verification(torch.tensor([[0, 1, 0]]), SeqLens([2]), SeqLens((57,)), capture))
    total = invented[0, 0, 0] + invented[0, 0, 1]
    order = [slot for slot in total.argsort(descending=True).tolist() if slot >= SINK_TOKENS]
    for source, compact in zip(cache.layers, drafter.sparse.layers, strict=True):
        match = (compact.keys[0, 0, :12, None] == source.keys[0, 0, None, :57]).all(-1)
        assert set(match.int().argmax(1).tolist()) == {*range(SINK_TOKENS), *order[: 12 - SINK_TOKENS]}
