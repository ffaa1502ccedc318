"""The audit of a draft: both texts of every prompt, what the model says of them, and the verdict."""

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import set_seed

from ..auditing import EXACT, NEAR_TIE, NOT_LOSSLESS, AuditReport, audit
from ..auditing_law import FOLLOWS, LawReport, audit_sampling
from . import CommandError
from .progress import Bar, bar
from .session import Session

# From best to worst.
VERDICTS = (EXACT, NEAR_TIE, NOT_LOSSLESS)
STYLES = {EXACT: "green", NEAR_TIE: "yellow", NOT_LOSSLESS: "bold red"}


@dataclass(frozen=True)
class AuditOptions:
    """What to decode and how strictly to judge; the options of the command.

    Raises:
        CommandError: If a number is out of range.
    """

    max_new_tokens: int = 64
    context: int = 2048
    eps: float | None = None
    samples: int = 0
    sample_tokens: int = 4
    temperature: float = 1.0
    batch: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise CommandError(f"--temperature {self.temperature}: the samples need more than 0, such as 1.")
        if self.eps is not None and not self.eps >= 0:
            raise CommandError(f"--eps {self.eps}: expected a distance of at least 0.")


@dataclass(frozen=True)
class Comparison:
    """One prompt, continued both ways.

    Args:
        name (`str`): Of the prompt.
        plain (`list[int]`): Tokens of plain `generate`.
        speculative (`list[int]`): Tokens with the draft.
        prompt_tokens (`int`): Tokens of the prompt.
        report ([`AuditReport`]): What the model says of the speculative text.
        exact_type (`bool`): Whether nothing but the same text will do.
        is_whole (`bool`): Whether the speculative text has all its tokens, or ends where the model ends it.
        tau (`float`): Tokens per verification.
    """

    name: str
    plain: list[int]
    speculative: list[int]
    prompt_tokens: int
    report: AuditReport
    exact_type: bool
    is_whole: bool
    tau: float

    @property
    def first_difference(self) -> int | None:
        """Index of the first new token in which the texts differ."""
        pairs = zip(self.plain, self.speculative, strict=False)
        where = next(
            (index for index, (a, b) in enumerate(pairs) if a != b), min(len(self.plain), len(self.speculative))
        )
        return None if self.plain == self.speculative else where

    @property
    def verdict(self) -> str:
        """In float32 whether the texts are the same; otherwise what the teacher-forced pass says."""
        if self.exact_type:
            return EXACT if self.first_difference is None else NOT_LOSSLESS
        return self.report.verdict if self.is_whole else NOT_LOSSLESS

    def explain(self) -> str:
        """What the model says of the speculative text, token by token."""
        report = self.report
        said = f"{self.name}: {report.num_argmax} of {report.num_tokens} tokens are the model's choice"
        if not self.is_whole:
            return f"{said}, and the text ends too early."
        if report.first_divergence is None:
            return f"{said}, and yet it is another text than that of plain generate."
        first = report.first_divergence[1] - self.prompt_tokens
        return f"{said}; the first that is not is {first}. Largest gap {report.max_gap:.3g}, allowed {report.eps:.2g}."

    def record(self) -> dict[str, Any]:
        """For JSON; positions count new tokens from 0, and a margin is `null` where a single token is allowed."""
        report, prompt = self.report, self.prompt_tokens
        failure = report.first_failure
        return {
            "prompt": self.name,
            "prompt_tokens": prompt,
            "verdict": self.verdict,
            "identical": self.first_difference is None,
            "first_difference": self.first_difference,
            "tau": self.tau,
            "teacher_forced": {
                "verdict": report.verdict,
                "num_tokens": report.num_tokens,
                "num_argmax": report.num_argmax,
                "first_divergence": report.first_divergence and report.first_divergence[1] - prompt,
                "first_failure": failure and failure[1] - prompt,
                "max_gap": _finite(report.max_gap),
                "eps": _finite(report.eps),
                "margins": [_finite(value) for value in report.margins[:, 2].tolist()],
            },
        }


def run(session: Session, texts: list[tuple[str, str]], options: AuditOptions, as_json: bool) -> int:
    """The command behind its options; returns the exit status."""
    prompts = [(name, session.encode(name, text)[:, -options.context :]) for name, text in texts]
    for name, ids in prompts:
        session.require_room(name, ids.shape[1], max(options.max_new_tokens, options.sample_tokens))
    batches = math.ceil(options.samples / options.batch)
    with bar("Decoding", 2 * len(prompts) + batches) as progress:
        compared = [_compare(session, name, ids, options, progress) for name, ids in prompts]
        law = _check_law(session, prompts[0][1], options, progress) if options.samples else None
    verdict = VERDICTS[max(VERDICTS.index(comparison.verdict) for comparison in compared)]
    if law is not None and law.verdict != FOLLOWS:
        verdict = NOT_LOSSLESS
    if as_json:
        print(json.dumps(_record(session, verdict, compared, law)))
    else:
        _show(verdict, compared, law)
    return int(verdict == NOT_LOSSLESS)


def _compare(session: Session, name: str, ids: torch.Tensor, options: AuditOptions, progress: Bar) -> Comparison:
    """Both texts of one prompt, and the teacher-forced pass over the speculative one."""
    texts = []
    for draft in (None, session.draft):
        progress.say(f"{name}: {'plain generate' if draft is None else session.draft_name}")
        mask = torch.ones_like(ids)
        new = {"max_new_tokens": options.max_new_tokens, "do_sample": False}
        texts.append(session.model.generate(ids, attention_mask=mask, assistant_model=draft, **new))
        progress.advance()
    report = audit(session.model, texts[1], ids.shape[1], torch.ones_like(ids), eps=options.eps)
    plain, speculative = (text[0, ids.shape[1] :].tolist() for text in texts)
    tau = session.draft.last_speculation.mean_acceptance_length
    end = session.model.generation_config.eos_token_id
    ends = end if isinstance(end, list) else [end]
    is_whole = len(speculative) == options.max_new_tokens or speculative[-1] in ends
    return Comparison(name, plain, speculative, ids.shape[1], report, session.dtype == "float32", is_whole, tau)


def _check_law(session: Session, ids: torch.Tensor, options: AuditOptions, progress: Bar) -> LawReport:
    """Draw samples behind one prompt, batch by batch, each with a seed of its own, and compare their frequencies."""
    session.model.generation_config.eos_token_id = None  # a text that ends has no further tokens to count
    drawn = []
    for start in range(0, options.samples, options.batch):
        progress.say(f"samples {start} of {options.samples}")
        set_seed(options.seed + start)
        rows = ids.expand(min(options.batch, options.samples - start), -1)
        text = session.model.generate(
            rows,
            attention_mask=torch.ones_like(rows),
            assistant_model=session.draft,
            max_new_tokens=options.sample_tokens,
            do_sample=True,
            temperature=options.temperature,
            top_k=0,
            top_p=1.0,
        )
        drawn.append(text[:, ids.shape[1] :])
        progress.advance()
    return audit_sampling(session.model, ids, torch.cat(drawn), options.temperature)


def _record(session: Session, verdict: str, compared: list[Comparison], law: LawReport | None) -> dict[str, Any]:
    return {
        "verdict": verdict,
        "target": session.target,
        "draft": session.draft_name,
        "dtype": session.dtype,
        "device": str(session.model.device),
        "prompts": [comparison.record() for comparison in compared],
        "sampling": None if law is None else asdict(law),
    }


def _show(verdict: str, compared: list[Comparison], law: LawReport | None) -> None:
    """A table with one line per prompt, the details of those that are not exact, and the verdict."""
    console = Console(highlight=False)
    table = Table()
    table.add_column("prompt", overflow="fold")
    for heading in ("new tokens", "first difference", "argmax", "smallest margin", "tau"):
        table.add_column(heading, justify="right")
    table.add_column("verdict", no_wrap=True)
    for comparison in compared:
        report, where = comparison.report, comparison.first_difference
        table.add_row(
            escape(comparison.name),
            str(len(comparison.speculative)),
            "none" if where is None else str(where),
            f"{report.num_argmax}/{report.num_tokens}",
            f"{report.margins[:, 2].min():.3g}",
            f"{comparison.tau:.2f}",
            f"[{STYLES[comparison.verdict]}]{comparison.verdict}[/]",
        )
    console.print(table)
    console.print("first difference: new token, from 0, in which plain generate and speculation part.")
    console.print(
        "margin: how far the logit of an emitted token lies above that of any other; below 0: it is not the best."
    )
    for comparison in compared:
        if comparison.verdict != EXACT:
            console.print(comparison.explain(), markup=False)
    if law is not None:
        console.print(f"sampling {law}.", markup=False)
    console.print(f"[{STYLES[verdict]}]{verdict}{' only' if verdict == NEAR_TIE else ''}[/]")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
