"""Options that several commands share, and how a command ends."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape

from ..cli import CommandError, first_line
from ..modeling.register_draft import weightless_drafts
from .recipes import parse_setting

INPUT_ERROR, INTERRUPTED = 2, 130
DTYPES = ("auto", "float32", "bfloat16", "float16")

Target = Annotated[str, typer.Option(help="Hub id or folder of the model.", show_default=False)]
BY_NAME = ", ".join(weightless_drafts())
Draft = Annotated[str, typer.Option(help=f"Hub id or folder of a draft, or one that needs no training: {BY_NAME}.")]
Prompt = Annotated[str | None, typer.Option(help="A text, instead of a file.", show_default=False)]
Setting = Annotated[
    list[str] | None,
    typer.Option("--set", help="A setting of the draft, such as num_assistant_tokens=6. May be repeated."),
]
Dtype = Annotated[
    str, typer.Option(help="auto, float32, bfloat16 or float16; auto: bfloat16 on a GPU, float32 on a CPU.")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; by default the first GPU, or the CPU.")]
Seed = Annotated[int | None, typer.Option(help="Seed of sampling.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show where an error came from.")]


@contextmanager
def one_line_errors(
    debug: bool,
    also: tuple[type[Exception], ...] = (),
    explain: Callable[[Any], str] | None = None,
    interrupted: str = "Interrupted.",
) -> Iterator[None]:
    """End the command with one line for an error that the user can correct; with `debug`, with the traceback.

    Args:
        also (`tuple`, *optional*): Further errors of this kind.
        explain (`Callable`, *optional*): Turns an error into its line.
        interrupted (`str`, *optional*): The line after Ctrl-C.

    Raises:
        typer.Exit: With status 2, or 130 after Ctrl-C.
    """
    expected: tuple[type[Exception], ...] = (CommandError, ValueError, OSError, ImportError, torch.OutOfMemoryError)
    try:
        yield
    except KeyboardInterrupt as error:
        print(f"\n{interrupted}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from error
    except (*expected, *also) as error:
        if debug:
            raise
        print(f"error: {(explain or said)(error)}", file=sys.stderr)
        raise typer.Exit(INPUT_ERROR) from error


def said(error: BaseException) -> str:
    """The line for an error, with a remedy if the error has none."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory: pass a shorter text, fewer --max-new-tokens or a smaller --dtype."
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}. Check the path and its permissions."
    more = " (--debug shows the rest)" if len(str(error).strip().splitlines()) > 1 else ""
    return first_line(error) + more


def read_settings(texts: list[str] | None) -> dict[str, Any]:
    """The settings given with `--set`, by name."""
    return dict(parse_setting(text) for text in texts or [])


def read_text(file: Path | None, prompt: str | None) -> tuple[str, str]:
    """Name and text of a prompt: `--prompt`, a file, or standard input for `-`.

    Raises:
        CommandError: If there is none, or two, or it is empty or no text.
    """
    if (file is None) == (prompt is None):
        raise CommandError("pass one prompt: a FILE, - for standard input, or --prompt TEXT.")
    name, text = ("--prompt", prompt or "") if file is None else (str(file), _content(file))
    if not text.strip():
        raise CommandError(f"{name} is empty: there is nothing to continue. Pass a text.")
    return name, text


def _content(file: Path) -> str:
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CommandError(f"{file} is not UTF-8 text. Convert it, or pass another file.") from error
    except OSError as error:
        raise CommandError(
            f"cannot read {file}: {error.strerror}. Pass a text file, or - for standard input."
        ) from error


def at_least(least: float) -> Callable[[Any], Any]:
    """A check for an option: refuses numbers below `least`."""

    def check(value: Any) -> Any:
        if value is not None and value < least:
            raise typer.BadParameter(f"{value} is below {escape(str(least))}, the least.")
        return value

    return check
