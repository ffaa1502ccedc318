"""Text and trees of every drafter under a gate that opens and shuts many times.

The text equals that without speculation, greedy and sampled. A drafter that lost its state during plain steps would
still give this text. Its trees are therefore compared with those of a drafter that begins after the plain steps.
"""

import json

import pytest
import torch

from hf_longspec import NgramDraftModel, PlainDraftModel, SpecAttnDraftModel
from hf_longspec.modeling.longspec.generation_longspec import LongSpecDrafter
from hf_longspec.modeling.shared.ngrams import NgramDrafter
from tests.gates import FlippingGate, ungated
from tests.pairwise import few
from tests.tiny_targets import (
    RandomTreeDraftModel,
    generate,
    random_eagle3_draft,
    random_longspec_draft,
    random_tokenswift_draft,
    tiny_target,
)
from tests.watching import after

LENGTHS = (33, 3, 13)
NEW = 40
NGRAMS = {"ngram_candidates": 2, "ngram_num_tokens": 3}
SPECATTN = {"num_assistant_tokens": 3, "sparse_ratio": 0.5, "sparse_min_tokens": 6, "acceptance": "coupled"}
PARTIAL = {"self_draft": "partial_kv", "tree_branching": [2, 1, 1, 1], "partial_kv_budget": 12, "partial_kv_recent": 2}
DRAFTS = {
    "longspec": lambda model: random_longspec_draft(model, window=8, tree_widths=[3, 2]),
    "longspec, n-grams": lambda model: random_longspec_draft(model, window=8, tree_widths=[3, 2], **NGRAMS),
    "eagle3": lambda model: random_eagle3_draft(model, window=8, tree_widths=[6, 4]),
    "eagle3, n-grams": lambda model: random_eagle3_draft(model, window=8, tree_widths=[3, 2], **NGRAMS),
    "specattn": lambda model: SpecAttnDraftModel.from_target(model, **SPECATTN),
    "specattn, window": lambda model: SpecAttnDraftModel.from_target(model, **SPECATTN, selection="window"),
    "specattn, each row": lambda model: SpecAttnDraftModel.from_target(model, **SPECATTN, selection="last_accepted"),
    "tokenswift": lambda model: random_tokenswift_draft(model, tree_branching=[1, 2, 1, 1]),
    "tokenswift, partial": lambda model: random_tokenswift_draft(model, **PARTIAL),
    "tokenswift, partial, n-grams": lambda model: random_tokenswift_draft(model, **PARTIAL, **NGRAMS),
    "n-grams": NgramDraftModel.from_target,
    "random trees": RandomTreeDraftModel.from_target,
}
# Every draft on one architecture, greedy or sampled in turn.
CASES = [(kind, ("llama", "gemma3", "gpt_oss")[place % 3], place % 2 == 0) for place, kind in enumerate(DRAFTS)]


@pytest.fixture
def flipping(monkeypatch):
    """Replace all gates by gates that open and shut at random, and return a list of them."""
    gates = []

    def make(drafter, *_):
        gates.append(FlippingGate(drafter, seed=len(gates)))
        return gates[-1]

    monkeypatch.setattr("hf_longspec.generation.special_cases.gate.gate_of", make)
    return gates


@pytest.mark.parametrize(("kind", "name", "sampled"), few(CASES, 6))
def test_the_text_does_not_depend_on_the_gate(target, flipping, kind, name, sampled):
    model = target(name)
    options = {"max_new_tokens": 25, "do_sample": sampled}
    expected = generate(model, PlainDraftModel.from_target(model), **options)
    draft = DRAFTS[kind](model)
    assert torch.equal(generate(model, draft, **options), expected)
    stats = draft.last_speculation
    assert flipping[-1].turns >= 5
    assert stats.num_plain_steps >= 6 and stats.num_spec_steps >= 4
    # every token but a row's first was emitted by one kind of step or the other
    assert stats.num_plain_steps + stats.num_emitted_tokens == len(LENGTHS) * 24


class Recorded:
    """Record every tree of a draft, and the number of tokens that are committed before it."""

    def __init__(self, draft, monkeypatch):
        self.draft, self.trees = draft, []

        def record(drafter, binding):
            note = lambda tree, root: self.trees.append((binding.cache.lengths.host, tree))  # noqa: E731
            after(monkeypatch, drafter, "propose", note)

        after(monkeypatch, draft, "drafter", record)

    def first_tree(self, model, tokens):
        """Return the first tree after a prompt."""
        self.trees.clear()
        ids = torch.tensor([tokens])
        generate(model, self.draft, input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=3)
        return self.trees[0][1]


class RestingGate(FlippingGate):
    """A gate that is shut for `pause` steps, and then drafts and verifies all."""

    def __init__(self, drafter, pause):
        super().__init__(drafter)
        self.pause = pause

    def speculates(self):
        self.pause -= 1
        self.widths = self._choices[-1][0]
        self._begin_chain()
        return self.pause < 0

    def goes_on(self, shares):
        self._said.append(shares)
        return len(self._said) < len(self.widths)

    def kept(self, may_cut=True):
        return len(self._said)

    def cut(self, rows, nodes, most):
        return [[path for path, _ in row] for row in rows], most


# SpecAttn selects by the queries of the last verification, which differ here, and a partial cache depends on the step
# that it was built in. Both have their own tests.
@pytest.mark.parametrize("kind", ["longspec", "longspec, n-grams", "tokenswift", "n-grams"])
@pytest.mark.parametrize("pause", [1, 19])
def test_after_plain_steps_the_tree_matches_a_fresh_drafter(target, monkeypatch, kind, pause):
    model = target("llama")
    draft = DRAFTS[kind](model)
    recorded = Recorded(draft, monkeypatch)
    monkeypatch.setattr(
        "hf_longspec.generation.special_cases.gate.gate_of", lambda drafter, *_: RestingGate(drafter, pause)
    )
    text = generate(model, draft, (21,), max_new_tokens=NEW).tolist()
    committed, tree = recorded.trees[0]
    # the prompt, one token from the prefill, the plain steps of the gate, and one that updates the drafter
    assert committed == (21 + pause + 1,)
    monkeypatch.setattr("hf_longspec.generation.special_cases.gate.gate_of", ungated)
    fresh = recorded.first_tree(model, text[0][: committed[0]])
    assert fresh.tokens.tolist() == tree.tokens.tolist() and fresh.parents.tolist() == tree.parents.tolist()
    assert fresh.valid[:, 1:].any() or (kind == "n-grams" and pause < 19)  # the text has not repeated itself yet


class GateOfNgrams(RestingGate):
    """A gate that is shut for `pause` steps, and then verifies n-grams without the draft."""

    def speculates(self):
        self.only_ngrams = super().speculates()
        return False


def test_ngrams_know_the_text_of_steps_without_them(target, monkeypatch):
    """Also of the steps before, as they are never resumed."""
    model, trees = target("llama", vocab_size=12), []
    draft, pause = random_longspec_draft(model, window=8, tree_widths=[3, 2], **NGRAMS), 5
    note = lambda tree, own, root: trees.append((own.binding.cache.lengths.host, tree))  # noqa: E731
    after(monkeypatch, NgramDrafter, "propose", note)
    after(monkeypatch, LongSpecDrafter, "propose", lambda *_: pytest.fail("only n-grams are verified"))
    monkeypatch.setattr(
        "hf_longspec.generation.special_cases.gate.gate_of", lambda drafter, *_: GateOfNgrams(drafter, pause)
    )
    expected = generate(model, lengths=(21,), max_new_tokens=NEW, eos_token_id=None)
    text = generate(model, draft, (21,), max_new_tokens=NEW, eos_token_id=None)
    assert torch.equal(text, expected) and draft.last_speculation.num_accepted_ngram_tokens > 0
    (committed, tree), *_ = trees
    assert committed == (21 + pause,)
    monkeypatch.setattr("hf_longspec.generation.special_cases.gate.gate_of", ungated)
    settings = {"num_assistant_tokens": NGRAMS["ngram_num_tokens"], "ngram_candidates": NGRAMS["ngram_candidates"]}
    trees.clear()
    ids = text[:, : committed[0]]
    fresh = NgramDraftModel.from_target(model, **settings)
    generate(model, fresh, input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=3)
    assert trees[0][1].tokens.tolist() == tree.tokens.tolist() and trees[0][1].num_nodes > 1


def test_what_the_gate_did_is_reported(plain_run):
    run = plain_run("llama", (21,), max_new_tokens=250, eos_token_id=None)
    out = run.again(run.draft("tree", num_nodes=5, luck=0.9), return_dict_in_generate=True)
    assert out.sequences.tolist() == run.sequences.tolist()
    stats = out.speculation
    assert stats.num_emitted_tokens + stats.num_plain_steps == 249
    assert stats.num_forwards == stats.num_spec_steps + stats.num_plain_steps
    assert stats.mean_num_nodes == 1 + stats.num_draft_tokens / stats.num_spec_steps
    assert 1 < stats.num_expected_tokens / stats.num_spec_steps <= 5
    assert f"{stats.num_plain_steps} plain steps" in str(stats) and f"{stats.speedup:.2f}x of no draft" in str(stats)
    assert json.loads(json.dumps(stats.to_dict()))["speedup"] == stats.speedup > 0


def test_plain_steps_are_part_of_the_statistics_per_step(flipping):
    """`hf-longspec generate --show-drafts` colours by these; a missing step would shift all later ones."""
    model = tiny_target("llama")
    draft = NgramDraftModel.from_target(model)
    generate(model, draft, max_new_tokens=NEW)
    stats = draft.last_speculation
    steps = [list(zip(*rows, strict=True)) for rows in zip(stats.emitted_per_step, stats.drafted_per_step, strict=True)]
    assert [1 + sum(emitted for emitted, _ in row) for row in steps] == [NEW] * len(LENGTHS)
    assert sum((emitted, drafted) == (1, 0) for row in steps for emitted, drafted in row) >= stats.num_plain_steps > 0
    assert sum(map(len, steps)) == stats.num_plain_steps + stats.num_spec_steps
