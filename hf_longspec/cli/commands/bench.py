"""`hf-longspec bench`: speed and acceptance of drafts beside every other way to decode the same text."""

import math
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from .. import options

Preset = StrEnum("Preset", ["all"])


def bench(
    target: Annotated[str, typer.Option(help="Hub id or folder of the model.", show_default=False)],
    draft: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Hub id or folder of a draft, or one of {options.BY_NAME}. May be repeated. Default: specattn."
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Text; JSON lines, parquet or CSV of a known data set; a folder of either; or builtin, the default. "
            "May be repeated."
        ),
    ] = None,
    column: Annotated[
        str | None, typer.Option(help="Key or column of --data that holds the texts, for other data sets.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Write each text as a message, by the chat template of the target.")
    ] = False,
    preset: Annotated[
        Preset | None,
        typer.Option(
            help="all: every draft that needs no training beside those of --draft, after 1k to 16k tokens as far as "
            "positions and texts allow, greedily and at temperature 1."
        ),
    ] = None,
    context: Annotated[
        str | None,
        typer.Option(help="Tokens of the prompts, such as 2k,8k; own: whole documents of any length. Default: 2k."),
    ] = None,
    batch: Annotated[str, typer.Option(help="Rows that are decoded together, such as 1,4.")] = "1",
    dtype: Annotated[str, typer.Option(help="auto, or some of float32,bfloat16,float16.")] = "auto",
    assistant: Annotated[
        str | None, typer.Option(help="An ordinary small model for transformers' assisted generation.")
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(help="key=v1,v2: a setting of the drafts, temperature, penalty, window, context. Repeatable."),
    ] = None,
    max_new_tokens: Annotated[int, options.number(2, "Tokens per row and call.")] = 64,
    repeats: Annotated[int, options.number(1, "Turns; five or more for numbers to report.")] = 5,
    temperature: Annotated[float, options.number(0, "0 is greedy.", float)] = 0.0,
    lookup_tokens: Annotated[int, options.number(1, "Of transformers' prompt lookup.")] = 4,
    minutes: Annotated[float | None, options.number(0, "Begin no call that would end later.", float)] = None,
    output: Annotated[Path, options.output("Result file; table and plots go beside it.", suffix=".jsonl")] = Path(
        "bench.jsonl"
    ),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the result file.")] = False,
    plots: Annotated[bool, typer.Option("--plots/--no-plots", help="Draw PNGs.")] = True,
    as_json: options.Json = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Also list methods of the papers: run or not.")] = False,
    debug: options.Debug = False,
) -> None:
    """Measure drafts beside plain generate, our loop without a draft and prompt lookup.

    Every call is written as soon as it is over: Ctrl-C keeps what was measured, and --resume goes on. Use a --context
    and a --batch like yours, and leave the machine alone meanwhile.

    Examples:

    - hf-longspec bench --target hub_cards/tiny-target --draft hub_cards/tiny-longspec --context 1k,4k
    - hf-longspec bench --target Qwen/Qwen3-8B --data qmsum.jsonl --context 8k,32k --batch 1,4
    - hf-longspec bench --target Qwen/Qwen3-8B --data novels --context 16k --sweep sparse_ratio=0.03,0.07
    - hf-longspec bench --target Qwen/Qwen3-8B --data novels --preset all --minutes 20

    Exit status: 0; 1 if a text was wrong; 2 for what cannot be run; 130 after Ctrl-C.
    """
    with options.one_line_errors(debug, interrupted="Interrupted before anything was measured."):
        from ...bench.prompts import BUILTIN, DocumentPrompts, read_sources
        from ...bench.report import FAILED, rows_of
        from ...bench.results import check_resume
        from ...bench.sweep import parse_sweeps
        from .. import session
        from ..bench import ALL_CONTEXTS, ALL_DRAFTS, ALL_WAYS, USUAL_CONTEXT, Bench, dtypes, lengths, require_packages
        from ..bench import show as show_results

        check_resume(output, resume)
        require_packages(plots)
        drafts, sweeps = draft or [], sweep or []
        if preset is not None:
            drafts += [name for name in ALL_DRAFTS if name not in drafts]
            sweeps += [] if temperature or any(one.startswith("temperature=") for one in sweeps) else [ALL_WAYS]
        run = Bench(
            target=target,
            preset=preset,
            drafts=drafts or ["specattn"],
            assistant=assistant,
            data=data or [BUILTIN],
            chat=chat,
            contexts=lengths("--context", context or (USUAL_CONTEXT if preset is None else ALL_CONTEXTS)),
            batches=lengths("--batch", batch, options.MOST_ROWS),
            dtypes=dtypes("--dtype", dtype),
            sweeps=sweeps,
            tokens=max_new_tokens,
            repeats=repeats,
            temperature=temperature,
            lookup_tokens=lookup_tokens,
        )
        parse_sweeps(run.sweeps)
        documents, layout = read_sources(run.data, column)
        with session.quiet(progress_bars=not Path(target).is_dir()):
            prompts = DocumentPrompts(session.load_tokenizer(target), documents, chat)
            seconds = math.inf if minutes is None else minutes * 60
            file, interrupted = run.measure(prompts, layout, output, seconds, resume)
        show_results(file, plots, as_json, verbose)
        if interrupted:
            print("Interrupted; what was measured is kept. --resume goes on.", file=sys.stderr)
        wrong = any(row["text"] in FAILED for row in rows_of(file.records))
    raise typer.Exit(options.INTERRUPTED if interrupted else int(wrong))
