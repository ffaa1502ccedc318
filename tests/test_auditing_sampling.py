"""The audit of sampled text: right samplers pass, wrong ones do not, expectations against brute force."""

import pytest
import torch

from hf_longspec.auditing import DEVIATES, FOLLOWS, MAX_SIGMA, _count, audit_sampling
from tests.tiny_targets import tiny_prompts, tiny_target

SAMPLES, TOKENS = 800, 3


@pytest.fixture(scope="module")
def target():
    model = tiny_target("llama", vocab_size=37)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def prompt(target):
    return tiny_prompts(37, [19])[0]


def draw(model, prompt, temperature=1.0, samples=SAMPLES, **options):
    """Continuations drawn by stock `generate`."""
    torch.manual_seed(5)
    options = {"do_sample": True, "temperature": temperature, "top_k": 0, "max_new_tokens": TOKENS} | options
    return model.generate(prompt.expand(samples, -1), attention_mask=torch.ones(samples, 19), **options)[:, 19:]


@pytest.mark.parametrize("temperature", [0.6, 2.0])
def test_stock_sampling_follows_the_distribution(target, prompt, temperature):
    report = audit_sampling(target, prompt, draw(target, prompt, temperature), temperature)
    assert report.verdict == FOLLOWS, str(report)
    assert report.max_sigma < MAX_SIGMA == report.allowed_sigma
    assert (report.num_samples, report.num_tokens) == (SAMPLES, TOKENS)
    assert report.num_outcomes > 10


@pytest.mark.parametrize(
    ("wrong", "temperature"),
    [({"temperature": 0.7}, 1.0), ({"top_k": 4}, 1.0), ({}, 1.6), ({"repetition_penalty": 1.5}, 1.0)],
    ids=["colder", "cut off", "hotter", "penalised"],
)
def test_another_distribution_is_found(target, prompt, wrong, temperature):
    report = audit_sampling(target, prompt, draw(target, prompt, **wrong), temperature)
    assert report.verdict == DEVIATES, str(report)
    assert report.max_sigma > MAX_SIGMA


def test_a_token_wrong_at_one_place_only_is_found_there(target, prompt):
    """At place 2 a quarter of the samples repeat the token of place 1: what an accept-always rule does to a text."""
    samples = draw(target, prompt)
    repeated = samples.clone()
    repeated[: SAMPLES // 4, 1] = repeated[: SAMPLES // 4, 0]
    report = audit_sampling(target, prompt, repeated[:, :2])
    assert report.verdict == DEVIATES, str(report)
    assert "place 2" in report.worst or "all places" in report.worst


def test_expectations_against_a_forward_per_sample(target, prompt):
    """Sums of probabilities of one token and one rank, with the prompt read anew for every sample."""
    samples = draw(target, prompt, samples=37)
    watched, expected = torch.tensor([[4], [9], [21]]), []
    with torch.no_grad():
        for row in samples:
            logits = target(torch.cat([prompt[0], row])[None]).logits[0, 18:-1]
            expected.append(logits.double().softmax(-1))
    counts = sum(_count(p[None].float(), row[None], watched) for row, p in zip(samples, expected, strict=True))
    tokens, ranks = counts[..., :1], counts[..., 1:]
    for place, token in enumerate((4, 9, 21)):
        p = torch.stack([probs[place, token] for probs in expected])
        assert tokens[0, place, 0] == (samples[:, place] == token).sum()
        assert tokens[1, place, 0].item() == pytest.approx(p.sum().item(), rel=1e-5)  # float32 probabilities
        assert tokens[2, place, 0].item() == pytest.approx((p * (1 - p)).sum().item(), rel=1e-5)
    for place in range(TOKENS):
        p = torch.stack([probs[place].sort(descending=True).values[2:4].sum() for probs in expected])
        inside = [
            (probs[place] > probs[place, row[place]]).sum() in (2, 3)
            for probs, row in zip(expected, samples, strict=True)
        ]
        assert ranks[0, place, 2] == sum(inside)
        assert ranks[1, place, 2].item() == pytest.approx(p.sum().item(), rel=1e-5)


def test_refusals(target, prompt):
    samples = draw(target, prompt, samples=8)
    with pytest.raises(ValueError, match="8 samples are too few"):
        audit_sampling(target, prompt, samples)
    with pytest.raises(ValueError, match="temperature=0: expected"):
        audit_sampling(target, prompt, samples, temperature=0)
    with pytest.raises(ValueError, match="expected one prompt"):
        audit_sampling(target, prompt.expand(2, -1), samples)
