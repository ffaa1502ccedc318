"""Losslessness audit: compare generated text with the text that the model itself writes by greedy decoding.

The model reads the finished sequences in one teacher-forced pass, under its own attention and a stock cache. The audit
shares no code with the decoding loop, so it also finds mistakes in the loop.

`auditing_sampling.py` audits sampled text.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

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


@dataclass(frozen=True)
class AuditReport:
    """The result of [`audit`]. Positions are `(row, column)` of `sequences`, as they were passed.

    Args:
        verdict (`str`):
            `"exact"` if every token is the argmax, `"near-tie"` if the others are within `eps` of it,
            `"NOT lossless"` otherwise.
        num_tokens (`int`): Tokens audited.
        num_argmax (`int`): Tokens whose logit is the largest of their position; exact ties count.
        first_divergence (`tuple[int, int]`, *optional*): Earliest token that is not the argmax.
        first_failure (`tuple[int, int]`, *optional*): Earliest token further than `eps` below the argmax.
        max_gap (`float`): Largest distance of an emitted token's logit below the largest logit.
        eps (`float`): The allowed gap at the token whose gap came closest to it or exceeded it most.
        margins (`torch.DoubleTensor` of shape `(num_tokens, 4)`): For each token, by position: row, position, how far
            its logit lies above that of any other token (below: negative), and how far below was allowed.
    """

    verdict: str
    num_tokens: int
    num_argmax: int
    first_divergence: tuple[int, int] | None
    first_failure: tuple[int, int] | None
    max_gap: float
    eps: float
    margins: torch.Tensor = field(compare=False, repr=False)

    def __str__(self) -> str:
        counted = f"{self.verdict}: {self.num_argmax} of {self.num_tokens} tokens are the argmax"
        if self.first_divergence is None:
            return counted
        row, position = self.first_failure or self.first_divergence
        what = f"beyond eps {self.eps:.2g}" if self.first_failure else f"the others within eps {self.eps:.2g}"
        return f"{counted}, {what}, largest gap {self.max_gap:.3g}, first at row {row}, position {position}"


@dataclass(frozen=True)
class _Row:
    """Tokens of one sequence without padding, their columns in `sequences`, and how many are prompt."""

    tokens: torch.Tensor
    columns: torch.Tensor
    prompt: int


@torch.no_grad()
def audit(
    model: PreTrainedModel,
    sequences: torch.Tensor,
    prompt_length: int,
    attention_mask: torch.Tensor | None = None,
    eps: float | None = None,
    chunk_size: int = 1024,
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
        model (`PreTrainedModel`):
            A decoder-only model in eval mode. It is left as it was.
        sequences (`torch.LongTensor` of shape `(batch, length)`):
            Prompts and continuations, as `generate` returns them.
        prompt_length (`int`):
            Columns that belong to the prompts, left padding included.
        attention_mask (`torch.Tensor` of shape `(batch, prompt_length)` or `(batch, length)`, *optional*):
            0 at padding of the prompts. By default padding tokens in the prompts are masked if they are not
            end-of-sequence tokens, as in `generate`.
        eps (`float`, *optional*):
            Allowed distance in logits. By default 4 (bfloat16, float16) or 64 (wider types) machine epsilons of the
            model's type times the largest absolute logit of the position: in bfloat16 0.3 at a magnitude of 10. The
            factors were measured, see the comment at `NOISE`. Mixture-of-experts models can need more, because rounding
            may send a token to another expert. Audit the text of plain `generate` to find the value.
        chunk_size (`int`, *optional*, defaults to 1024):
            Tokens per forward. It bounds memory and does not change the verdict beyond rounding.
        pad_token_id (`int`, *optional*):
            Defaults to that of `model.generation_config`.
        eos_token_id (`int` or `list[int]`, *optional*):
            Defaults to that of `model.generation_config`.

    Raises:
        ValueError: If the arguments contradict each other, or the model is in training mode or an encoder-decoder.
    """
    _check(model, sequences, prompt_length, attention_mask, chunk_size)
    settings = getattr(model, "generation_config", None) or model.config
    pad = getattr(settings, "pad_token_id", None) if pad_token_id is None else pad_token_id
    eos = getattr(settings, "eos_token_id", None) if eos_token_id is None else eos_token_id
    rows = _rows(sequences, prompt_length, attention_mask, pad, _end_tokens(eos))
    findings = [_findings(model, rows, *step, eps) for step in _teacher_forced(model, rows, chunk_size)]
    return _report(torch.cat(findings or [torch.empty(0, 4)]))


def _check(
    model: PreTrainedModel, sequences: torch.Tensor, prompt_length: int, mask: torch.Tensor | None, chunk_size: int
) -> None:
    check_model(model)
    if sequences.dim() != 2 or not 1 <= prompt_length < sequences.shape[1]:
        raise ValueError(
            f"prompt_length={prompt_length} for sequences of shape {tuple(sequences.shape)}: expected a 2-D tensor "
            "that is longer than the prompt. Pass what generate() returned, and the number of columns of its input_ids."
        )
    expected = [(sequences.shape[0], length) for length in (prompt_length, sequences.shape[1])]
    if mask is not None and tuple(mask.shape) not in expected:
        raise ValueError(f"attention_mask has shape {tuple(mask.shape)}, expected {expected[0]} or {expected[1]}.")
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size}: expected at least 1.")


def check_model(model: PreTrainedModel) -> None:
    """Refuse a model that cannot be audited.

    Raises:
        ValueError: If it is an encoder-decoder, or in training mode.
    """
    if model.config.is_encoder_decoder:
        raise ValueError(f"{type(model).__name__} is an encoder-decoder model; only decoder-only ones can be audited.")
    if model.training:
        raise ValueError("the model is in training mode, in which dropout changes the logits. Call model.eval() first.")


def _rows(
    sequences: torch.Tensor, prompt_length: int, mask: torch.Tensor | None, pad: int | None, ends: set[int]
) -> list[_Row]:
    """Cut every sequence out of its padding."""
    rows = []
    for number, tokens in enumerate(sequences.cpu()):
        keep = torch.ones(len(tokens), dtype=torch.bool)
        if mask is not None:
            keep[:prompt_length] = mask[number, :prompt_length].cpu().bool()
        elif pad is not None and pad not in ends:
            keep[:prompt_length] = tokens[:prompt_length] != pad
        keep[prompt_length + _emitted(tokens[prompt_length:].tolist(), pad, ends) :] = False
        prompt = int(keep[:prompt_length].sum())
        if not prompt:
            raise ValueError(f"the prompt of row {number} is all padding: pass attention_mask, or leave the row out.")
        columns = keep.nonzero().flatten()
        rows.append(_Row(tokens[columns], columns, prompt))
    return rows


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


def _teacher_forced(
    model: PreTrainedModel, rows: list[_Row], chunk_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Logits `(batch, n, vocab)` and the indices `(n,)` of the tokens they predict, chunk by chunk."""
    # Padding is on the right, where causal attention never looks: no mask, and positions count from 0 in every row.
    tokens = torch.nn.utils.rnn.pad_sequence([row.tokens for row in rows], batch_first=True).to(model.device)
    first, total = min(row.prompt for row in rows) - 1, tokens.shape[1] - 1
    cache = DynamicCache(config=model.config)
    takes_indices = "logits_to_keep" in inspect.signature(type(model).forward).parameters
    for begin in range(0, total, chunk_size):
        chunk = tokens[:, begin : min(begin + chunk_size, total)]
        width = chunk.shape[1]
        # the vocabulary is large: logits of the prompt are not computed, but for one position that forward always
        # computes
        wanted = torch.arange(min(max(first - begin, 0), width - 1), width, device=tokens.device)
        extra: dict[str, Any] = {"logits_to_keep": wanted} if takes_indices else {}
        logits = model(input_ids=chunk, past_key_values=cache, use_cache=True, **extra).logits
        if begin + width > first:
            yield logits if takes_indices else logits[:, wanted], begin + 1 + wanted


def _findings(
    model: PreTrainedModel, rows: list[_Row], logits: torch.Tensor, indices: torch.Tensor, eps: float | None
) -> torch.Tensor:
    """One line `(row, column, margin, allowed)` per audited token among those that `logits` predict."""
    dtype = max((model.dtype, logits.dtype), key=lambda kind: torch.finfo(kind).eps)
    unit = NOISE.get(dtype, NOISE_OF_WIDE_TYPES) * torch.finfo(dtype).eps
    lines = []
    for number, row in enumerate(rows):
        inside = (indices >= row.prompt) & (indices < len(row.tokens))
        predicted = indices[inside].cpu()
        own = logits[number, inside.to(logits.device)]
        highest, second = own.topk(2, dim=-1).values.double().split(1, dim=-1)
        emitted = own.gather(-1, row.tokens[predicted, None].to(own.device)).double()
        margin = emitted - torch.where(emitted == highest, second, highest)
        magnitude = own.abs().masked_fill(own < FORBIDDEN, 0).amax(-1, keepdim=True).double()
        allowed = unit * magnitude if eps is None else torch.full_like(margin, eps)
        where = torch.stack([torch.full_like(predicted, number), row.columns[predicted]], dim=1).double()
        lines.append(torch.cat([where, margin.cpu(), allowed.cpu()], dim=1))
    return torch.cat(lines)


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
    """The result of [`compare`]. New tokens are counted from 0.

    Args:
        verdict (`str`):
            In float32 `"exact"` if the texts are the same and `"NOT lossless"` otherwise. In other types the verdict of
            the audit, or `"NOT lossless"` if the text ends too early.
        prompt_tokens (`int`): Tokens of the prompt.
        new_tokens (`int`): Tokens of the speculative text.
        first_difference (`int`, *optional*): The first new token in which the texts differ.
        is_whole (`bool`): Whether the speculative text has all its tokens, or ends where the model ends it.
        report ([`AuditReport`]): The audit of the speculative text.
    """

    verdict: str
    prompt_tokens: int
    new_tokens: int
    first_difference: int | None
    is_whole: bool
    report: AuditReport


def compare(
    model: PreTrainedModel,
    plain: torch.Tensor,
    speculative: torch.Tensor,
    prompt_length: int,
    max_new_tokens: int,
    eps: float | None = None,
) -> Comparison:
    """Judge a speculative text by the text of plain `generate` and by an audit.

    Args:
        model (`PreTrainedModel`): The target of both texts, in eval mode.
        plain (`torch.LongTensor` of shape `(1, length)`): Prompt and continuation by plain `generate`, greedily.
        speculative (`torch.LongTensor` of shape `(1, length)`): The same with a draft.
        prompt_length (`int`): Tokens of the prompt.
        max_new_tokens (`int`): Tokens that were to be generated.
        eps (`float`, *optional*): See [`audit`].
    """
    report = audit(model, speculative, prompt_length, torch.ones_like(speculative), eps=eps)
    expected, emitted = (text[0, prompt_length:].tolist() for text in (plain, speculative))
    pairs = enumerate(zip_longest(expected, emitted))
    first_difference = next((index for index, (a, b) in pairs if a != b), None)
    is_whole = len(emitted) == max_new_tokens or emitted[-1] in _end_tokens(model.generation_config.eos_token_id)
    verdict = report.verdict if is_whole else NOT_LOSSLESS
    if model.dtype == torch.float32:
        verdict = EXACT if expected == emitted else NOT_LOSSLESS
    return Comparison(verdict, prompt_length, len(emitted), first_difference, is_whole, report)
