"""Progress on standard error, so that standard output holds results only. Silent where it is no terminal."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """A spinner beside `text`, for work of unknown length."""
    console = Console(stderr=True)
    if not console.is_terminal:  # a file gets no line for what is not there to be watched
        yield
        return
    with console.status(escape(text)):
        yield


class Bar:
    """A bar on standard error that can begin anew with another task."""

    def __init__(self, progress: Progress, text: str, total: int):
        self._progress = progress
        self._task = progress.add_task(escape(text), total=total or None)

    def advance(self, count: int = 1) -> None:
        """So many steps further."""
        self._progress.advance(self._task, count)

    def say(self, text: str) -> None:
        """What is being done now."""
        self._progress.update(self._task, description=escape(text))

    def next(self, text: str, total: int) -> None:
        """Another task in place of this one."""
        self._progress.remove_task(self._task)
        self._task = self._progress.add_task(escape(text), total=total or None)

    def stop(self) -> None:
        """Take the bar away."""
        self._progress.stop()


@contextmanager
def bar(text: str, total: int) -> Iterator[Bar]:
    """A bar over `total` steps, of unknown length if 0, that is gone in the end."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield Bar(progress, text, total)
