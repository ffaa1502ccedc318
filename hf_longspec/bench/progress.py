"""Progress on standard error, so that standard output holds results only."""

import time
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress


class Progress:
    """A bar on a terminal that is removed in the end, and silent elsewhere.

    Args:
        total (`int`): Steps to come; 0 if their number is unknown.
        text (`str`, *optional*): Description of the present task.
        lines (`bool`, *optional*, defaults to `False`): Print each description as a line with the time since the start,
            on a terminal and elsewhere.
        quiet (`bool`, *optional*, defaults to `False`): Show nothing.
        console (`Console`, *optional*): Where the bar is shown; standard error by default.
    """

    def __init__(
        self, total: int, text: str = "", lines: bool = False, quiet: bool = False, console: Console | None = None
    ):
        console = console or Console(stderr=True, highlight=False)
        columns: list[Any] = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
        columns += [TimeElapsedColumn(), TimeRemainingColumn()]
        shown = console.is_terminal and not quiet
        self._bar = RichProgress(*columns, console=console, transient=True, disable=not shown)
        self._task = self._bar.add_task(escape(text), total=total or None)
        self._lines = lines and not quiet
        self._started = time.perf_counter()

    def say(self, text: str) -> None:
        """Show a description of the present task."""
        if not self._lines:
            self._bar.update(self._task, description=escape(text))
            return
        minutes, seconds = divmod(int(time.perf_counter() - self._started), 60)
        self._bar.console.print(f"[{minutes:3d}:{seconds:02d}] {text}", markup=False, soft_wrap=True)

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

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
