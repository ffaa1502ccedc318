"""Prompts that are prefilled once, and decoding that starts from copies of their cache."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from ..generation.cache import SpeculativeCache
from ..generation.target import TargetView
from .calls import MODES, Call, Decoding, HfMethod, run_call


@dataclass(frozen=True, eq=False)
class PrefilledPrompts:
    """Keys and values of prompts of one length. Every prefix of a prompt serves as a shorter prompt.

    Args:
        tokens (`torch.LongTensor` of shape `(P, T)`): The prompts.
        layers (`list[tuple[torch.Tensor, torch.Tensor]]`): Keys and values per layer, `(P, K, T, D)` each.
    """

    tokens: torch.Tensor
    layers: list[tuple[torch.Tensor, torch.Tensor]]

    def to(self, dtype: torch.dtype) -> "PrefilledPrompts":
        """The same prompts with rounded keys and values.

        The cost of a decoding step does not depend on their last bits, and a bfloat16 prefill takes very long on a
        processor without such instructions.
        """
        return PrefilledPrompts(self.tokens, [(keys.to(dtype), values.to(dtype)) for keys, values in self.layers])

    def first(self, count: int) -> "PrefilledPrompts":
        """The first prompts."""
        return PrefilledPrompts(self.tokens[:count], [(keys[:count], values[:count]) for keys, values in self.layers])

    def fill(self, cache: SpeculativeCache, rows: slice, stored: int) -> SpeculativeCache:
        """Replace the content of a cache with the first `stored` tokens of some prompts."""
        cache.reset()
        for layer, (keys, values) in zip(cache.layers, self.layers, strict=True):
            layer.update(keys[rows, :, :stored], values[rows, :, :stored])
        cache.set_lengths([stored] * cache.batch_size)
        return cache

    def dynamic_cache(self, rows: slice, stored: int) -> DynamicCache:
        """A cache of transformers with the first `stored` tokens of some prompts."""
        return DynamicCache([(keys[rows, :, :stored], values[rows, :, :stored]) for keys, values in self.layers])


class Decoder:
    """Decode after prefilled prompts with one target.

    Args:
        model (`PreTrainedModel`): Without an end-of-text token, see [`endless`], in the dtype of the prompts.
        prompts ([`PrefilledPrompts`]): The prompts after which decoding starts.
        tokens (`int`): Tokens to generate per row; all but the first are timed.
    """

    def __init__(self, model: PreTrainedModel, prompts: PrefilledPrompts, tokens: int):
        self.model, self.prompts, self.tokens = model, prompts, tokens
        self._shape = (0, 0)
        self._cache: Any = None

    def run(
        self, method: Any, rows: slice, context: int, mode: str | Decoding, seed: int, tokens: int | None = None
    ) -> Call:
        """Decode after the first `context` tokens of some prompts.

        Plain `generate` is given the cache of all prompt tokens but the last, and the loop that of all but those that
        its drafter looks at first. The rest runs before the first new token, when the clock starts.

        Args:
            method (`DraftModel` or [`HfMethod`]): How to decode.
            mode (`str` or [`Decoding`]): `sample` (temperature 1, nothing cut off), `greedy`, or another way.
        """
        tokens = tokens or self.tokens
        ids = self.prompts.tokens[rows, :context]
        prompt, how = (ids, torch.ones_like(ids)), MODES[mode] if isinstance(mode, str) else mode
        if isinstance(method, HfMethod):
            cache: Any = self.prompts.dynamic_cache(rows, context - 1)
            with _new_tokens_only(self.model):
                return run_call(self.model, method, prompt, decoding=how, tokens=tokens, seed=seed, cache=cache)
        method.generation_config.gate = False  # speculation itself is measured
        cache = self._speculative_cache(method, rows, context, tokens)
        return run_call(self.model, method, prompt, decoding=how, tokens=tokens, seed=seed, cache=cache)

    def _speculative_cache(self, draft: Any, rows: slice, context: int, tokens: int) -> SpeculativeCache:
        """One buffer for the present batch size and context, filled anew for every run."""
        batch = rows.stop - rows.start
        if self._shape != (batch, context):
            self._cache = None  # before the next one is allocated
            self._cache = SpeculativeCache(self.model.config, batch, context + max(tokens, self.tokens))
            self._shape = batch, context
        nodes = draft.num_tree_nodes(TargetView(self.model))
        read = max(nodes, getattr(draft, "prompt_tokens", 0))  # a copy of an older version has no such property
        return self.prompts.fill(self._cache, rows, max(0, context - read))


@contextmanager
def _new_tokens_only(model: PreTrainedModel) -> Iterator[None]:
    """Give the first forward what the cache does not hold.

    Transformers' assisted decoding runs the whole prompt in its first forward even if the cache holds it already, and
    its text is wrong then.
    """

    def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        handle.remove()
        cache, ids = kwargs.get("past_key_values"), kwargs.get("input_ids")
        if cache is not None and ids is not None and ids.shape[1] > cache.get_seq_length() > 0:
            new = ids.shape[1] - cache.get_seq_length()
            for name in ("input_ids", "position_ids"):
                kwargs[name] = None if kwargs.get(name) is None else kwargs[name][:, -new:]
        return args, kwargs

    handle = model.register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


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
    size = len(tokens)
    for index, row in enumerate(tokens):
        cache = DynamicCache()
        model(input_ids=row[None], past_key_values=cache, use_cache=True, logits_to_keep=1)
        if not layers:
            like = [(layer.keys[0], layer.values[0]) for layer in cache.layers]
            layers = [
                (keys.new_empty(size, *keys.shape), values.new_empty(size, *values.shape)) for keys, values in like
            ]
        for (keys, values), layer in zip(layers, cache.layers, strict=True):
            keys[index], values[index] = layer.keys[0], layer.values[0]
        done(index)
    return PrefilledPrompts(tokens, layers)
