"""Losslessness audit: compare generated text with the text that the model itself writes by greedy decoding.

The model reads the finished sequences in one teacher-forced pass, under its own attention and a stock cache. The audit
shares no code with the decoding loop, so it also finds mistakes in the loop.

For sampled text [`audit_sampling`] compares the frequencies of tokens with the probabilities of the model. Over many
samples, the count of an outcome differs by a few standard deviations at most from the sum of the probabilities that the
model gives it after the sampled prefixes. The deviations are martingale differences, whatever the prefixes are.
"""

import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from .generation.cache import CACHE_NAME

EXACT, NEAR_TIE, NOT_LOSSLESS = "exact", "near-tie", "NOT lossless"

# How far the order of additions can move a logit, in machine epsilons of the type times the largest logit of the
# position. Measured on 400 to 600 positions per model: read one token at a time, in chunks of 7, all at once, and under
# this package's attention. The logits of a trained Llama of 5M parameters moved by at most 1.2 in half types, and by 11
# in float32. Random dense models with sharpened attention are a worst case: there a token that one computation chose
# lay up to 2.4 (bfloat16) and 1.0 (float16) below another's argmax, and logits moved by up to 65 in float32. Half types
# round every result but add up in float32, hence the smaller number. Two exceptions need `eps`: eager attention in
# bfloat16 rounds its probabilities as well (up to 18 against sdpa), and a random mixture of experts, where rounding
# chose another expert, moved by up to 65.
NOISE = {torch.bfloat16: 4.0, torch.float16: 4.0}
NOISE_OF_WIDE_TYPES = 64.0

# Some models forbid tokens by huge negative logits; those do not show the magnitude of the others.
FORBIDDEN = -1e4

FOLLOWS, DEVIATES = "follows the distribution", "does NOT follow the distribution"

# A right sampler exceeds this once in 1.7 million outcomes.
MAX_SIGMA = 5.0
# Below this many expected counts a binomial is too skewed for a z-score.
MIN_EXPECTED = 50

# At every place the likeliest tokens are counted one by one, and all by their rank: the likeliest, the second, the next
# two, the next four and so on.
WATCHED_TOKENS = 64
# Samples, and tokens of a text, whose logits are in memory at a time.
CHUNK_ROWS, CHUNK_TOKENS = 16, 1024


@dataclass(frozen=True)
class AuditReport:
    """The result of [`audit`]. Positions are `(row, column)` of `sequences`, as they were passed."""

    # `"exact"` if every token is the argmax, `"near-tie"` if the others are within `eps` of it, else `"NOT lossless"`
    verdict: str
    num_tokens: int  # tokens audited
    num_argmax: int  # tokens whose logit is the largest of their position; exact ties count
    first_divergence: tuple[int, int] | None  # earliest token that is not the argmax
    first_failure: tuple[int, int] | None  # earliest token further than `eps` below the argmax
    max_gap: float  # largest distance of an emitted token's logit below the largest logit
    eps: float  # the allowed gap at the token whose gap came closest to it or exceeded it most
    # `(num_tokens, 4)`, for each token by position: row, position, how far its logit lies above that of any other token
    # (below: negative), and how far below was allowed
    margins: torch.Tensor = field(compare=False, repr=False)

    def __str__(self) -> str:
        counted = f"{self.verdict}: {self.num_argmax} of {self.num_tokens} tokens are the argmax"
        if self.first_divergence is None:
            return counted
        row, position = self.first_failure or self.first_divergence
        what = f"beyond eps {self.eps:.2g}" if self.first_failure else f"the others within eps {self.eps:.2g}"
        return f"{counted}, {what}, largest gap {self.max_gap:.3g}, first at row {row}, position {position}"


@torch.no_grad()
def audit(
    model: PreTrainedModel,
    sequences: torch.Tensor,
    prompt_length: int,
    attention_mask: torch.Tensor | None = None,
    eps: float | None = None,
    pad_token_id: int | None = None,
    eos_token_id: int | list[int] | None = None,
) -> AuditReport:
    """Check that every emitted token is the argmax of the model's logits, or within `eps` of it.

    For text of greedy decoding without logits processors. Text that was sampled, or written under a repetition penalty,
    is not the argmax and is reported as such. In float32 the verdict is normally `"exact"`. In bfloat16 two correct
    computations of one logit differ in their last bits, so at a near-tie both tokens are right, and the audit also
    finds near-ties in the text of plain `generate`.

    A row ends at its first end-of-sequence token, which is audited, or before the padding at its end, which is not.
    When a stop string ended a row of a batch and the padding is the end-of-sequence token, the first padding token
    looks like an emitted one: generate such batches with another `pad_token_id`.

    Args:
        model (`PreTrainedModel`): A decoder-only model in eval mode. It is left as it was.
        sequences (`torch.LongTensor` of shape `(batch, length)`):
            Prompts and continuations, as `generate` returns them.
        prompt_length (`int`): Columns that belong to the prompts, left padding included.
        attention_mask (`torch.Tensor` of shape `(batch, prompt_length)` or `(batch, length)`, *optional*):
            0 at padding of the prompts. By default padding tokens in the prompts are masked if they are not
            end-of-sequence tokens, as in `generate`.
        eps (`float`, *optional*):
            Allowed distance in logits. By default 4 (bfloat16, float16) or 64 (wider types) machine epsilons of the
            model's type times the largest absolute logit of the position: in bfloat16 0.3 at a magnitude of 10. The
            factors were measured, see the comment at `NOISE`. Mixture-of-experts models can need more, because rounding
            may send a token to another expert. Audit the text of plain `generate` to find the value.
        pad_token_id (`int`, *optional*): Defaults to that of `model.generation_config`.
        eos_token_id (`int` or `list[int]`, *optional*): Defaults to that of `model.generation_config`.

    Raises:
        ValueError: If the arguments contradict each other, or the model is in training mode or an encoder-decoder.
    """
    check_model(model)
    if sequences.dim() != 2 or not 1 <= prompt_length < sequences.shape[1]:
        raise ValueError(
            f"prompt_length={prompt_length} for sequences of shape {tuple(sequences.shape)}: expected a 2-D tensor "
            "longer than the prompt. Pass the output of generate(), and the number of columns of its input_ids."
        )
    expected = [(sequences.shape[0], length) for length in (prompt_length, sequences.shape[1])]
    if attention_mask is not None and tuple(attention_mask.shape) not in expected:
        shape = tuple(attention_mask.shape)
        raise ValueError(f"attention_mask has shape {shape}, expected {expected[0]} or {expected[1]}.")
    settings = getattr(model, "generation_config", None) or model.config
    pad = getattr(settings, "pad_token_id", None) if pad_token_id is None else pad_token_id
    eos = getattr(settings, "eos_token_id", None) if eos_token_id is None else eos_token_id
    texts = []
    for row, tokens in enumerate(sequences.cpu()):
        mask = None if attention_mask is None else attention_mask[row, :prompt_length].cpu().bool()
        columns = _columns(tokens, prompt_length, mask, pad, _end_tokens(eos))
        if not len(columns) or columns[0] >= prompt_length:
            raise ValueError(f"the prompt of row {row} is all padding. Pass attention_mask, or drop the row.")
        texts.append((tokens[columns], columns))
    lines = []
    for row, (tokens, columns) in enumerate(texts):
        prompt = int((columns < prompt_length).sum())
        where = torch.stack([torch.full_like(columns, row), columns], dim=1)[prompt:]
        lines.append(torch.cat([where.double(), _margins(model, tokens, prompt, eps)], dim=1))
    return _report(torch.cat(lines))


def check_model(model: PreTrainedModel) -> None:
    if model.config.is_encoder_decoder:
        raise ValueError(f"{type(model).__name__} is an encoder-decoder model, which is not supported.")
    if model.training:
        raise ValueError("the model is in training mode. Call model.eval() first.")


def _columns(
    tokens: torch.Tensor, prompt_length: int, mask: torch.Tensor | None, pad: int | None, ends: set[int]
) -> torch.Tensor:
    """Return the columns of a row that are no padding, up to its end."""
    keep = torch.ones(len(tokens), dtype=torch.bool)
    if mask is not None:
        keep[:prompt_length] = mask
    elif pad is not None and pad not in ends:
        keep[:prompt_length] = tokens[:prompt_length] != pad
    keep[prompt_length + _emitted(tokens[prompt_length:].tolist(), pad, ends) :] = False
    return keep.nonzero().flatten()


def _end_tokens(eos: int | list[int] | None) -> set[int]:
    return {eos} if isinstance(eos, int) else set(eos or ())


def _emitted(tokens: list[int], pad: int | None, ends: set[int]) -> int:
    """Count the emitted tokens after the prompt: up to the first end, or without the padding at the end."""
    for index, token in enumerate(tokens):
        if token in ends:
            return index + 1
    while tokens and tokens[-1] == pad:
        tokens = tokens[:-1]
    return len(tokens)


def _teacher_forced(model: PreTrainedModel, tokens: torch.Tensor, prompt: int) -> Iterator[torch.Tensor]:
    """Yield logits `(n, vocab)` of the tokens after the prompt, chunk by chunk."""
    ids, cache = tokens[None, :-1].to(model.device), DynamicCache(config=model.config)
    takes_indices = "logits_to_keep" in inspect.signature(type(model).forward).parameters
    for chunk in ids.split(CHUNK_TOKENS, dim=1) if ids.numel() else ():
        width = chunk.shape[1]
        # the vocabulary is large: logits of the prompt are not computed, but for one that forward always computes
        wanted = torch.arange(min(max(prompt - 1, 0), width - 1), width, device=ids.device)
        extra: dict[str, Any] = {"logits_to_keep": wanted} if takes_indices else {}
        logits = model(input_ids=chunk, **{CACHE_NAME: cache}, use_cache=True, **extra).logits[0]
        if width >= prompt:
            yield logits if takes_indices else logits[wanted]
        prompt -= width


def _margins(model: PreTrainedModel, tokens: torch.Tensor, prompt: int, eps: float | None) -> torch.Tensor:
    """Return margin and allowed gap of every token after the prompt, `(n, 2)`."""
    parts = [torch.empty(0, 2, dtype=torch.float64)]
    for logits in _teacher_forced(model, tokens, prompt):
        emitted, prompt = tokens[prompt : prompt + len(logits), None].to(logits.device), prompt + len(logits)
        dtype = max((model.dtype, logits.dtype), key=lambda kind: torch.finfo(kind).eps)
        highest, second = logits.topk(2, dim=-1).values.double().split(1, dim=-1)
        own = logits.gather(-1, emitted).double()
        magnitude = logits.abs().masked_fill(logits < FORBIDDEN, 0).amax(-1, keepdim=True).double()
        unit = NOISE.get(dtype, NOISE_OF_WIDE_TYPES) * torch.finfo(dtype).eps
        allowed = unit * magnitude if eps is None else torch.full_like(own, eps)
        margin = own - torch.where(own == highest, second, highest)
        parts.append(torch.cat([margin, allowed], dim=1).cpu())
    return torch.cat(parts)


def _report(findings: torch.Tensor) -> AuditReport:
    findings = findings[findings[:, 1].argsort(stable=True)]  # by column, so that the first line is the earliest token
    gap, allowed = (-findings[:, 2]).clamp_min(0), findings[:, 3]
    differs, fails = ~(gap <= 0), ~(gap <= allowed)  # negated: NaN logits are a failure
    first_divergence, first_failure = (
        (int(findings[marked][0, 0]), int(findings[marked][0, 1])) if marked.any() else None
        for marked in (differs, fails)
    )
    worst = (gap - allowed).nan_to_num(nan=torch.inf).argmax() if len(gap) else None
    return AuditReport(
        verdict=NOT_LOSSLESS if fails.any() else NEAR_TIE if differs.any() else EXACT,
        num_tokens=len(gap),
        num_argmax=int((~differs).sum()),
        first_divergence=first_divergence,
        first_failure=first_failure,
        max_gap=float(gap.max()) if len(gap) else 0.0,
        eps=0.0 if worst is None else float(allowed[worst]),
        margins=findings,
    )


@dataclass(frozen=True)
class Comparison:
    """The result of [`compare`]. New tokens are counted from 0."""

    # in float32 `"exact"` if the texts are the same and `"NOT lossless"` otherwise. In other types the verdict of the
    # audit, or `"NOT lossless"` if the text ends too early.
    verdict: str
    prompt_tokens: int
    new_tokens: int  # of the speculative text
    first_difference: int | None  # the first new token in which the texts differ
    is_whole: bool  # whether the speculative text has all its tokens, or ends where the model ends it
    report: AuditReport  # of the speculative text


def compare(
    model: PreTrainedModel,
    plain: torch.Tensor,
    speculative: torch.Tensor,
    prompt_length: int,
    max_new_tokens: int,
    eps: float | None = None,
) -> Comparison:
    """Judge a speculative text by the greedy text of plain `generate` and by an audit; both are `(1, length)`."""
    report = audit(model, speculative, prompt_length, torch.ones_like(speculative), eps=eps)
    expected, emitted = (text[0, prompt_length:].tolist() for text in (plain, speculative))
    pairs = enumerate(zip_longest(expected, emitted))
    first_difference = next((index for index, (a, b) in pairs if a != b), None)
    is_whole = len(emitted) == max_new_tokens or emitted[-1] in _end_tokens(model.generation_config.eos_token_id)
    verdict = report.verdict if is_whole else NOT_LOSSLESS
    if model.dtype == torch.float32:
        verdict = EXACT if expected == emitted else NOT_LOSSLESS
    return Comparison(verdict, prompt_length, len(emitted), first_difference, is_whole, report)


@dataclass(frozen=True)
class SamplingReport:
    """The result of [`audit_sampling`]."""

    verdict: str  # `"follows the distribution"` or `"does NOT follow the distribution"`
    num_samples: int
    num_tokens: int  # of each sample
    num_outcomes: int  # outcomes whose frequency was compared
    max_sigma: float  # the largest deviation, in standard deviations
    allowed_sigma: float
    worst: str  # the outcome that deviates most
    observed: float  # its frequency
    expected: float  # its mean probability

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

    Raises:
        ValueError: If there are too few samples for any frequency to be judged, among others.
    """
    check_model(model)
    if samples.dim() != 2 or not samples.numel() or not prompt.numel() or prompt.numel() != prompt.shape[-1]:
        raise ValueError(
            f"prompt of shape {tuple(prompt.shape)} and samples of shape {tuple(samples.shape)}: expected one prompt "
            "and a 2-D tensor of its continuations."
        )
    if temperature <= 0:
        raise ValueError(f"temperature={temperature}: expected a value above 0. For greedy decoding, use audit().")
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
    first = model(input_ids=prompt, **{CACHE_NAME: cache}, use_cache=True, **extra).logits[:, -1:]
    for rows in samples.split(CHUNK_ROWS):
        logits = first.expand(len(rows), -1, -1)
        if rows.shape[1] > 1:
            continued = copy.deepcopy(cache)
            continued.batch_repeat_interleave(len(rows))
            inner = model(input_ids=rows[:, :-1], **{CACHE_NAME: continued}, use_cache=True).logits
            logits = torch.cat([logits, inner], dim=1)
        yield rows, logits


def _count(probs: torch.Tensor, rows: torch.Tensor, watched: torch.Tensor) -> torch.Tensor:
    """Return count, expected count and its variance, `(3, K, W + bands)`, of all outcomes at every place.

    Outcomes are the `watched` tokens `(K, W)` and the bands of ranks; `probs` is `(n, K, vocab)`, `rows` `(n, K)`.
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
            f"{num_samples} samples are too few for a test at this temperature. Pass several hundred "
            f"({MIN_EXPECTED} of a token and of all others are needed), or raise the temperature."
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
