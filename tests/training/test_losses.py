"""Chunked losses against torch's own on all logits at once."""

import pytest
import torch
from torch.nn.functional import cross_entropy as torch_cross_entropy

from hf_longspec.training.losses import cross_entropy, forward_kl, head_loss

PLACES, WIDTH, VOCAB = 37, 12, 53
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
        "hidden": normal(PLACES, WIDTH).requires_grad_(),
        "target": normal(PLACES, WIDTH),
        "head": lambda hidden: 20 * torch.tanh(hidden @ weight.T / 20),  # with a softcap, as in gemma2
        "labels": torch.randint(VOCAB, (PLACES,), generator=generator),
    }


def plain_kl(case, hidden):
    """The definition, with a loop over places."""
    draft, target = (case["head"](states).softmax(-1) for states in (hidden, case["target"]))
    return sum((p * (p.log() - q.log())).sum() for p, q in zip(target, draft, strict=True))


def plain_ce(case, hidden):
    return torch_cross_entropy(case["head"](hidden), case["labels"], reduction="sum")


def objective(case, name):
    return cross_entropy(case["labels"]) if name == "ce" else forward_kl(case["target"], case["head"])


@pytest.mark.parametrize("chunk_size", [1, 8, PLACES, 1000])
@pytest.mark.parametrize(("name", "plain"), [("ce", plain_ce), ("kl", plain_kl)])
def test_loss_and_gradient_equal_those_of_all_logits(case, name, plain, chunk_size):
    total, _ = head_loss(case["hidden"], case["head"], objective(case, name), chunk_size)
    (gradient,) = torch.autograd.grad(total / 7, case["hidden"])
    expected = plain(case, case["hidden"])
    (expected_gradient,) = torch.autograd.grad(expected / 7, case["hidden"])
    tolerance = TOLERANCE[case["dtype"]]
    torch.testing.assert_close(total, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(gradient, expected_gradient, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["ce", "kl"])
def test_hits_are_the_places_where_the_most_likely_token_is_the_wanted_one(case, name):
    with torch.no_grad():
        drafted = case["head"](case["hidden"]).argmax(-1)
        wanted = case["head"](case["target"]).argmax(-1) if name == "kl" else case["labels"]
        wanted[::3] = drafted[::3]  # some hits among many misses
        case["labels"] = wanted
        case["target"][::3] = case["hidden"][::3]
    _, hits = head_loss(case["hidden"], case["head"], objective(case, name), 5)
    assert hits.tolist() == (drafted == wanted).tolist()
    assert 0 < hits.sum() < PLACES


def test_never_more_logits_than_a_chunk(case):
    sizes = []

    def head(hidden):
        sizes.append(len(hidden))
        return case["head"](hidden)

    total, _ = head_loss(case["hidden"], head, cross_entropy(case["labels"]), 10)
    total.backward()
    assert sizes == [10, 10, 10, 7]


def test_a_frozen_head_gets_no_gradient_and_an_empty_batch_gives_zero():
    head = torch.nn.Linear(WIDTH, VOCAB)
    hidden = torch.randn(0, WIDTH, requires_grad=True)
    total, hits = head_loss(hidden, head, cross_entropy(torch.zeros(0, dtype=torch.long)), 4)
    total.backward()
    assert total == 0 and hidden.grad.shape == (0, WIDTH) and len(hits) == 0
    full = torch.randn(3, WIDTH, requires_grad=True)
    head_loss(full, head, cross_entropy(torch.zeros(3, dtype=torch.long)), 2)[0].backward()
    assert head.weight.grad is None and full.grad.abs().sum() > 0


def test_a_bfloat16_head_is_scored_in_float32(case):
    """Logits in bfloat16, everything behind them in float32: within the rounding of the logits, not of the sum."""
    hidden = case["hidden"].detach().float()
    weight = torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(1))
    head = lambda states: states.bfloat16() @ weight.bfloat16().T  # noqa: E731
    total, _ = head_loss(hidden, head, cross_entropy(case["labels"]), 8)
    exact = torch_cross_entropy(head(hidden).double(), case["labels"], reduction="sum")
    assert total.dtype == torch.float32
    torch.testing.assert_close(total.double(), exact, rtol=1e-6, atol=0)
