"""What a command says on standard error while it works: how far it is, and that other programs slow it down."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.utils import logging

from ..generation.sequences import busy_machine
from ..generation.special_cases.prompt_progress import FORMAT, ReadTokens

# Between two lines about progress where there is no terminal.
LINE_SECONDS = 10


def say(text: str, stderr: bool = False) -> None:
    """Print sentences, which break between words in a terminal and not at all in a pipe."""
    console = Console(stderr=stderr, highlight=False)
    console.print(text, markup=False, soft_wrap=not console.is_terminal)


class Progress(tqdm):
    """A bar on a terminal that is removed in the end; elsewhere a line every ten seconds.

    Args:
        total (`int`): Number of steps.
        text (`str`): What is done.
        unit (`str`): What a step is.
    """

    def __init__(self, total: int, text: str, unit: str):
        is_terminal = sys.stderr.isatty()
        super().__init__(
            total=total,
            desc=text,
            unit=f" {unit}",
            leave=False,
            mininterval=0.1 if is_terminal else LINE_SECONDS,
            delay=0 if is_terminal else LINE_SECONDS,
            smoothing=0,  # the speed is the mean
            dynamic_ncols=True,
            bar_format=FORMAT,
        )

    @staticmethod
    def status_printer(file: Any) -> Any:
        """Return what shows a text; lines where no terminal could go back to their beginning."""
        return tqdm.status_printer(file) if file.isatty() else lambda text: print(text, file=file) if text else None


class PromptProgress(Progress):
    """The tokens of a prompt that the decoder layers have read, then those that are generated.

    The bars of transformers are off until the prompt has been read: the call would show another one.

    Args:
        model (`PreTrainedModel`): The target.
        num_tokens (`int`): Tokens of the prompt.
        name (`str`): What is done.
        new_tokens (`int`): Tokens that are generated, all rows together; 0 to close the bar at the first one.
        rows (`int`, *optional*): Rows of the batch.
    """

    def __init__(self, model: PreTrainedModel, num_tokens: int, name: str, new_tokens: int, rows: int = 1):
        self._name, self._new_tokens, self._rows = name, new_tokens, rows
        self._has_bars = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        # the last tokens may run again
        self._read = ReadTokens(model, lambda count: self.update(min(count, self.total - self.n)))
        super().__init__(num_tokens, f"{name}, reading the prompt", "tokens")

    def arrived(self, count: int) -> None:
        """Note that the rows have `count` new tokens each, one more than before."""
        if count == 1 and not self._new_tokens:
            self.close()
        elif count == 1:
            self._end_reading()
            self.set_description_str(self._name, refresh=False)
            self.n, self.last_print_n, self.total = 0, 0, self._new_tokens
            self.start_t = self.last_print_t = time.time()
        self.update(self._rows)

    def close(self) -> None:
        self._end_reading()
        super().close()

    def _end_reading(self) -> None:
        self._read.close()
        if self._has_bars:
            logging.enable_progress_bar()
            self._has_bars = False


@contextmanager
def noticing_others(one_thread: bool = False) -> Iterator[None]:
    """Say in a line that other programs use the machine while something is measured.

    With `one_thread`, a machine that is busy before the measurement is used with one thread from there on.
    """
    started, processor, threads = time.perf_counter(), time.process_time(), torch.get_num_threads()
    what = "speeds are lower, and ratios less certain"
    if before := busy_machine():
        fewer = ""
        if one_thread and threads > 1:
            torch.set_num_threads(1)
            fewer = " One thread is used."
        say(f"This machine is busy ({before}): {what}.{fewer}", stderr=True)
    yield
    during = busy_machine(time.perf_counter() - started, time.process_time() - processor)
    if during and not before:
        remedy = "; OMP_NUM_THREADS=1 is faster then" if threads > 1 else ""
        say(f"The machine was busy ({during}): {what}{remedy}.", stderr=True)
