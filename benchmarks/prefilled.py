"""Prefilled prompts for both sides: plain `generate` starts from a copy of a prefilled cache, as the drafts do."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from hf_longspec.bench import prefill as drafts_only
from hf_longspec.bench.calls import Call, HfMethod


def row_windows(num_prompts: int, batch: int, repeats: int) -> Sequence[slice]:
    """Choose the prompts that make up the batch of each repeat: all of them in turn.

    >>> row_windows(4, 3, repeats=3)
    [slice(0, 3, None), slice(1, 4, None), slice(0, 3, None)]
    """
    starts = [(repeat * batch) % (num_prompts - batch + 1) for repeat in range(repeats)]
    return [slice(start, start + batch) for start in starts]


class PrefilledPrompts(drafts_only.PrefilledPrompts):
    """Prefilled prompts for plain `generate` as well. Every prefix of a prompt serves as a shorter prompt."""

    def to(self, dtype: torch.dtype) -> "PrefilledPrompts":
        """The same prompts with rounded keys and values.

        The cost of a decoding step does not depend on their last bits, and a bfloat16 prefill takes very long on a
        processor without such instructions.
        """
        return PrefilledPrompts(self.tokens, [(keys.to(dtype), values.to(dtype)) for keys, values in self.layers])

    def prompt(self, rows: slice, length: int) -> torch.Tensor:
        """The first `length` tokens of some prompts."""
        return self.tokens[rows, :length]

    def dynamic_cache(self, rows: slice, stored: int) -> DynamicCache:
        """A cache for plain `generate`."""
        cache = DynamicCache()
        for index, (keys, values) in enumerate(self.layers):
            cache.update(keys[rows, :, :stored], values[rows, :, :stored], index)
        return cache


class Decoder(drafts_only.Decoder):
    """Decode after prefilled prompts with drafts and with the methods of transformers."""

    prompts: PrefilledPrompts

    def run(self, method: Any, rows: slice, context: int, mode: str, seed: int, tokens: int | None = None) -> Call:
        """Decode after the first `context` tokens of some prompts.

        Plain `generate` is given the cache of all prompt tokens but the last.

        Args:
            method (`DraftModel` or [`HfMethod`]): How to decode.
        """
        if not isinstance(method, HfMethod):
            return super().run(method, rows, context, mode, seed, tokens)
        cache = self.prompts.dynamic_cache(rows, context - 1)
        with _new_tokens_only(self.model):
            return self._run(method, rows, context, mode, seed, tokens or self.tokens, cache)


def prefill(
    model: PreTrainedModel, tokens: torch.Tensor, done: Callable[[int], None] = lambda index: None
) -> PrefilledPrompts:
    """Run prompts `(P, T)` through the model one by one, under its own attention."""
    found = drafts_only.prefill(model, tokens, done)
    return PrefilledPrompts(found.tokens, found.layers)


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
