"""Progress on standard error, so that standard output holds results only."""

from typing import Any, Self

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from transformers import PreTrainedModel


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


class PromptProgress(Progress):
    """A bar that advances with every decoder layer that reads a prompt, until it is stopped or another task begins.

    Args:
        model (`PreTrainedModel`): The model. The bar stays empty if its decoder layers are not found.
        num_tokens (`int`): Tokens of the prompt.
        text (`str`): Description.
        console (`Console`, *optional*): See [`Progress`].
    """

    def __init__(self, model: PreTrainedModel, num_tokens: int, text: str, console: Console | None = None):
        count = model.config.get_text_config(decoder=True).num_hidden_layers
        lists = (module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
        layers = next((list(layers) for layers in lists if len(layers) == count), [])
        super().__init__(len(layers) * num_tokens, text, console)
        self._hooks = [layer.register_forward_hook(self._has_run, with_kwargs=True) for layer in layers]

    def _has_run(self, layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        states = args[0] if args else kwargs.get("hidden_states")
        if torch.is_tensor(states):
            self.step(states.shape[1])

    def next(self, text: str, total: int) -> None:
        """Begin another task in place of this one, and leave the layers alone."""
        self._unhook()
        super().next(text, total)

    def stop(self) -> None:
        """Remove the bar, and leave the layers alone."""
        self._unhook()
        super().stop()

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
