"""Prompts that were prefilled once, and caches made from them for every run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel

from ..generation.cache import SpeculativeCache
from ..generation.target import TargetView


@dataclass(frozen=True, eq=False)
class PrefilledPrompts:
    """Keys and values of some prompts of one length, and of everything shorter: a prefix of a prompt is a prompt.

    Args:
        tokens (`torch.LongTensor` of shape `(P, T)`): The prompts.
        layers (`list[tuple[torch.Tensor, torch.Tensor]]`): Keys and values per layer, `(P, K, T, D)` each.
    """

    tokens: torch.Tensor
    layers: list[tuple[torch.Tensor, torch.Tensor]]

    def to(self, dtype: torch.dtype) -> "PrefilledPrompts":
        """The same prompts with rounded keys and values.

        What a decoding step costs does not depend on their last bits, and a bfloat16 prefill takes very long on a
        processor without such instructions.
        """
        return PrefilledPrompts(self.tokens, [(keys.to(dtype), values.to(dtype)) for keys, values in self.layers])

    def prompt(self, rows: slice, length: int) -> torch.Tensor:
        """The first `length` tokens of some prompts."""
        return self.tokens[rows, :length]

    def dynamic_cache(self, rows: slice, stored: int) -> DynamicCache:
        """The cache of plain `generate`."""
        cache = DynamicCache()
        for index, (keys, values) in enumerate(self.layers):
            cache.update(keys[rows, :, :stored], values[rows, :, :stored], index)
        return cache

    def fill(self, cache: SpeculativeCache, rows: slice, stored: int) -> SpeculativeCache:
        """Make a cache hold the first `stored` tokens of some prompts, whatever it held before."""
        cache.reset()
        for layer, (keys, values) in zip(cache.layers, self.layers, strict=True):
            layer.update(keys[rows, :, :stored], values[rows, :, :stored])
        cache.set_lengths([stored] * cache.batch_size)
        return cache


def refuse_windows(model: PreTrainedModel) -> None:
    """Raise ValueError for a target whose layers do not all keep keys and values of the whole prompt."""
    target = TargetView(model)
    if target.sliding_layers or target.has_latent_cache:
        raise ValueError(
            f"{type(model).__name__} has sliding-window or latent layers, and the benchmark hands out copies of one "
            "prefilled cache of full keys and values. Choose a target with full attention in every layer."
        )


@torch.no_grad()
def prefill(
    model: PreTrainedModel, tokens: torch.Tensor, done: Callable[[int], None] = lambda index: None
) -> PrefilledPrompts:
    """Run prompts `(P, T)` through the model one by one, under its own attention.

    Args:
        done (`Callable[[int], None]`, *optional*): Told the index of every prompt that is ready.
    """
    refuse_windows(model)
    layers: list[tuple[torch.Tensor, torch.Tensor]] = []
    for index, row in enumerate(tokens):
        cache = DynamicCache()
        model(input_ids=row[None], past_key_values=cache, use_cache=True, logits_to_keep=1)
        if not layers:
            layers = [(_rows_like(at.keys, len(tokens)), _rows_like(at.values, len(tokens))) for at in cache.layers]
        for (keys, values), layer in zip(layers, cache.layers, strict=True):
            keys[index], values[index] = layer.keys[0], layer.values[0]
        done(index)
    return PrefilledPrompts(tokens, layers)


def _rows_like(part: torch.Tensor, rows: int) -> torch.Tensor:
    return part.new_empty(rows, *part.shape[1:])


def row_windows(num_prompts: int, batch: int, repeats: int) -> Sequence[slice]:
    """Which prompts make up the batch of each repeat: all of them in turn.

    >>> row_windows(4, 3, repeats=3)
    [slice(0, 3, None), slice(1, 4, None), slice(0, 3, None)]
    """
    starts = [(repeat * batch) % (num_prompts - batch + 1) for repeat in range(repeats)]
    return [slice(start, start + batch) for start in starts]
