"""`hf-longspec demo`: continue a long document with and without speculation, and compare."""

from pathlib import Path
from typing import Annotated

import typer

from .. import options

CONTEXT, NEW_TOKENS = 6144, 128
QUICK_CONTEXT, QUICK_NEW_TOKENS = 2048, 64


def demo(
    target: Annotated[
        str | None, typer.Option(help="Hub id or folder of the model; default: the tiny target of the repository.")
    ] = None,
    draft: Annotated[str | None, typer.Option(help="Hub id or folder of a draft; default: all kinds.")] = None,
    file: Annotated[Path | None, typer.Option(help="Text to continue; default: a standard library module.")] = None,
    context: Annotated[int | None, options.number(1, f"Most prompt tokens; default: {CONTEXT}, or what fits.")] = None,
    max_new_tokens: Annotated[int | None, options.number(1, f"Tokens to generate; default: {NEW_TOKENS}.")] = None,
    dtypes: Annotated[str, typer.Option(help="Types, in this order.")] = "float32,bfloat16",
    quick: Annotated[
        bool, typer.Option("--quick", help=f"{QUICK_CONTEXT} prompt and {QUICK_NEW_TOKENS} new tokens.")
    ] = False,
    debug: options.Debug = False,
) -> None:
    """Continue a long document with and without speculation, and compare.

    Text, speed and acceptance of plain generate, of the loop without a draft, and of every draft, on one text and by
    one clock; the last draft's text is shown while it is written.

    Examples:

    - hf-longspec demo --quick
    - hf-longspec demo --target Qwen/Qwen3-0.6B --file notes.txt
    - hf-longspec demo --target hub_cards/tiny-target --draft hub_cards/tiny-longspec --dtypes float32

    Exit status: 0; 1 if a text in float32 is not that of plain generate; 2 for what cannot be run; 130 after Ctrl-C.
    """
    with options.one_line_errors(debug):
        from .. import session
        from ..bench import dtypes as read_dtypes
        from ..demo import Demo

        names = read_dtypes("--dtypes", dtypes)
        with session.quiet(progress_bars=target is not None and not Path(target).is_dir()):
            status = Demo(target, draft, file, context, max_new_tokens, names, quick).run()
    raise typer.Exit(status)
