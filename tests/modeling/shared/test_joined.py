"""N-grams beside another drafter's tree: both stay what they are, and the text stays the target's."""

import torch

from hf_longspec import SpecAttnDraftModel
from hf_longspec.attention_backends.lengths import SeqLens
from hf_longspec.generation.cache import SpeculativeCache
from hf_longspec.generation.draft_tree import DraftTree
from hf_longspec.generation.drafter import Binding, Verification
from hf_longspec.generation.target import TargetView
from hf_longspec.modeling.longspec.generation_longspec import LongSpecDrafter
from hf_longspec.modeling.shared.ngrams import JoinedDrafter
from hf_longspec.modeling.shared.sparse_caches import SINK_TOKENS
from hf_longspec.modeling.tokenswift.generation_tokenswift import PartialCache, PartialKVPolicy
from tests.modeling.calls import LENGTHS, NEVER, generate
from tests.rounding import rounding
from tests.tiny_targets import random_longspec_draft, random_tokenswift_draft, tiny_prompts
from tests.watching import after, before

# so few tokens that a random model repeats itself
SMALL = {"vocab_size": 12}
NGRAMS = {"ngram_candidates": 3, "ngram_num_tokens": 5}


def joined_draft(kind, model, **settings):
    """A small draft of its kind with n-grams; one that mostly misses, so that these have a chance."""
    settings = NGRAMS | settings
    if kind == "longspec":
        return random_longspec_draft(model, **({"window": 8, "tree_widths": [2, 3, 2]} | settings))
    if kind == "specattn":
        small = {"num_assistant_tokens": 2, "sparse_ratio": 0.1, "sparse_min_tokens": 4, "acceptance": "coupled"}
        return SpecAttnDraftModel.from_target(model, **(small | settings))
    # the smallest budget that holds a step: rebuilds are due all the time, and paths of n-grams are the longest
    small = {"self_draft": kind, "tree_branching": [1, 2, 1], "partial_kv_recent": 2, "partial_kv_budget": 12}
    return random_tokenswift_draft(model, **(small | settings))


def ring_of(draft, model, texts):
    """The ring of a drafter that begins after `texts`: nothing of it was moved there from a tree."""
    cache = SpeculativeCache(model.config, len(texts), 200)
    binding = Binding(TargetView(model), cache, None, 200)
    fresh = draft.make_drafter(binding)
    fresh.start([torch.tensor(text) for text in texts], Verification(torch.zeros(1, 1), SeqLens([1]), SeqLens((0,))))
    return fresh.ring


def assert_same_ring(ring, expected, rows):
    window = slice(0, ring.window)
    for row in rows:
        assert ring.positions[row, window].tolist() == expected.positions[row, window].tolist()
        for found, wanted in ((ring.keys, expected.keys), (ring.values, expected.values)):
            stored = expected.positions[row, window] >= 0
            own, other = found[row, :, window][:, stored], wanted[row, :, window][:, stored]
            torch.testing.assert_close(own, other, **rounding(other, layers=1))


@torch.no_grad()
def test_longspecs_ring_does_not_care_whose_tokens_were_accepted(target, monkeypatch):
    """After every iteration it is that of a drafter which begins after the committed text."""
    model = target("llama", **SMALL)
    draft, checked = joined_draft("longspec", model), []
    prompts = [row[keep.bool()].tolist() for row, keep in zip(*tiny_prompts(12, LENGTHS), strict=True)]

    def check(_, own, verification):
        sequences = own.binding.rule.sequences
        texts = [[*prompt, *sequences.generated[row][:-1]] for row, prompt in enumerate(prompts)]
        growing = [row for row in range(len(LENGTHS)) if not sequences.done[row]]
        assert_same_ring(own.ring, ring_of(draft, model, texts), growing)
        counts, path = verification.num_nodes.host, verification.path
        checked.extend(bool(path[row, 1 : counts[row]].ge(own.num_nodes).any()) for row in growing)

    after(monkeypatch, LongSpecDrafter, "observe", check)
    generate(model, draft, max_new_tokens=16)
    assert checked.count(True) > 1 and checked.count(False) > 1


@torch.no_grad()
def test_a_path_longer_than_longspecs_window(target):
    """Its last tokens remain, none of them written over another; a row that is done keeps what it had."""
    model = target("llama", **SMALL)
    draft = random_longspec_draft(model, window=6, tree_widths=[2])
    texts, emitted = [[5, 6, 7, 8], [9, 4, 3], [3, 3, 4]], [[4, 5, 6, 7, 8, 9, 10, 11, 3], [8, 4], []]
    roots = [10, 11, 5]
    cache = SpeculativeCache(model.config, 3, 100)
    drafter = draft.make_drafter(Binding(TargetView(model), cache, None, 100))
    drafter.ngram_depth = 9
    drafter.start(
        [torch.tensor(text) for text in texts], Verification(torch.zeros(1, 1), SeqLens([1] * 3), SeqLens((0,) * 3))
    )
    written, fill = [], drafter.ring.fill
    drafter.ring.fill = lambda keys, values, positions: written.append(positions) or fill(keys, values, positions)
    rows = [[root, *tokens, *[0] * 12][:12] for root, tokens in zip(roots, emitted, strict=True)]
    path, tree = torch.arange(12).expand(3, -1), DraftTree.chain(torch.tensor(rows))
    drafter.observe(Verification(path, SeqLens([9, 2, 0]), SeqLens((4, 3, 3)), tokens=emitted, tree=tree))
    whole = [[*text, *([root, *tokens[:-1]] if tokens else [])] for text, root, tokens in
             zip(texts, roots, emitted, strict=True)]  # fmt: skip
    assert_same_ring(drafter.ring, ring_of(draft, model, whole), range(3))
    # two tokens for one slot would come in any order on a GPU
    assert [row[row >= 0].tolist() for row in written[0]] == [list(range(7, 13)), [3, 4], []]


def test_specattn_scores_its_own_chain(target, plain_run, monkeypatch):
    """The last node of its capture is the end of its chain."""
    captured = []
    after(monkeypatch, JoinedDrafter, "capture", lambda capture, own, tree: captured.append((tree, capture)))
    run = plain_run(target("qwen3", **SMALL), LENGTHS, max_new_tokens=14, eos_token_id=NEVER)
    draft = joined_draft("specattn", run.model, acceptance="rejection")  # greedily, both are right
    assert run.again(draft).tolist() == run.sequences.tolist()
    assert draft.last_speculation.num_accepted_ngram_tokens > 0
    (seed, first), *others = captured
    assert first.last_node.tolist() == (seed.valid.sum(1) - 1).tolist() and seed.num_nodes == 3
    assert all(wanted.last_node.tolist() == [2, 2, 2] and tree.num_nodes == 18 for tree, wanted in others)


def test_a_partial_cache_makes_room_for_paths_of_ngrams(target, plain_run, monkeypatch):
    """They are deeper than the draft's own tree; without room for them their tokens would replace the sinks."""
    counts, slots = [], []
    before(monkeypatch, PartialCache, "due", lambda own, count: counts.append(count))
    after(monkeypatch, PartialKVPolicy, "slot", lambda slot, *_: slots.append(slot))
    run = plain_run(target("llama", **SMALL), (21,), max_new_tokens=24, eos_token_id=NEVER)
    draft = joined_draft("partial_kv", run.model, ngram_num_tokens=8, partial_kv_budget=15)
    assert run.again(draft).tolist() == run.sequences.tolist()
    assert set(counts[1:]) == {8 + 1}  # all of a path and the bonus token; the first count is that of the prompt's end
    assert min(slots) >= SINK_TOKENS
