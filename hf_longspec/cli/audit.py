"""`hf-longspec audit`: does this draft, on this machine, leave the model's text as it is?"""

from pathlib import Path
from typing import Annotated

import typer

from . import options
from .audit_run import AuditOptions, run
from .options import at_least
from .session import opened

Files = Annotated[list[Path] | None, typer.Argument(help="Texts to continue; - for standard input.")]


def audit(
    target: options.Target,
    files: Files = None,
    prompt: options.Prompt = None,
    draft: options.Draft = "specattn",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per prompt.", callback=at_least(1))] = 64,
    context: Annotated[int, typer.Option(help="Most tokens of a prompt: its end.", callback=at_least(1))] = 2048,
    eps: Annotated[
        float | None, typer.Option(help="Distance in logits that is a near-tie; by default from the type.")
    ] = None,
    samples: Annotated[
        int, typer.Option(help="Also check the law of sampling, over this many samples; 0: not.", callback=at_least(0))
    ] = 0,
    sample_tokens: Annotated[int, typer.Option(help="Tokens of a sample.", callback=at_least(2))] = 4,
    temperature: Annotated[float, typer.Option(help="Of the samples.")] = 1.0,
    batch: Annotated[int, typer.Option(help="Samples that are drawn together.", callback=at_least(1))] = 32,
    setting: options.Setting = None,
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    seed: options.Seed = 0,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Check that a draft leaves the model's text as it is.

    Every prompt is continued greedily by plain generate and with the draft. In float32 the two texts must be the same.
    In other types two right computations can part where the best tokens are nearly tied: there the model reads the
    speculative text once more, and every token must be its choice, or within rounding of it.

    --samples N draws the beginning of N texts and compares the frequencies of tokens with the model's probabilities;
    some hundred show coarse mistakes, some ten thousand fine ones.

    Examples:

    \b
    hf-longspec audit notes.txt --target Qwen/Qwen3-0.6B --dtype float32
    hf-longspec audit notes.txt --target Qwen/Qwen3-0.6B --draft org/draft --dtype bfloat16
    hf-longspec audit --prompt "The lighthouse" --target Qwen/Qwen3-0.6B --samples 512 --json

    Exit status: 0 for exact, or with near-ties only; 1 for not lossless; 2 for what cannot be run; 130 after Ctrl-C.
    """
    with options.one_line_errors(debug):
        texts = [options.read_text(file, None) for file in files or []]
        texts += [options.read_text(None, prompt)] if prompt is not None or not files else []
        how = AuditOptions(max_new_tokens, context, eps, samples, sample_tokens, temperature, batch, seed or 0)
        with opened(target, draft, options.read_settings(setting), dtype, device) as session:
            status = run(session, texts, how, as_json)
    raise typer.Exit(status)
