"""Audit of sampled text: compare the frequencies of tokens with the probabilities of the model.

Over many samples, the count of an outcome differs by a few standard deviations at most from the sum of the
probabilities that the model gives it after the sampled prefixes. The deviations are martingale differences, whatever
the prefixes are.
"""

import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from transformers import DynamicCache, PreTrainedModel

from .auditing import check_model

FOLLOWS, DEVIATES = "follows the distribution", "does NOT follow the distribution"

# A right sampler exceeds this once in 1.7 million outcomes.
MAX_SIGMA = 5.0
# Below this many expected counts a binomial is too skewed for a z-score.
MIN_EXPECTED = 50

# At every place the likeliest tokens are counted one by one, and all by their rank: the likeliest, the second, the next
# two, the next four and so on.
WATCHED_TOKENS = 64
CHUNK_ROWS = 16


@dataclass(frozen=True)
class SamplingReport:
    """The result of [`audit_sampling`].

    Args:
        verdict (`str`): `"follows the distribution"` or `"does NOT follow the distribution"`.
        num_samples (`int`): Continuations.
        num_tokens (`int`): Tokens of each.
        num_outcomes (`int`): Outcomes whose frequency was compared.
        max_sigma (`float`): The largest deviation, in standard deviations.
        allowed_sigma (`float`): What is allowed.
        worst (`str`): The outcome that deviates most.
        observed (`float`): Its frequency.
        expected (`float`): Its mean probability.
    """

    verdict: str
    num_samples: int
    num_tokens: int
    num_outcomes: int
    max_sigma: float
    allowed_sigma: float
    worst: str
    observed: float
    expected: float

    def __str__(self) -> str:
        return (
            f"{self.verdict}: {self.num_samples} samples of {self.num_tokens} tokens, {self.num_outcomes} frequencies, "
            f"largest deviation {self.max_sigma:.1f} of {self.allowed_sigma:.0f} standard deviations: {self.worst}, "
            f"{self.observed:.3f} where {self.expected:.3f} was expected"
        )


@torch.no_grad()
def audit_sampling(
    model: PreTrainedModel, prompt: torch.Tensor, samples: torch.Tensor, temperature: float = 1.0
) -> SamplingReport:
    """Compare the frequencies of sampled tokens with the model's probabilities.

    The samples are continuations of one prompt, drawn independently at a temperature and without any other logits
    processor. The first token of a text comes from the forward over the prompt; drafts take part from the second token
    on. Five standard deviations are allowed: correct samplers of random distributions reached at most 4.2 in 3,000
    audits of 400 samples and 19 frequencies. The deviation of a wrong one grows with the square root of the number of
    samples. In half types two correct computations differ in the last bits of a logit. Very many samples can resolve
    this difference: check in float32 then.

    Args:
        model (`PreTrainedModel`): A decoder-only model in eval mode. It is left as it was.
        prompt (`torch.LongTensor` of shape `(1, P)` or `(P,)`): What all samples continue.
        samples (`torch.LongTensor` of shape `(num_samples, K)`): Continuations, none ended early.
        temperature (`float`, *optional*, defaults to 1.0): That of the sampling.

    Raises:
        ValueError: If the model is in training mode, shapes or temperature are wrong, or there are too few samples for
            any frequency to be judged.
    """
    check_model(model)
    if samples.dim() != 2 or not samples.numel() or not prompt.numel() or prompt.numel() != prompt.shape[-1]:
        raise ValueError(
            f"prompt of shape {tuple(prompt.shape)} and samples of shape {tuple(samples.shape)}: expected one prompt "
            "and a 2-D tensor of its continuations."
        )
    if temperature <= 0:
        raise ValueError(f"temperature={temperature}: expected more than 0. Greedy text is for audit().")
    samples = samples.to(model.device)
    watched, sums = None, torch.zeros(())
    for rows, logits in _read_samples(model, prompt.reshape(1, -1).to(model.device), samples):
        probs = (logits.float() / temperature).softmax(-1)
        if watched is None:  # chosen by the prefixes, not by the tokens that were drawn after them
            watched = probs.mean(0).topk(min(WATCHED_TOKENS, probs.shape[-1])).indices
        sums = sums + _count(probs, rows, watched)
    assert watched is not None
    return _sampling_report(sums, len(samples), watched, list(_bands(probs.shape[-1])))


def _read_samples(
    model: PreTrainedModel, prompt: torch.Tensor, samples: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Samples `(n, K)` and the logits `(n, K, vocab)` of every place, chunk by chunk; the prompt is read once."""
    takes_indices = "logits_to_keep" in inspect.signature(type(model).forward).parameters
    cache = DynamicCache(config=model.config)
    extra = {"logits_to_keep": 1} if takes_indices else {}
    first = model(input_ids=prompt, past_key_values=cache, use_cache=True, **extra).logits[:, -1:]
    for rows in samples.split(CHUNK_ROWS):
        logits = first.expand(len(rows), -1, -1)
        if rows.shape[1] > 1:
            continued = copy.deepcopy(cache)
            continued.batch_repeat_interleave(len(rows))
            inner = model(input_ids=rows[:, :-1], past_key_values=continued, use_cache=True).logits
            logits = torch.cat([logits, inner], dim=1)
        yield rows, logits


def _count(probs: torch.Tensor, rows: torch.Tensor, watched: torch.Tensor) -> torch.Tensor:
    """Count the outcomes at every place: the watched tokens, and the bands of ranks.

    Args:
        probs (`torch.Tensor` of shape `(n, K, vocab)`): The model's probabilities.
        rows (`torch.LongTensor` of shape `(n, K)`): The tokens.
        watched (`torch.LongTensor` of shape `(K, W)`): Tokens that are counted one by one.

    Returns:
        `torch.DoubleTensor` of shape `(3, K, W + bands)`: The count, the expected count, and the variance of the count.
    """
    # the position in a stable order, so that every token has a rank of its own even among equals
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    rank = (order == rows[..., None]).int().argmax(-1)
    ends = torch.tensor(list(_bands(probs.shape[-1]).values()), device=probs.device)
    band = torch.bucketize(rank, ends, right=True)
    in_band = band[..., None] == torch.arange(len(ends), device=probs.device)
    up_to = torch.nn.functional.pad(ordered.double().cumsum(-1)[..., ends - 1], (1, 0))
    chances = probs.gather(-1, watched.expand(len(rows), -1, -1)).double()
    chance = torch.cat([chances, up_to.diff(dim=-1)], dim=-1)
    occurred = torch.cat([rows[..., None] == watched, in_band], dim=-1).double()
    return torch.stack([occurred, chance, chance * (1 - chance)]).sum(1).cpu()


def _sampling_report(sums: torch.Tensor, num_samples: int, watched: torch.Tensor, bands: list[str]) -> SamplingReport:
    """The largest deviation among the outcomes that are frequent enough, at one place or a band at all places."""
    places, width = watched.shape
    names = [
        f"{outcome} at place {place}"
        for place, tokens in enumerate(watched.tolist(), start=1)
        for outcome in [*(f"token {token}" for token in tokens), *bands]
    ]
    trials = [num_samples] * len(names) + [num_samples * places] * len(bands)
    names += [f"{band} at all places" for band in bands]
    occurred, expected, variance = torch.cat([sums.flatten(1), sums[..., width:].sum(1)], dim=1)
    # rarer outcomes, or rarer misses of near-certain ones, are too skewed for a number of standard deviations
    deviation = torch.where(variance >= MIN_EXPECTED, (occurred - expected).abs() / variance.sqrt(), -1.0)
    if not (deviation >= 0).any():
        raise ValueError(
            f"{num_samples} samples are too few to judge a frequency at this temperature. Draw some "
            f"hundred at least ({MIN_EXPECTED} of a token and of all others are needed), or raise the temperature."
        )
    worst = int(deviation.argmax())
    return SamplingReport(
        verdict=FOLLOWS if deviation[worst] < MAX_SIGMA else DEVIATES,
        num_samples=num_samples,
        num_tokens=places,
        num_outcomes=int((deviation >= 0).sum()),
        max_sigma=float(deviation[worst]),
        allowed_sigma=MAX_SIGMA,
        worst=names[worst],
        observed=float(occurred[worst]) / trials[worst],
        expected=float(expected[worst]) / trials[worst],
    )


def _bands(vocab_size: int) -> dict[str, int]:
    """Names of the bands of ranks, and the last rank of each.

    >>> _bands(7)
    {'the likeliest token': 1, 'the 2nd': 2, 'ranks 3 to 4': 4, 'ranks 5 to 7': 7}
    """
    ends = [min(2**power, vocab_size) for power in range((vocab_size - 1).bit_length() + 1)]
    later = {f"ranks {start + 1} to {end}": end for start, end in pairwise(ends[1:])}
    return dict(zip(("the likeliest token", "the 2nd"), ends, strict=False)) | later
