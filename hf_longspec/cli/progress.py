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

from ..generation.sequences import busy_machine

# Between two lines about progress where there is no terminal.
LINE_SECONDS = 10
FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {n:,.0f} of {total:,.0f}{unit} [{elapsed}<{remaining}, {rate_noinv_fmt}]"


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

    Args:
        model (`PreTrainedModel`): The target.
        num_tokens (`int`): Tokens of the prompt.
        name (`str`): What is done.
        new_tokens (`int`): Tokens that are generated, all rows together; 0 to close the bar at the first one.
        rows (`int`, *optional*): Rows of the batch.
    """

    def __init__(self, model: PreTrainedModel, num_tokens: int, name: str, new_tokens: int, rows: int = 1):
        count = model.config.get_text_config(decoder=True).num_hidden_layers
        lists = (module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
        self._layers: list[Any] = next((list(layers) for layers in lists if len(layers) == count), [])
        self._hooks = [layer.register_forward_hook(self._has_run, with_kwargs=True) for layer in self._layers]
        self._name, self._new_tokens, self._rows = name, new_tokens, rows
        super().__init__(num_tokens, f"{name}, reading the prompt", "tokens")

    def _has_run(self, layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        states = args[0] if args else kwargs.get("hidden_states")
        if torch.is_tensor(states):
            # the last tokens may run again
            self.update(min(states.shape[1] / len(self._layers), self.total - self.n))

    def arrived(self, count: int) -> None:
        """Note that the rows have `count` new tokens each, one more than before."""
        if count == 1 and not self._new_tokens:
            self.close()
        elif count == 1:
            self._unhook()
            self.set_description_str(self._name, refresh=False)
            self.n, self.last_print_n, self.total = 0, 0, self._new_tokens
            self.start_t = self.last_print_t = time.time()
        self.update(self._rows)

    def close(self) -> None:
        self._unhook()
        super().close()

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()


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
