"""Progress on standard error, so that standard output holds results only."""

from typing import Any, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress


class Progress:
    """A bar on a terminal that is removed in the end, and silent elsewhere.

    Args:
        total (`int`): Steps to come; 0 if their number is unknown.
        text (`str`, *optional*): Description of the present task.
        console (`Console`, *optional*): Where the bar is shown; standard error by default.
    """

    def __init__(self, total: int, text: str = "", console: Console | None = None):
        console = console or Console(stderr=True, highlight=False)
        columns: list[Any] = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
        columns += [TimeElapsedColumn(), TimeRemainingColumn()]
        self._bar = RichProgress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task(escape(text), total=total or None)

    def say(self, text: str) -> None:
        """Show a description of the present task."""
        self._bar.update(self._task, description=escape(text))

    def step(self, count: int = 1) -> None:
        """Advance by so many steps."""
        self._bar.advance(self._task, count)

    def next(self, text: str, total: int) -> None:
        """Begin another task in place of this one."""
        self._bar.remove_task(self._task)
        self._task = self._bar.add_task(escape(text), total=total or None)

    def stop(self) -> None:
        """Remove the bar."""
        self._bar.stop()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
