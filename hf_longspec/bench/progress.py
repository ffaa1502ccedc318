"""Says what a benchmark is doing, on the error stream: a bar on a terminal, plain lines elsewhere."""

import sys
import time

from tqdm import tqdm


class Progress:
    """A bar over `total` sections, and lines with the time since the start.

    Args:
        total (`int`): Sections to come.
        quiet (`bool`, *optional*, defaults to `False`): Print nothing.
    """

    def __init__(self, total: int, quiet: bool = False):
        self._started = time.perf_counter()
        self._quiet = quiet
        # disable=None: no bar when the error stream is not a terminal
        self._bar = tqdm(total=total, disable=True if quiet else None, unit="section", file=sys.stderr)

    def say(self, text: str) -> None:
        """One line."""
        if not self._quiet:
            minutes, seconds = divmod(int(time.perf_counter() - self._started), 60)
            tqdm.write(f"[{minutes:3d}:{seconds:02d}] {text}", file=sys.stderr)
            sys.stderr.flush()

    def step(self, count: int = 1) -> None:
        """Sections are done."""
        self._bar.update(count)

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._bar.close()
