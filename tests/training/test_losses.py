"""Chunked losses against torch's own on all logits at once."""

import pytest
import torch
from torch.nn.functional import cross_entropy as torch_cross_entropy

from hf_longspec.training.losses import cross_entropy, forward_kl, head_loss, rank

LEVELS, PLACES, WIDTH, VOCAB = 2, 37, 12, 53
# Sums of 37 losses around 4 and their gradients, in another order of summation.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}


@pytest.fixture(params=[torch.float64, torch.float32], ids=str)
def case(request):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(request.param)

    weight = normal(VOCAB, WIDTH)
    return {
        "dtype": request.param,
        "hidden": normal(LEVELS, PLACES, WIDTH).requires_grad_(),
        "counts": torch.rand(LEVELS, PLACES, generator=generator) < 0.8,
        "target": normal(PLACES, WIDTH),
        "head": lambda hidden: 20 * torch.tanh(hidden @ weight.T / 20),  # with a softcap, as in gemma2
        "labels": torch.randint(VOCAB, (PLACES,), generator=generator),
    }


def plain_kl(case, hidden, counts):
    """The definition, with a loop over places."""
    draft, target = (case["head"](states).softmax(-1) for states in (hidden, case["target"]))
    places = zip(target, draft, counts, strict=True)
    return sum((p * (p.log() - q.log())).sum() for p, q, counted in places if counted)


def plain_ce(case, hidden, counts):
    return torch_cross_entropy(case["head"](hidden)[counts], case["labels"][counts], reduction="sum")


def objective(case, name):
    return cross_entropy(case["labels"]) if name == "ce" else forward_kl(case["target"], case["head"])


@pytest.mark.parametrize("chunk_size", [1, 8, PLACES, 1000])
@pytest.mark.parametrize(("name", "plain"), [("ce", plain_ce), ("kl", plain_kl)])
def test_loss_and_gradient_equal_those_of_all_logits(case, name, plain, chunk_size):
    hidden, weights = case["hidden"], torch.tensor([1 / 7, 1 / 5], dtype=case["dtype"])
    totals, _ = head_loss(hidden, case["head"], objective(case, name), chunk_size, case["counts"])
    (gradient,) = torch.autograd.grad(totals @ weights, hidden)
    expected = torch.stack([plain(case, *level) for level in zip(hidden, case["counts"], strict=True)])
    (expected_gradient,) = torch.autograd.grad(expected @ weights, hidden)
    tolerance = TOLERANCE[case["dtype"]]
    torch.testing.assert_close(totals, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(gradient, expected_gradient, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["ce", "kl"])
def test_ranks_are_the_wanted_tokens_places_in_the_drafts_order(case, name):
    with torch.no_grad():
        order = case["head"](case["hidden"]).argsort(-1, descending=True)
        wanted = case["head"](case["target"]).argmax(-1) if name == "kl" else case["labels"]
        wanted[::3] = order[0, ::3, 0]  # some hits among many misses
        case["labels"] = wanted
        case["target"][::3] = case["hidden"][0, ::3]
    _, ranks = head_loss(case["hidden"], case["head"], objective(case, name), 5)
    assert ranks.tolist() == (order == wanted[:, None]).nonzero()[:, -1].view(LEVELS, PLACES).tolist()
    assert 0 < (ranks[0] == 0).sum() < PLACES


def test_of_equal_logits_the_lower_id_comes_first():
    """As in argmax, so that a tie in bfloat16 is a hit exactly when the draft would propose the wanted token."""
    logits = torch.tensor([[2.0, 5.0, 5.0, 1.0, 5.0]]).expand(5, -1)
    assert rank(logits, torch.arange(5)[:, None]).tolist() == [3, 0, 1, 4, 2]


def test_never_more_logits_than_a_chunk(case):
    sizes = []

    def head(hidden):
        sizes.append(len(hidden))
        return case["head"](hidden)

    totals, _ = head_loss(case["hidden"], head, cross_entropy(case["labels"]), 10)
    totals.sum().backward()
    assert sizes == [10, 10, 10, 10, 10, 10, 7, 7]


def test_what_all_levels_are_compared_with_is_computed_once(case):
    sizes = []

    def target_head(hidden):
        sizes.append(len(hidden))
        return case["head"](hidden)

    head_loss(case["hidden"], case["head"], forward_kl(case["target"], target_head), 20)
    assert sizes == [20, 17]


def test_a_frozen_head_gets_no_gradient_and_an_empty_batch_gives_zero():
    head = torch.nn.Linear(WIDTH, VOCAB)
    hidden = torch.randn(1, 0, WIDTH, requires_grad=True)
    total, ranks = head_loss(hidden, head, cross_entropy(torch.zeros(0, dtype=torch.long)), 4)
    total.backward()
    assert total == 0 and hidden.grad.shape == (1, 0, WIDTH) and ranks.shape == (1, 0)
    full = torch.randn(1, 3, WIDTH, requires_grad=True)
    head_loss(full, head, cross_entropy(torch.zeros(3, dtype=torch.long)), 2)[0].backward()
    assert head.weight.grad is None and full.grad.abs().sum() > 0


def test_a_bfloat16_head_is_scored_in_float32(case):
    """Logits in bfloat16, everything behind them in float32: within the rounding of the logits, not of the sum."""
    hidden = case["hidden"][:1].detach().float()
    weight = torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(1))
    head = lambda states: states.bfloat16() @ weight.bfloat16().T  # noqa: E731
    total, _ = head_loss(hidden, head, cross_entropy(case["labels"]), 8)
    exact = torch_cross_entropy(head(hidden[0]).double(), case["labels"], reduction="sum")
    assert total.dtype == torch.float32
    torch.testing.assert_close(total[0].double(), exact, rtol=1e-6, atol=0)
