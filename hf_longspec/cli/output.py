"""Progress of the commands over the layers that read a prompt."""

from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedModel

from ..bench.progress import Progress


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
