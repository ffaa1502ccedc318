"""`hf-longspec bench`: speed and acceptance of drafts beside everything else that decodes the same text."""

import sys
from pathlib import Path
from typing import Annotated

from . import CommandError, first_line

try:
    import typer

    from .options import INPUT_ERROR, INTERRUPTED
except ImportError as error:
    raise CommandError("hf-longspec needs typer, which is not installed: pip install 'hf_longspec[bench]'") from error


def bench(
    target: Annotated[str, typer.Option(help="Hub id or folder of the model.", show_default=False)],
    draft: Annotated[
        list[str] | None,
        typer.Option(help="Hub id or folder of a draft, or specattn or ngram. May be repeated. Default: specattn."),
    ] = None,
    data: Annotated[
        str, typer.Option(help="Text, JSON lines of a known data set, a folder of either, or builtin.")
    ] = "builtin",
    context: Annotated[
        str, typer.Option(help="Tokens of the prompts, such as 2k,8k; own: whole documents as they are.")
    ] = "2k",
    batch: Annotated[str, typer.Option(help="Rows that are decoded together, such as 1,4.")] = "1",
    dtype: Annotated[str, typer.Option(help="auto, or some of float32,bfloat16,float16.")] = "auto",
    assistant: Annotated[
        str | None, typer.Option(help="An ordinary small model for transformers' assisted generation.")
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(help="key=v1,v2: a setting of the drafts, temperature, penalty, window, context. Repeatable."),
    ] = None,
    analyse: Annotated[bool, typer.Option("--analyse", help="Also look into drafted tokens and selections.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens per row and call.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Turns; five or more for numbers to report.")] = 5,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    lookup_tokens: Annotated[int, typer.Option(min=1, help="Of transformers' prompt lookup.")] = 4,
    minutes: Annotated[float | None, typer.Option(min=0, help="Begin no call that would end later.")] = None,
    output: Annotated[Path, typer.Option(help="Result file; table and plots go beside it.")] = Path("bench.jsonl"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the result file.")] = False,
    plots: Annotated[bool, typer.Option("--plots/--no-plots", help="Draw PNGs.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from.")] = False,
) -> None:
    """Measure drafts beside plain generate, our loop without a draft and prompt lookup.

    Every call is written as soon as it is over: Ctrl-C keeps what was measured, and --resume goes on. Use a --context
    and a --batch like yours, and leave the machine alone meanwhile.

    Examples:

    \b
    hf-longspec bench --target hub_cards/tiny-target --draft hub_cards/tiny-longspec --context 1k,4k
    hf-longspec bench --target Qwen/Qwen3-8B --data qmsum.jsonl --context 8k,32k --batch 1,4
    hf-longspec bench --target Qwen/Qwen3-8B --data novels --context 16k --sweep sparse_ratio=0.03,0.07

    Exit status: 0; 1 if a text was wrong; 2 for what cannot be run; 130 after Ctrl-C.
    """
    try:
        from . import bench_request, bench_run

        request = bench_request.Request(
            target=target,
            drafts=tuple(draft or ("specattn",)),
            data=data,
            contexts=bench_request.lengths("--context", context),
            batches=bench_request.lengths("--batch", batch),
            dtypes=bench_request.dtypes(dtype),
            assistant=assistant,
            sweeps=tuple(sweep or ()),
            analyse=analyse,
            tokens=max_new_tokens,
            repeats=repeats,
            temperature=temperature,
            lookup_tokens=lookup_tokens,
            minutes=minutes,
            output=output,
            resume=resume,
            plots=plots,
            as_json=as_json,
        )
        status = bench_run.run(request)
    except KeyboardInterrupt as error:
        print("\nInterrupted before anything was measured.", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from error
    except (CommandError, ValueError, OSError, ImportError) as error:
        if debug:
            raise
        print(f"error: {first_line(error)}", file=sys.stderr)
        raise typer.Exit(INPUT_ERROR) from error
    raise typer.Exit(status)
