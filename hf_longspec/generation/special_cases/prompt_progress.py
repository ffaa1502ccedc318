"""A progress bar while a prompt is read that takes long.

Layers are counted as they run, since a prompt is one forward unless the call has `prefill_chunk_size`. On a GPU, layers
are counted when they are queued.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from ..call import PROMPT_PROGRESS
from ..drafter import DrafterAround
from ..special_case import SpecialCase

# Seconds of reading after which the bar appears.
DELAY = 5
FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {n:,.0f} of {total:,.0f}{unit} [{elapsed}<{remaining}, {rate_noinv_fmt}]"
OPTIONS = {"desc": "Reading the prompt", "unit": " tokens", "bar_format": FORMAT, "leave": False, "dynamic_ncols": True}


class ReadTokens:
    """Count the tokens of prompts that the decoder layers of a model read, until it is closed.

    Args:
        model (`PreTrainedModel`): The target.
        report (`Callable`): Called after every layer with the tokens that it has read, divided by the number of layers.
    """

    def __init__(self, model: Any, report: Callable[[float], Any]):
        count = model.config.get_text_config(decoder=True).num_hidden_layers
        lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
        layers: list[nn.Module] = next((list(layers) for layers in lists if len(layers) == count), [])
        self._report, self._count = report, count
        self._hooks = [layer.register_forward_hook(self._has_run, with_kwargs=True) for layer in layers]

    def _has_run(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        states = args[0] if args else kwargs.get("hidden_states")
        if torch.is_tensor(states):
            self._report(states.shape[1] / self._count)

    def close(self) -> None:
        """Stop to count."""
        for hook in self._hooks:
            hook.remove()


@contextmanager
def prompt_bar(model: Any, num_tokens: int) -> Iterator[None]:
    """Show a bar for `num_tokens` tokens of a prompt, if `model` needs more than five seconds for them."""
    with logging.tqdm(total=num_tokens, delay=DELAY, **OPTIONS) as bar:
        # some tokens may run twice
        read = ReadTokens(model, lambda count: bar.update(min(count, bar.total - bar.n)))
        try:
            yield
        finally:
            read.close()


class BarDrafter(DrafterAround):
    """Show how much of the prompts the target of a [`Session`] has read."""

    def __init__(self, inner: Any, model: Any):
        super().__init__(inner)
        self._model = model

    @contextmanager
    def watch_prefill(self, lengths: Sequence[int], starts: Sequence[int], places: Sequence[int]) -> Iterator[None]:
        """Open the context of the other drafter, and the bar."""
        most = max(length - start for length, start in zip(lengths, starts, strict=True))
        with prompt_bar(self._model, most), self.inner.watch_prefill(lengths, starts, places):
            yield


class PromptProgress(SpecialCase):
    """Calls in a terminal, unless `transformers.utils.logging.disable_progress_bar` was called."""

    case = PROMPT_PROGRESS

    def drafter(self, inner: Any, session: Any) -> Any:
        """Return the drafter of a [`Session`], with a bar."""
        return BarDrafter(inner, session.target.model)
