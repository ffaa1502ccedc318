"""Chunked losses against torch's own on all logits at once, and hits against the largest logits."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from hf_longspec.training.losses import DraftLoss
from tests.tiny_targets import tiny_target

LEVELS, PLACES, VOCAB = 2, 37, 53
IDS = torch.arange(1, VOCAB, 2)
# Sums of 37 losses around 4 and their gradients, in another order of summation.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}


class Ends:
    """A head with a softcap, as in gemma2, that counts what it gets for all tokens of the target."""

    def __init__(self, dtype):
        self.model = tiny_target("gemma2", vocab_size=VOCAB).to(dtype).requires_grad_(False)
        self.config, self.calls = self.model.config, []

    def head(self, hidden, module=None):
        if module is None:
            self.calls.append(len(hidden))
        return 20 * torch.tanh((module or self.model.lm_head)(hidden) / 20)


@pytest.fixture(params=[torch.float64, torch.float32], ids=str)
def case(request):
    """States of the draft, which tokens count, states of the target and labels."""
    generator, dtype = torch.Generator().manual_seed(0), request.param
    ends = Ends(dtype)

    def normal(*shape):
        return 5 * torch.randn(*shape, ends.config.hidden_size, generator=generator, dtype=torch.float64).to(dtype)

    counts = torch.rand(LEVELS, PLACES, generator=generator) < 0.8
    labels = IDS[torch.randint(len(IDS), (PLACES,), generator=generator)]
    return ends, normal(LEVELS, PLACES).requires_grad_(), {"ce": labels, "kl": normal(PLACES)}, counts


def by_hand(loss, ends, states, goals, counts, norm, ids):
    """The losses of one level, with a loop over the tokens."""
    ids = torch.arange(VOCAB) if ids is None else ids
    draft = ends.head(states)[:, ids]
    if loss == "ce":
        return cross_entropy(draft[counts], torch.searchsorted(ids, goals)[counts], reduction="sum")
    target = ends.head(norm(goals))[:, ids].softmax(-1).detach()
    places = zip(target, draft.softmax(-1), counts, strict=True)
    return sum((p * (p.log() - q.log())).sum() for p, q, counted in places if counted)


@pytest.mark.parametrize("loss", ["ce", "kl"])
@pytest.mark.parametrize(("chunk_size", "ids", "is_own"), [(1, None, True), (8, IDS, False), (1000, None, False)])
def test_loss_and_gradient_equal_those_of_all_logits(case, loss, chunk_size, ids, is_own):
    """Through the head of the target, and through one that is run again for the gradient of its weights."""
    ends, states, goals, counts = case
    norm, weights = torch.nn.LayerNorm(states.shape[-1], dtype=states.dtype), torch.tensor([1 / 7, 1 / 5]).to(states)
    head = ends.model.lm_head.requires_grad_(is_own)
    inputs = [states, head.weight] if is_own else [states]
    objective = DraftLoss(loss, ends, chunk_size, norm, ids)
    totals, _ = objective(states, goals[loss], counts, ends.head if is_own else None)
    found = torch.autograd.grad(totals @ weights, inputs)
    levels = zip(states, counts, strict=True)
    expected = torch.stack([by_hand(loss, ends, own, goals[loss], counted, norm, ids) for own, counted in levels])
    tolerance = TOLERANCE[states.dtype]
    torch.testing.assert_close(totals, expected, rtol=tolerance, atol=tolerance)
    for gradient, wanted in zip(found, torch.autograd.grad(expected @ weights, inputs), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=tolerance, atol=tolerance * wanted.abs().max().item())


@pytest.mark.parametrize("loss", ["ce", "kl"])
@pytest.mark.parametrize("ids", [None, IDS], ids=["all", "some"])
def test_hits_are_the_most_likely_tokens(case, loss, ids):
    """Without any for a token that the draft does not have."""
    ends, states, goals, _ = case
    known = torch.arange(VOCAB) if ids is None else ids
    with torch.no_grad():
        goals["kl"][::3] = states[0, ::3]
        best = known[ends.head(states)[..., known].argmax(-1)]
        goals["ce"][::3] = best[0, ::3]
        wanted = goals["ce"] if loss == "ce" else ends.head(goals["kl"]).argmax(-1)
        hits = DraftLoss(loss, ends, 8, None, ids)(states, goals[loss])[1]
    assert torch.equal(hits, best == wanted) and 0 < int(hits.sum()) < hits.numel()
    assert torch.isin(wanted, known).all() == (loss == "ce" or ids is None)


def test_never_more_logits_than_a_chunk_and_those_of_the_target_once(case):
    ends, states, goals, _ = case
    totals, _ = DraftLoss("kl", ends, 10)(states, goals["kl"])
    totals.sum().backward()
    assert ends.calls == [10] * 9 + [7] * 3  # of the target, and of each level


def test_logits_of_all_tokens_only_where_a_token_of_the_draft_may_be_hit(case):
    """Where a level has the target's most likely token of the draft's vocabulary."""
    ends, states, goals, _ = case
    with torch.no_grad():
        goals["kl"][::3] = states[0, ::3]
        best = ends.head(states)[..., IDS].argmax(-1)
        candidates = (best == ends.head(goals["kl"])[:, IDS].argmax(-1)).any(0)
        ends.calls.clear()
        DraftLoss("kl", ends, 1000, None, IDS)(states, goals["kl"])
    assert ends.calls == [int(candidates.sum())] and 0 < ends.calls[0] < PLACES


@pytest.mark.parametrize("is_own", [False, True])
def test_a_frozen_head_gets_no_gradient_and_an_empty_batch_gives_zero(case, is_own):
    ends, states, goals, _ = case
    head = torch.nn.Linear(states.shape[-1], VOCAB, dtype=states.dtype) if is_own else None
    total, hits = DraftLoss("ce", ends, 4)(states[:1, :0], goals["ce"][:0], head=head)
    total.sum().backward()
    assert total == 0 and (states.grad == 0).all() and hits.shape == (1, 0)
    assert not is_own or (head.weight.grad == 0).all()
    assert ends.model.lm_head.weight.grad is None


def test_a_bfloat16_head_is_scored_in_float32(case):
    """The logits are in bfloat16, the loss in float32. Only the rounding of the logits remains."""
    _, states, goals, _ = case
    ends, states = Ends(torch.bfloat16), states.detach().float()[:1]
    total, _ = DraftLoss("ce", ends, 8)(states, goals["ce"])
    exact = cross_entropy(ends.head(states[0].bfloat16()).double(), goals["ce"], reduction="sum")
    assert total.dtype == torch.float32
    torch.testing.assert_close(total[0].double(), exact, rtol=1e-6, atol=0)
