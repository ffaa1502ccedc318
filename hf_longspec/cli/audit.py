"""`hf-longspec audit`: check that decoding with a draft is lossless on this machine."""

import json
import math
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import set_seed

from ..auditing import (
    EXACT,
    FOLLOWS,
    MIN_EXPECTED,
    NEAR_TIE,
    NOT_LOSSLESS,
    Comparison,
    SamplingReport,
    audit_sampling,
    compare,
)
from ..cli import CommandError, options
from .measuring import TokenClock
from .models import LoadedModels, load_models
from .progress import Progress, PromptProgress, say

# Tokens that are drawn at least: the variance of a count is a quarter of them at most.
FEWEST_DRAWN = 4 * MIN_EXPECTED
# From best to worst.
STYLES = {EXACT: "green", NEAR_TIE: "yellow", NOT_LOSSLESS: "bold red"}


def run(args: SimpleNamespace) -> bool:
    """Audit; returns whether the draft is not lossless."""
    if 0 < args.samples * args.sample_tokens < FEWEST_DRAWN:
        raise CommandError(
            f"--samples {args.samples} with {args.sample_tokens} tokens each are too few for a test. Pass at least "
            f"{math.ceil(FEWEST_DRAWN / args.sample_tokens)}, better several hundred, or 0 to skip this check."
        )
    texts = [options.read_text(file, None) for file in args.files or []]
    texts += [options.read_text(None, args.prompt)] if args.prompt is not None or not texts else []
    with load_models(args) as loaded:
        room = max(args.max_new_tokens, args.sample_tokens)
        prompts = [(name, loaded.encode(name, text, last=args.context, room=room)) for name, text in texts]
        loaded.draft.generation_config.on_unsupported = "error"  # plain text would be compared with itself
        audits = [(name, *audit_prompt(loaded, name, ids, args.max_new_tokens, args.eps)) for name, ids in prompts]
        sampling = None
        if args.samples:
            first = prompts[0][1]
            with Progress(args.samples * args.sample_tokens, "Sampling", "tokens") as progress:
                drawn = draw_samples(loaded, first, args, progress)
            sampling = audit_sampling(loaded.model, first, drawn, args.temperature)
    verdict = max((compared.verdict for _, compared, _ in audits), key=list(STYLES).index)
    if sampling is not None and sampling.verdict != FOLLOWS:
        verdict = NOT_LOSSLESS
    if args.as_json:
        result = {"verdict": verdict, **loaded.record(), "prompts": [record(*audited) for audited in audits]}
        print(json.dumps(result | {"sampling": None if sampling is None else asdict(sampling)}))
    else:
        show(verdict, audits, sampling)
    return verdict == NOT_LOSSLESS


def audit_prompt(
    loaded: LoadedModels, name: str, ids: torch.Tensor, max_new_tokens: int, eps: float | None
) -> tuple[Comparison, float]:
    """Continue the prompt `(1, length)` both ways; returns the comparison, and the tokens per verification."""
    texts: list[torch.Tensor] = []
    for draft in (None, loaded.draft):
        task = f"{name}: {'plain generate' if draft is None else loaded.draft_name}"
        how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": max_new_tokens, "do_sample": False}
        with PromptProgress(loaded.model, ids.shape[1], task, max_new_tokens) as progress:
            clock = TokenClock(on_arrival=progress.arrived)
            texts.append(loaded.model.generate(ids, assistant_model=draft, streamer=clock, **how))
    compared = compare(loaded.model, texts[0], texts[1], ids.shape[1], max_new_tokens, eps)
    return compared, loaded.draft.last_speculation.mean_acceptance_length


def draw_samples(loaded: LoadedModels, ids: torch.Tensor, args: SimpleNamespace, progress: Progress) -> torch.Tensor:
    """Draw continuations `(samples, K)` of one prompt `(1, length)`, batch by batch, each with a seed of its own."""
    loaded.model.generation_config.eos_token_id = None  # a text that ends has no further tokens to count
    how = {"max_new_tokens": args.sample_tokens, "temperature": args.temperature, "top_k": 0, "top_p": 1.0}
    drawn = []
    for start in range(0, args.samples, args.batch):
        set_seed((args.seed or 0) + start)
        rows = ids.expand(min(args.batch, args.samples - start), -1)
        how |= {"attention_mask": torch.ones_like(rows), "assistant_model": loaded.draft}
        drawn.append(loaded.model.generate(rows, do_sample=True, **how)[:, ids.shape[1] :])
        progress.update(drawn[-1].numel())
    return torch.cat(drawn)


def explain(name: str, compared: Comparison) -> str:
    """The result of the teacher-forced pass in a sentence."""
    report = compared.report
    counted = f"{name}: {report.num_argmax} of {report.num_tokens} tokens are the model's argmax"
    if not compared.is_whole:
        return f"{counted}, but the text ends too early."
    return f"{counted}. Largest gap {report.max_gap:.3g}, tolerance {report.eps:.2g}."


def record(name: str, compared: Comparison, tau: float) -> dict[str, Any]:
    """For JSON; positions count new tokens from 0, and a margin is `null` where a single token is allowed."""
    report, prompt = compared.report, compared.prompt_tokens
    return {
        "prompt": name,
        "prompt_tokens": prompt,
        "verdict": compared.verdict,
        "identical": compared.first_difference is None,
        "first_difference": compared.first_difference,
        "tau": tau,
        "teacher_forced": vars(report)
        | {
            "first_divergence": report.first_divergence and report.first_divergence[1] - prompt,
            "first_failure": report.first_failure and report.first_failure[1] - prompt,
            "max_gap": _finite(report.max_gap),
            "eps": _finite(report.eps),
            "margins": [_finite(value) for value in report.margins[:, 2].tolist()],
        },
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def show(verdict: str, audits: list[tuple[str, Comparison, float]], sampling: SamplingReport | None) -> None:
    """Print a table with one line per prompt, the details of those that are not exact, and the verdict."""
    console = Console(highlight=False, soft_wrap=True)
    table = Table()
    table.add_column("prompt", overflow="fold")
    for heading in ("new tokens", "first difference", "argmax", "smallest margin", "tau"):
        table.add_column(heading, justify="right")
    table.add_column("verdict", no_wrap=True)
    for name, compared, tau in audits:
        report, where = compared.report, compared.first_difference
        table.add_row(
            escape(name),
            str(compared.new_tokens),
            "none" if where is None else str(where),
            f"{report.num_argmax}/{report.num_tokens}",
            f"{report.margins[:, 2].min():.3g}",
            f"{tau:.2f}",
            f"[{STYLES[compared.verdict]}]{compared.verdict}[/]",
        )
    console.print(table, soft_wrap=False)
    say("first difference: index of the first new token that differs from plain generate.")
    say("margin: logit of an emitted token minus the best other logit; negative if it is not the argmax.")
    for name, compared, _ in audits:
        if compared.verdict != EXACT:
            say(explain(name, compared))
    if sampling is not None:
        say(f"sampling {sampling}.")
    console.print(f"[{STYLES[verdict]}]{verdict}{' only' if verdict == NEAR_TIE else ''}[/]")
