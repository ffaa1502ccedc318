"""Options that several commands share, the checks of their values, and how a command ends."""

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
import yaml

from ..cli import CommandError, one_line
from ..modeling.register_draft import weightless_drafts

INPUT_ERROR, INTERRUPTED = 2, 130
DtypeName = StrEnum("DtypeName", ["auto", "float32", "bfloat16", "float16"])

Target = Annotated[str, typer.Option(help="Hub id or folder of the model.", show_default=False)]
BY_NAME = ", ".join(weightless_drafts())
Draft = Annotated[
    str, typer.Option(help=f"Hub id or folder of a draft or a small model, or one that needs no training: {BY_NAME}.")
]
Prompt = Annotated[str | None, typer.Option(help="A text, instead of a file.", show_default=False)]
Setting = Annotated[
    list[str] | None,
    typer.Option("--set", help="A setting of the draft, such as num_assistant_tokens=6. May be repeated."),
]
Dtype = Annotated[DtypeName, typer.Option(help="Type of the weights; auto: bfloat16 on a GPU, float32 on a CPU.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; by default the first GPU, or the CPU.")]
Seed = Annotated[int | None, typer.Option(help="Seed of sampling.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show where an error came from.")]


def number(least: float, help: str, kind: type[int] | type[float] = int) -> Any:
    """An option for numbers of at least `least`; others are refused with the value, the rule and the remedy."""
    rule = f"{'an integer' if kind is int else 'a number'} of at least {least}"

    def parse(text: Any) -> float:
        try:
            if (value := kind(text)) >= least:
                return value
        except ValueError:
            pass  # refused as a number that is too small is
        raise typer.BadParameter(f"{text} is not {rule}. Pass {least} or more.")

    return typer.Option(help=help, parser=parse, metavar=f"<{kind.__name__} >= {least}>")


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
    line = one_line(error)
    return line if len(line.split()) >= len(str(error).split()) else f"{line} (--debug shows the rest)"


class YamlLoader(yaml.SafeLoader):
    """A YAML loader that reads 5e-4 as a number, as Python does; YAML 1.1 reads it as a text."""


YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_settings(texts: list[str] | None, example: str = "num_assistant_tokens=6") -> dict[str, Any]:
    """The settings given with `--set`, by name; values are read as YAML.

    Raises:
        CommandError: If one has another form; the message has the `example`.

    >>> read_settings(["training.learning_rate=5e-4"])
    {'training.learning_rate': 0.0005}
    """
    settings = {}
    for text in texts or []:
        name, equals, value = text.partition("=")
        if not equals or not all(name.split(".")):
            raise CommandError(f"--set {text!r}: expected key=value, such as {example}.")
        try:
            settings[name] = yaml.load(value, Loader=YamlLoader)
        except yaml.YAMLError as error:
            raise CommandError(f"--set {text!r}: the value is not YAML; put it into quotes.") from error
    return settings


def read_text(file: Path | None, prompt: str | None) -> tuple[str, str]:
    """Name and text of a prompt: `--prompt`, a file, or standard input for `-`.

    Raises:
        CommandError: If there is none, or two, or it is empty or no text.
    """
    if (file is None) == (prompt is None):
        raise CommandError("pass one prompt: a FILE, - for standard input, or --prompt TEXT.")
    name, text = "--prompt", prompt
    if file is not None:
        name = str(file)
        try:
            text = sys.stdin.read() if name == "-" else file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise CommandError(f"{file} is not UTF-8 text. Convert it, or pass another file.") from error
        except OSError as error:
            remedy = "Pass a text file, or - for standard input."
            raise CommandError(f"cannot read {file}: {error.strerror}. {remedy}") from error
    if not text or not text.strip():
        raise CommandError(f"{name} is empty: there is nothing to continue. Pass a text.")
    return name, text


def require_writable_file(option: str, file: Path) -> None:
    """Refuse a file that could not be written, before any work is done.

    Raises:
        CommandError: If its folder is missing, or the file cannot be written.
    """
    folder = file.absolute().parent
    if not folder.is_dir():
        raise CommandError(f"{option} {file}: there is no folder {file.parent}. Make it first.")
    if file.is_dir() or not os.access(file if file.exists() else folder, os.W_OK):
        raise CommandError(f"{option} {file}: cannot be written. Name another file.")


def require_writable_folder(option: str, folder: Path, new: bool = True) -> None:
    """Refuse a folder that could not be made or written to, before any work is done.

    Args:
        new (`bool`, *optional*, defaults to `True`): Whether the folder must be missing or empty.

    Raises:
        CommandError: If it is not empty, a file is in its place, or it cannot be written.
    """
    if folder.is_dir() and new and any(folder.iterdir()):
        raise CommandError(f"{folder} is not empty: pass a new folder as {option}.")
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if not there.is_dir():
        raise CommandError(f"{option} {folder}: {there} is a file. Pass another folder.")
    if not os.access(there, os.W_OK):
        raise CommandError(f"{option} {folder}: {there} cannot be written to. Pass another folder.")
