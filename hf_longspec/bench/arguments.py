"""Command-line arguments that all benchmarks share."""

import argparse
from pathlib import Path

import torch

from .timing import MIN_REPEATS


def parser(description: str | None, output: Path, minutes: float) -> argparse.ArgumentParser:
    """A parser with the shared arguments.

    Args:
        description (`str`): The script's own docstring.
        output (`Path`): Default result file.
        minutes (`float`): Default time limit.
    """
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--minutes", type=float, default=minutes, help="time limit (default: %(default)s)")
    made.add_argument("--threads", type=int, help="default: one per core")
    made.add_argument("--output", type=Path, default=output, help="a .jsonl file; the table goes beside it")
    made.add_argument("--quiet", action="store_true", help="no progress")
    return made


def add_repeats(made: argparse.ArgumentParser) -> None:
    """`--repeats`, for benchmarks that time something."""
    made.add_argument("--repeats", type=_repeats, default=MIN_REPEATS, help="turns, at least 5 (default: %(default)s)")


def add_prompts(made: argparse.ArgumentParser, target: str) -> None:
    """`--target` and `--data`, for benchmarks that run a real model."""
    made.add_argument("--target", default=target, help="folder or Hub id (default: %(default)s)")
    made.add_argument(
        "--data",
        action="append",
        help="folder of text files that the target was not trained on, or 'stdlib' for the standard library modules "
        "that the tiny target was not trained on (default); repeatable, the prompts then alternate",
    )


def integers(text: str) -> list[int]:
    """A list such as `2048,8192`."""
    return [int(part) for part in text.split(",")]


def names(text: str) -> list[str]:
    """A list such as `float32,bfloat16`."""
    return text.split(",")


def set_threads(threads: int | None) -> None:
    """Apply `--threads`."""
    if threads:
        torch.set_num_threads(threads)


def _repeats(text: str) -> int:
    if int(text) < MIN_REPEATS:
        raise argparse.ArgumentTypeError(f"{text}: a median needs at least {MIN_REPEATS} turns")
    return int(text)
