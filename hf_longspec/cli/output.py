"""Progress of the commands over the layers that read a prompt."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel


def prefill_work(model: PreTrainedModel, num_tokens: int) -> int:
    """The number that [`watched_layers`] counts up to during the prefill of `num_tokens` tokens."""
    return len(_layers(model)) * num_tokens


@contextmanager
def watched_layers(model: PreTrainedModel, advance: Callable[[int], None]) -> Iterator[Callable[[], None]]:
    """Call `advance(tokens)` whenever a decoder layer has run; yields a function that stops this."""

    def hook(layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        states = args[0] if args else kwargs.get("hidden_states")
        if torch.is_tensor(states):
            advance(states.shape[1])

    handles = [layer.register_forward_hook(hook, with_kwargs=True) for layer in _layers(model)]

    def stop() -> None:
        for handle in handles:
            handle.remove()

    try:
        yield stop
    finally:
        stop()


def _layers(model: PreTrainedModel) -> Sequence[torch.nn.Module]:
    """The decoder layers; none if they are not found, in which case there is no progress bar."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = (module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    return next((list(layers) for layers in lists if len(layers) == count), [])
