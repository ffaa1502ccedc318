"""The probes against trees, distributions and selections worked out by hand, and against the loop's own counts."""

from types import SimpleNamespace

import pytest
import torch

import hf_longspec
from hf_longspec.attention_backends.lengths import SeqLens
from hf_longspec.bench.calls import Decoding, run_call, watched_drafters
from hf_longspec.bench.probes import AcceptanceProbe, SelectionProbe
from hf_longspec.bench.prompts import left_padded
from hf_longspec.generation.draft_tree import DraftTree
from hf_longspec.generation.verification import walk
from hf_longspec.testing import tiny_prompts
from tests.bench.conftest import specattn

# Steps and acceptance are counted.
pytestmark = pytest.mark.usefixtures("every_step_speculates")
# Two attention kernels in float32; the probabilities are at most 1.
KERNEL_ERROR = 1e-5


@pytest.fixture
def prompt(target):
    rows, _ = tiny_prompts(target.config.vocab_size, [60, 60])
    return left_padded(list(torch.as_tensor(rows)), 0)


def test_a_tree_is_counted_by_hand():
    """Root 5; children 8, 2; below 2: 3, 4. Row 0 goes 2, then 9, which no node has. Row 1 goes 8, and ends there."""
    tokens = torch.tensor([[5, 8, 2, 3, 4]] * 2)
    tree = DraftTree(tokens, torch.tensor([[-1, 0, 0, 2, 2]] * 2), torch.ones(2, 5, dtype=torch.bool), max_depth=2)
    choice = torch.tensor([[2, 0, 9, 0, 0], [8, 1, 0, 0, 0]])
    acceptance = walk(tree, choice)
    p = torch.full((10,), 0.02)
    p[3], p[4], p[9] = 0.2, 0.1, 1 - 0.3 - 7 * 0.02
    scores = torch.zeros(2, 3, 10)  # uniform, but after the node where row 0 ends
    scores[0, 1] = p.log()
    probe = AcceptanceProbe()
    probe._count(tree, acceptance, scores, [True, True])
    assert (probe.reached, probe.accepted) == ([2, 1], [2, 0])
    assert [round(p, 6) for p, _ in probe.rejected] == [0.2, 0.1]
    assert all(q is None for _, q in probe.rejected)
    probe._count(tree, acceptance, scores, [False, False])
    assert probe.reached == [2, 1]


def test_a_chain_with_a_distribution_gives_both_probabilities():
    q = torch.tensor([[[0.0] * 4, [0.1, 0.7, 0.1, 0.1], [0.25] * 4]])
    tree = DraftTree.chain(torch.tensor([[0, 1, 2]]), q=q)
    acceptance = walk(tree, torch.tensor([[3, 0, 0]]))
    target = torch.tensor([0.2, 0.14, 0.06, 0.6])
    probe = AcceptanceProbe()
    probe._count(tree, acceptance, target.log().expand(1, 3, 4), [True])
    ((p, own),) = probe.rejected
    assert (p, own) == (pytest.approx(0.14), pytest.approx(0.7))
    found = probe.to_dict()["rejected"]
    assert found["rate"]["mean"] == pytest.approx(0.2)
    assert found["p"]["deciles"][1] == 1 and found["q"]["count"] == 1


@pytest.mark.parametrize(("kind", "temperature"), [("specattn", 0.0), ("specattn", 1.0), ("ngram", 1.0)])
def test_counts_are_those_of_the_loop(kind, temperature, target, prompt):
    """The loop counts what is emitted, watched elsewhere; the probe changes neither text nor counts."""
    if kind == "specattn":
        draft = specattn(target)
    else:
        draft = hf_longspec.NgramDraftModel.from_target(target, num_assistant_tokens=3)
    options = {"decoding": Decoding(temperature=temperature), "tokens": 20, "seed": 3}
    plain = run_call(target, draft, prompt, **options)
    probe = AcceptanceProbe()
    with watched_drafters(draft, probe.watch):
        probed = run_call(target, draft, prompt, **options)
    assert torch.equal(plain.text, probed.text)
    assert plain.accepted == probed.accepted
    deeper = [sum(plain.accepted[depth:]) for depth in range(1, len(plain.accepted))]
    assert [count for count in probe.accepted if count] == deeper
    assert probe.reached[0] <= plain.steps
    if kind == "specattn":
        assert probe.reached[0] == plain.steps
        refused = plain.steps - (plain.accepted + [0] * 4)[3]
        assert len(probe.rejected) == refused > 0
        assert all(0 <= p <= 1 and q is not None and 0 < q <= 1 for p, q in probe.rejected)
    assert "drafter" not in vars(draft)


class Placed(AcceptanceProbe):
    """Record the number of tokens of the text, the first one included, before each rejected token."""

    def __init__(self):
        super().__init__()
        self.emitted, self.places = 1, []

    def _count(self, tree, acceptance, scores, growing):
        before = len(self.rejected)
        super()._count(tree, acceptance, scores, growing)
        self.emitted += int(acceptance.num_nodes[0])
        refused = int(tree.tokens[0, int(acceptance.num_nodes[0])]) if len(self.rejected) > before else None
        self.places.append((self.emitted - 1, refused))


def test_the_target_s_probability_of_a_rejected_token_is_that_of_a_plain_forward(target, prompt):
    """Recomputed by one forward over the finished text."""
    draft = specattn(target)
    one = tuple(part[:1] for part in prompt)
    probe = Placed()
    with watched_drafters(draft, probe.watch):
        call = run_call(target, draft, one, decoding=Decoding(), tokens=30, seed=0)
    with torch.no_grad():
        probabilities = target(torch.cat([one[0], call.text], dim=1)).logits[0].softmax(-1)
    places = [(place, token) for place, token in probe.places if token is not None]
    inside = [(place, token, p) for (place, token), (p, _) in zip(places, probe.rejected, strict=True) if place < 30]
    assert len(inside) > 3
    for place, token, p in inside:
        assert p == pytest.approx(float(probabilities[one[0].shape[1] - 1 + place, token]), abs=KERNEL_ERROR)
        assert token != int(call.text[0, place])


def test_overlap_of_selections_by_hand():
    selections = iter([[[0, 1, 2, 3]], [[0, 1, 7, 8, 9]], [[7, 8, 9, 0, 5]]])
    drafter = SimpleNamespace(_select=lambda *_: torch.tensor([next(selections)]))
    probe = SelectionProbe()
    probe.watch(drafter, None)
    for count, kept in ((4, 1), (5, 2), (5, 1)):
        drafter._select(0, SimpleNamespace(capture=None, num_nodes=SeqLens([kept])), [count])
    assert probe.overlaps == {0: [0.5, pytest.approx(0.8)]}


def test_overlap_of_pairs_by_hand():
    scores = torch.tensor([[[[9.0, 8.0, 0.0, 0.0], [9.0, 0.0, 8.0, 0.0], [0.0, 0.0, 8.0, 9.0]]]])
    probe = SelectionProbe()
    probe._pair(scores, [2], [2], [1])
    assert probe.pairs == {1: [0.5, 0.5], 2: [0.0]}
    probe._pair(scores, [2], [2], [0])  # a row that is done
    assert len(probe.pairs[1]) == 2


def test_other_drafts_select_nothing(target, prompt):
    draft, probe = hf_longspec.NgramDraftModel.from_target(target), SelectionProbe()
    with watched_drafters(draft, probe.watch):
        run_call(target, draft, prompt, decoding=Decoding(), tokens=6, seed=0)
    assert probe.to_dict() == {"overlap": {}, "pair_overlap": {}}
