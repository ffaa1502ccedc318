"""Chunked losses against torch's own on all logits at once, and Liger's kernel against ours."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy as torch_cross_entropy

from hf_longspec.attention_backends.triton.config import INTERPRETED
from hf_longspec.generation.target_modules import TargetEnds
from hf_longspec.training import frozen_target
from hf_longspec.training.frozen_target import cross_entropy, forward_kl, head_loss, liger_cross_entropy, rank
from tests.tiny_targets import tiny_target

LEVELS, PLACES, WIDTH, VOCAB = 2, 37, 12, 53
# Sums of 37 losses around 4 and their gradients, in another order of summation.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}


@pytest.fixture
def case(request):
    """Hidden states, labels and a head, in float64 unless a test is parametrized with a dtype."""
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(request, "param", torch.float64)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    weight = normal(VOCAB, WIDTH)
    return {
        "dtype": dtype,
        "hidden": normal(LEVELS, PLACES, WIDTH).requires_grad_(),
        "counts": torch.rand(LEVELS, PLACES, generator=generator) < 0.8,
        "target": normal(PLACES, WIDTH),
        "head": lambda hidden: 20 * torch.tanh(hidden @ weight.T / 20),  # with a softcap, as in gemma2
        "labels": torch.randint(VOCAB, (PLACES,), generator=generator),
    }


def plain_kl(case, hidden, counts):
    """The definition, with a loop over tokens."""
    draft, target = (case["head"](states).softmax(-1) for states in (hidden, case["target"]))
    places = zip(target, draft, counts, strict=True)
    return sum((p * (p.log() - q.log())).sum() for p, q, counted in places if counted)


def plain_ce(case, hidden, counts):
    return torch_cross_entropy(case["head"](hidden)[counts], case["labels"][counts], reduction="sum")


def objective(case, name):
    return cross_entropy(case["labels"]) if name == "ce" else forward_kl(case["target"], case["head"])


@pytest.mark.parametrize(
    ("case", "chunk_size"),
    [(torch.float64, 1), (torch.float64, 8), (torch.float32, PLACES), (torch.float32, 1000)],
    indirect=["case"],
)
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
def test_ranks_count_the_tokens_before_the_wanted_one(case, name):
    with torch.no_grad():
        order = case["head"](case["hidden"]).argsort(-1, descending=True)
        wanted = case["head"](case["target"]).argmax(-1) if name == "kl" else case["labels"]
        wanted[::3] = order[0, ::3, 0]  # some hits among many misses
        case["labels"] = wanted
        case["target"][::3] = case["hidden"][0, ::3]
    _, ranks = head_loss(case["hidden"], case["head"], objective(case, name), 5)
    assert ranks.tolist() == (order == wanted[:, None]).nonzero()[:, -1].view(LEVELS, PLACES).tolist()
    assert 0 < (ranks[0] == 0).sum() < PLACES


def test_the_lower_id_comes_first_of_equal_logits():
    """As in argmax, so that a tie in bfloat16 is a hit exactly when the draft would propose the wanted token."""
    logits = torch.tensor([[2.0, 5.0, 5.0, 1.0, 5.0]]).expand(5, -1)
    assert rank(logits, torch.arange(5)[:, None]).tolist() == [3, 0, 1, 4, 2]


def test_never_more_logits_than_a_chunk_and_those_of_the_target_once(case):
    sizes = {"draft": [], "target": []}

    def head(name):
        return lambda hidden: sizes[name].append(len(hidden)) or case["head"](hidden)

    totals, _ = head_loss(case["hidden"], head("draft"), forward_kl(case["target"], head("target")), 10)
    totals.sum().backward()
    assert sizes == {"draft": [10, 10, 10, 10, 10, 10, 7, 7], "target": [10, 10, 10, 7]}


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
    """The logits are in bfloat16, the loss in float32. Only the rounding of the logits remains."""
    hidden = case["hidden"][:1].detach().float()
    weight = torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(1))
    head = lambda states: states.bfloat16() @ weight.bfloat16().T  # noqa: E731
    total, _ = head_loss(hidden, head, cross_entropy(case["labels"]), 8)
    exact = torch_cross_entropy(head(hidden[0]).double(), case["labels"], reduction="sum")
    assert total.dtype == torch.float32
    torch.testing.assert_close(total[0].double(), exact, rtol=1e-6, atol=0)


ON_GPU = SimpleNamespace(is_cuda=True)


def test_ligers_loss_is_used_on_gpus_with_a_head_that_it_supports(monkeypatch):
    """Granite divides its logits. Gemma 2 has a softcap, which Liger applies too."""
    llama, gemma2, granite = (TargetEnds(tiny_target(name)) for name in ("llama", "gemma2", "granite"))
    monkeypatch.setattr(frozen_target, "LigerFusedLinearCrossEntropyLoss", lambda **settings: None)
    assert liger_cross_entropy(llama, ON_GPU) is not None and liger_cross_entropy(gemma2, ON_GPU) is not None
    assert liger_cross_entropy(granite, ON_GPU) is None
    assert liger_cross_entropy(llama, torch.zeros(1)) is None
    monkeypatch.setattr(frozen_target, "LigerFusedLinearCrossEntropyLoss", None)  # not installed
    assert liger_cross_entropy(llama, ON_GPU) is None


def test_ligers_loss_and_gradient_are_ours():
    """Without a softcap, whose tanh Triton's interpreter lacks. `pip install liger-kernel` (0.8.5 was run)."""
    pytest.importorskip("liger_kernel")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not INTERPRETED:
        pytest.skip("no GPU, and Triton compiles")
    # sums of 37 losses around 10, and gradients of up to 0.1, in float32 in another order
    loss_error, gradient_error = 1e-5, 1e-6
    model = tiny_target("llama").to(device).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    hidden = (3 * torch.randn(PLACES, model.config.hidden_size, generator=generator)).to(device)
    labels = torch.randint(model.config.vocab_size, (PLACES,), generator=generator).to(device)
    ends = TargetEnds(model)
    ours, theirs = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    expected, _ = head_loss(ours[None], ends.head, cross_entropy(labels), 16)
    (2 * expected.sum()).backward()  # a slope other than 1
    found = liger_cross_entropy(ends, ON_GPU)(theirs, labels)
    (2 * found).backward()
    assert found.item() == pytest.approx(expected.item(), rel=loss_error)
    assert ours.grad.abs().max() > 0.01
    torch.testing.assert_close(theirs.grad, ours.grad, rtol=loss_error, atol=gradient_error)


def test_a_token_that_the_draft_does_not_have_is_never_hit():
    """The target prefers token 4; the draft, which has 3 and 5, prefers one of these."""
    logits = torch.zeros(1, 8).index_fill(1, torch.tensor([4]), 9.0)
    score = forward_kl(logits, lambda states: states, torch.tensor([3, 5]))(slice(None), torch.float32)
    assert all(score(torch.tensor([drafted]))[2] > 0 for drafted in ([0.0, 1.0], [1.0, 0.0]))
