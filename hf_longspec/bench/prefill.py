"""Prompts that are prefilled once, and decoding that starts from copies of their cache."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from ..generation.cache import SpeculativeCache
from ..generation.target import TargetView
from .calls import MODES, Call, run_call


@dataclass(frozen=True, eq=False)
class PrefilledPrompts:
    """Keys and values of prompts of one length. Every prefix of a prompt serves as a shorter prompt.

    Args:
        tokens (`torch.LongTensor` of shape `(P, T)`): The prompts.
        layers (`list[tuple[torch.Tensor, torch.Tensor]]`): Keys and values per layer, `(P, K, T, D)` each.
    """

    tokens: torch.Tensor
    layers: list[tuple[torch.Tensor, torch.Tensor]]

    def fill(self, cache: SpeculativeCache, rows: slice, stored: int) -> SpeculativeCache:
        """Replace the content of a cache with the first `stored` tokens of some prompts."""
        cache.reset()
        for layer, (keys, values) in zip(cache.layers, self.layers, strict=True):
            layer.update(keys[rows, :, :stored], values[rows, :, :stored])
        cache.set_lengths([stored] * cache.batch_size)
        return cache


class Decoder:
    """Decode after prefilled prompts with one target.

    Args:
        model (`PreTrainedModel`): Without an end-of-text token, see [`endless`], in the dtype of the prompts.
        prompts ([`PrefilledPrompts`]): The prompts after which decoding starts.
        tokens (`int`): Tokens to generate per row; all but the first are timed.
    """

    def __init__(self, model: PreTrainedModel, prompts: PrefilledPrompts, tokens: int):
        self.model, self.prompts, self.tokens = model, prompts, tokens
        self._caches: dict[tuple[int, int], SpeculativeCache] = {}

    def run(self, draft: Any, rows: slice, context: int, mode: str, seed: int, tokens: int | None = None) -> Call:
        """Decode after the first `context` tokens of some prompts.

        The loop is given the cache of all prompt tokens but those that its drafter looks at first. These run before
        the first new token, when the clock starts.

        Args:
            mode (`str`): `sample` (temperature 1, nothing cut off) or `greedy`.
        """
        tokens = tokens or self.tokens
        draft.generation_config.gate = False  # speculation itself is measured
        cache = self._speculative_cache(draft, rows, context, tokens)
        return self._run(draft, rows, context, mode, seed, tokens, cache)

    def _run(self, method: Any, rows: slice, context: int, mode: str, seed: int, tokens: int, cache: Any) -> Call:
        ids = self.prompts.tokens[rows, :context]
        prompt, how = (ids, torch.ones_like(ids)), MODES[mode]
        return run_call(self.model, method, prompt, decoding=how, tokens=tokens, seed=seed, cache=cache)

    def _speculative_cache(self, draft: Any, rows: slice, context: int, tokens: int) -> SpeculativeCache:
        """One buffer per batch size and context, filled anew for every run."""
        batch, key = rows.stop - rows.start, (rows.stop - rows.start, context)
        if key not in self._caches:
            self._caches.clear()
            limit = context + max(tokens, self.tokens)
            self._caches[key] = SpeculativeCache(self.model.config, batch, limit)
        nodes = draft.num_tree_nodes(TargetView(self.model))
        read = max(nodes, getattr(draft, "prompt_tokens", 0))  # a copy of an older version has no such property
        return self.prompts.fill(self._caches[key], rows, max(0, context - read))


@torch.no_grad()
def prefill(
    model: PreTrainedModel, tokens: torch.Tensor, done: Callable[[int], None] = lambda index: None
) -> PrefilledPrompts:
    """Run prompts `(P, T)` through the model one by one, under its own attention.

    Args:
        done (`Callable[[int], None]`, *optional*): Called with the index of every prompt that is ready.

    Raises:
        ValueError: If a layer does not keep keys and values of the whole prompt.
    """
    target = TargetView(model)
    if target.sliding_layers or target.has_latent_cache:
        raise ValueError(
            f"{type(model).__name__} has sliding-window or latent layers, and the benchmark hands out copies of one "
            "prefilled cache of full keys and values. Choose a target with full attention in every layer."
        )
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
