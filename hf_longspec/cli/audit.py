"""`hf-longspec audit`: check that a draft leaves the text of the model as it is, on this machine."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import set_seed

from ..auditing import EXACT, FOLLOWS, NEAR_TIE, NOT_LOSSLESS, AuditReport, SamplingReport, audit_sampling
from ..auditing import audit as audit_text
from ..bench.progress import Progress
from ..cli import CommandError
from .options import (
    Debug,
    Device,
    Draft,
    Dtype,
    Json,
    Prompt,
    Seed,
    Setting,
    Target,
    at_least,
    one_line_errors,
    read_settings,
    read_text,
)
from .session import Session, opened

# From best to worst.
VERDICTS = (EXACT, NEAR_TIE, NOT_LOSSLESS)
STYLES = {EXACT: "green", NEAR_TIE: "yellow", NOT_LOSSLESS: "bold red"}


@dataclass(frozen=True)
class AuditOptions:
    """The lengths and the tolerance of an audit.

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
        name (`str`): Name of the prompt.
        plain (`list[int]`): Tokens of plain `generate`.
        speculative (`list[int]`): Tokens with the draft.
        prompt_tokens (`int`): Tokens of the prompt.
        report ([`AuditReport`]): The teacher-forced pass over the speculative text.
        exact_type (`bool`): Whether only the same text is right.
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
        """The comparison of the texts in float32; in other types the verdict of the teacher-forced pass."""
        if self.exact_type:
            return EXACT if self.first_difference is None else NOT_LOSSLESS
        return self.report.verdict if self.is_whole else NOT_LOSSLESS

    def explain(self) -> str:
        """The result of the teacher-forced pass in a sentence."""
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
    """Audit, show, and return the exit status."""
    prompts = [(name, session.encode(name, text)[:, -options.context :]) for name, text in texts]
    for name, ids in prompts:
        session.require_room(name, ids.shape[1], max(options.max_new_tokens, options.sample_tokens))
    batches = math.ceil(options.samples / options.batch)
    with Progress(2 * len(prompts) + batches, "Decoding") as progress:
        compared = [_compare(session, name, ids, options, progress) for name, ids in prompts]
        sampling = _check_sampling(session, prompts[0][1], options, progress) if options.samples else None
    verdict = VERDICTS[max(VERDICTS.index(comparison.verdict) for comparison in compared)]
    if sampling is not None and sampling.verdict != FOLLOWS:
        verdict = NOT_LOSSLESS
    if as_json:
        print(json.dumps(_record(session, verdict, compared, sampling)))
    else:
        _show(verdict, compared, sampling)
    return int(verdict == NOT_LOSSLESS)


def _compare(session: Session, name: str, ids: torch.Tensor, options: AuditOptions, progress: Progress) -> Comparison:
    """Both texts of one prompt, and the teacher-forced pass over the speculative one."""
    texts = []
    for draft in (None, session.draft):
        progress.say(f"{name}: {'plain generate' if draft is None else session.draft_name}")
        mask = torch.ones_like(ids)
        new = {"max_new_tokens": options.max_new_tokens, "do_sample": False}
        texts.append(session.model.generate(ids, attention_mask=mask, assistant_model=draft, **new))
        progress.step()
    report = audit_text(session.model, texts[1], ids.shape[1], torch.ones_like(ids), eps=options.eps)
    plain, speculative = (text[0, ids.shape[1] :].tolist() for text in texts)
    tau = session.draft.last_speculation.mean_acceptance_length
    end = session.model.generation_config.eos_token_id
    ends = end if isinstance(end, list) else [end]
    is_whole = len(speculative) == options.max_new_tokens or speculative[-1] in ends
    return Comparison(name, plain, speculative, ids.shape[1], report, session.dtype == "float32", is_whole, tau)


def _check_sampling(session: Session, ids: torch.Tensor, options: AuditOptions, progress: Progress) -> SamplingReport:
    """Draw samples after one prompt, batch by batch, each with a seed of its own, and compare their frequencies."""
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
        progress.step()
    return audit_sampling(session.model, ids, torch.cat(drawn), options.temperature)


def _record(
    session: Session, verdict: str, compared: list[Comparison], sampling: SamplingReport | None
) -> dict[str, Any]:
    return {
        "verdict": verdict,
        "target": session.target,
        "draft": session.draft_name,
        "dtype": session.dtype,
        "device": str(session.model.device),
        "prompts": [comparison.record() for comparison in compared],
        "sampling": None if sampling is None else asdict(sampling),
    }


def _show(verdict: str, compared: list[Comparison], sampling: SamplingReport | None) -> None:
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
    if sampling is not None:
        console.print(f"sampling {sampling}.", markup=False)
    console.print(f"[{STYLES[verdict]}]{verdict}{' only' if verdict == NEAR_TIE else ''}[/]")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


Files = Annotated[list[Path] | None, typer.Argument(help="Texts to continue; - for standard input.")]


def audit(
    target: Target,
    files: Files = None,
    prompt: Prompt = None,
    draft: Draft = "specattn",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per prompt.", callback=at_least(1))] = 64,
    context: Annotated[
        int, typer.Option(help="Use at most this many tokens from the end of each text.", callback=at_least(1))
    ] = 2048,
    eps: Annotated[
        float | None, typer.Option(help="Distance in logits that is a near-tie; by default from the type.")
    ] = None,
    samples: Annotated[
        int,
        typer.Option(
            help="Also check the distribution of sampling, with this many samples; 0 skips this check.",
            callback=at_least(0),
        ),
    ] = 0,
    sample_tokens: Annotated[int, typer.Option(help="Tokens of a sample.", callback=at_least(2))] = 4,
    temperature: Annotated[float, typer.Option(help="Of the samples.")] = 1.0,
    batch: Annotated[int, typer.Option(help="Samples that are drawn together.", callback=at_least(1))] = 32,
    setting: Setting = None,
    dtype: Dtype = "auto",
    device: Device = None,
    seed: Seed = 0,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Check that a draft leaves the model's text as it is.

    Every prompt is continued greedily by plain generate and with the draft. In float32 the two texts must be the same.
    In other types two correct computations can choose different tokens where the best tokens are nearly tied: then the
    model reads the speculative text once more, and every token must be its choice, or within rounding of it.

    --samples N draws the beginning of N texts and compares the frequencies of tokens with the model's probabilities;
    some hundred samples find large errors, some ten thousand find small ones.

    Examples:

    \b
    hf-longspec audit notes.txt --target Qwen/Qwen3-0.6B --dtype float32
    hf-longspec audit notes.txt --target Qwen/Qwen3-0.6B --draft org/draft --dtype bfloat16
    hf-longspec audit --prompt "The lighthouse" --target Qwen/Qwen3-0.6B --samples 512 --json

    Exit status: 0 for exact, or with near-ties only; 1 for not lossless; 2 for what cannot be run; 130 after Ctrl-C.
    """
    with one_line_errors(debug):
        texts = [read_text(file, None) for file in files or []]
        texts += [read_text(None, prompt)] if prompt is not None or not files else []
        how = AuditOptions(max_new_tokens, context, eps, samples, sample_tokens, temperature, batch, seed or 0)
        with opened(target, draft, read_settings(setting), dtype, device) as session:
            status = run(session, texts, how, as_json)
    raise typer.Exit(status)
