"""The command `hf-longspec`."""

import sys
import traceback
from typing import Annotated, Any

try:
    import typer

    from .commands import audit, bench, convert, demo, env, generate, publish, tokenize, train, tune
    from .options import INPUT_ERROR, INTERRUPTED
except ModuleNotFoundError as error:
    missing = (error.name or "").partition(".")[0]
    if missing not in ("typer", "rich"):
        raise
    print(f"error: hf-longspec needs {missing}, which is not installed: pip install typer rich", file=sys.stderr)
    sys.exit(2)

from hf_longspec import __version__

# Errors of the click that typer contains, or of the installed one: versions of typer differ.
USAGE_ERROR: Any = typer.BadParameter.__base__

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown"
)
for module in (generate, audit, tune, env, bench, tokenize, train, convert, publish, demo):
    app.command()(getattr(module, module.__name__.rpartition(".")[2]))


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"hf-longspec {__version__}")
        raise typer.Exit


@app.callback()
def hf_longspec(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Lossless speculative decoding at long context."""


def main() -> None:
    """Entry point of the command. Wrong options take one line, as every other error does."""
    try:
        status = app(prog_name="hf-longspec", standalone_mode=False)
    except USAGE_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.ctx.get_help())
        else:
            what = error.format_message()
            stop = "" if what.endswith((".", "?")) else "."
            print(f"error: {what}{stop} `{error.ctx.command_path} --help` shows what there is.", file=sys.stderr)
        status = INPUT_ERROR
    except typer.Abort:
        status = INTERRUPTED
    except Exception:  # shown by --debug; the status that Python ends with, 1, is a verdict of `audit`
        traceback.print_exc()
        status = INPUT_ERROR
    sys.exit(status or 0)


if __name__ == "__main__":
    main()
