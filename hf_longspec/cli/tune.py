"""`hf-longspec tune`: settings of a draft, measured on your own text and machine."""

from pathlib import Path
from typing import Annotated

import typer

from . import options
from .options import at_least
from .session import opened
from .tune_run import TuneOptions, check_destination, run

DryRun = Annotated[bool, typer.Option("--dry-run", help="Measure and show, write nothing.")]


def tune(
    target: options.Target,
    file: Annotated[Path | None, typer.Argument(help="Text of the kind to be continued; - for standard input.")] = None,
    prompt: options.Prompt = None,
    draft: options.Draft = "specattn",
    output: Annotated[Path | None, typer.Option(help="New folder for the tuned draft.", show_default=False)] = None,
    dry_run: DryRun = False,
    context: Annotated[int, typer.Option(help="Tokens of a prompt.", callback=at_least(32))] = 4096,
    prompts: Annotated[int, typer.Option(help="Prompts, spread over the text.", callback=at_least(1))] = 2,
    batch: Annotated[int, typer.Option(help="Prompts that are decoded together.", callback=at_least(1))] = 1,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per prompt and run.", callback=at_least(4))] = 64,
    repeats: Annotated[int, typer.Option(help="Runs of a candidate; their median counts.", callback=at_least(1))] = 3,
    sample: Annotated[bool, typer.Option("--sample", help="At temperature 1 instead of greedily.")] = False,
    setting: options.Setting = None,
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Find the fastest settings of a draft for a text and a machine, and write them into the draft.

    specattn: in the three steps of its paper. The share of the cache that drafting reads is raised until acceptance no
    longer grows; then the number of drafted tokens is chosen by speed, and the share once more around its value.
    LongSpec: the widths of its tree. TokenSwift: the branching of its tree. Prompts are taken from the text and read
    once; all candidates decode behind them in turns.

    The winner replaces the present settings if it is faster than they are by more than noise. A draft in a folder gets
    a new generation_config.json, in one step or not at all; other drafts are saved to --output.

    Examples:

    \b
    hf-longspec tune notes.txt --target Qwen/Qwen3-0.6B --dry-run
    hf-longspec tune notes.txt --target Qwen/Qwen3-0.6B --context 16384 --output tuned
    hf-longspec tune notes.txt --target Qwen/Qwen3-0.6B --draft ./draft

    Exit status: 0, also if the present settings stay; 2 for what cannot be run; 130 after Ctrl-C.
    """
    with options.one_line_errors(debug):
        how = TuneOptions(context, prompts, batch, max_new_tokens, repeats, sample)
        check_destination(draft, output, dry_run)
        name, text = options.read_text(file, prompt)
        with opened(target, draft, options.read_settings(setting), dtype, device) as session:
            run(session, name, text, how, output, dry_run, as_json)
