"""What the demo shows in the terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import TextStreamer

from . import CommandError
from .remarks import Group

try:
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.table import Table
except ImportError as error:
    raise CommandError("the demo needs rich, which is not installed: pip install rich") from error

CHECK_STYLES = {"yes": "green", "exact": "green", "reference": "dim", "near-tie": "yellow"}
TAIL_CHARACTERS = 300  # of the prompt, shown before its continuation


class Display:
    """Progress, streamed text and tables on standard output."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)

    def say(self, text: str, style: str | None = None) -> None:
        """One line or paragraph."""
        self.console.print(text, style=style, markup=False)

    @contextmanager
    def progress(self, label: str, total: int) -> Iterator[tuple[Callable[[int], None], Callable[[], None]]]:
        """A bar that is there until it is stopped; yields how to advance and how to stop it."""
        columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
        # a file or a pipe cannot take a bar back
        with Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal) as bar:
            task = bar.add_task(escape(label), total=total or None)
            yield lambda count: bar.advance(task, count), bar.stop

    def text_streamer(self, tokenizer: Any, prompt: str) -> "TerminalStreamer":
        """A streamer that prints the end of the prompt, then the continuation word by word."""
        return TerminalStreamer(self.console, tokenizer, prompt[-TAIL_CHARACTERS:])

    def table(self, group: Group) -> None:
        """The measurements in one dtype."""
        last = "identical text" if group.dtype == "float32" else "verdict"
        table = Table(title=f"{group.dtype}, behind {group.context} tokens", title_justify="left", title_style="bold")
        table.add_column("decoding")
        for heading in ("tokens/s", "speed ratio", "tau", "first token"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column(last, no_wrap=True)
        for row, check in zip(group.rows, group.checks, strict=True):
            table.add_row(
                escape(row.name),
                f"{row.tokens_per_second:.1f}",
                f"{group.speed_ratio(row):.2f}x",
                "-" if row.tau is None else f"{row.tau:.2f}",
                f"{row.first_token_seconds:.2f} s",
                f"[{CHECK_STYLES.get(check, 'bold red')}]{check}[/]",
            )
        self.console.print(table)


class TerminalStreamer(TextStreamer):
    """Prints text as soon as its words are complete."""

    def __init__(self, console: Console, tokenizer: Any, tail: str):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.console = console
        self.tail = tail

    def begin(self) -> None:
        """Print the end of the prompt, for the continuation to follow."""
        self._write(self.tail, "dim")

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Called with every piece of finished text."""
        self._write(text + ("\n" if stream_end else ""), "bold cyan")

    def _write(self, text: str, style: str) -> None:
        self.console.print(text, style=style, end="", markup=False, soft_wrap=True)
