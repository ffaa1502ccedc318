"""A bar over the calls of a benchmark, on standard error; silent where that is no terminal."""

from typing import Any

from . import CommandError

try:
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
except ImportError as error:
    raise CommandError("the benchmark needs rich, which is not installed: pip install rich") from error


class BenchProgress:
    """What [`Matrix`] tells: what is being done, and how many calls are over.

    Args:
        total (`int`): Calls to come.
    """

    def __init__(self, total: int):
        console = Console(stderr=True)
        columns: list[Any] = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
        columns += [TimeElapsedColumn(), TimeRemainingColumn()]
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=total)

    def say(self, text: str) -> None:
        """What is being done now."""
        self._bar.update(self._task, description=escape(text))

    def step(self, count: int = 1) -> None:
        """Calls are over."""
        self._bar.advance(self._task, count)

    def __enter__(self) -> "BenchProgress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
