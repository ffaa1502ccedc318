"""Decoding after prompts that are read once, and the ways to decode and to choose tokens that benchmarks name."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from hf_longspec.cli.measuring import HfMethod, Measurement, changed, run_call, sampling
from hf_longspec.generation.cache import CACHE_NAME, SpeculativeCache
from hf_longspec.generation.sampling import ContextualPenaltyLogitsProcessor
from hf_longspec.generation.target import TargetView

# Settings of a draft that differ from its own.
Point = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Method:
    """A way to decode."""

    name: str  # in the results
    how: Any  # as [`run_call`] takes it
    point: Point = ()

    def with_settings(self) -> Any:
        return changed(self.how, dict(self.point))


@dataclass(frozen=True)
class Decoding:
    """The way in which the target chooses its tokens."""

    temperature: float = 0.0  # 0 is greedy
    min_p: float | None = None
    penalty: float | None = None  # contextual penalty over the last `window` tokens
    window: int = 1024  # that of TokenSwift's experiments

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def options(self) -> dict[str, Any]:
        """Arguments of `generate`; each call needs its own, as a processor may have a state."""
        options = sampling(self.temperature)
        if self.min_p is not None and not self.greedy:
            options["min_p"] = self.min_p
        if self.penalty is not None:
            options["logits_processor"] = [ContextualPenaltyLogitsProcessor(self.penalty, self.window)]
        return options

    def to_dict(self) -> dict[str, Any]:
        """The values that differ from plain greedy decoding; the window goes with the penalty."""
        named = {each.name: value for each in fields(self) if (value := getattr(self, each.name)) != each.default}
        return named if self.penalty is None else named | {"window": self.window}


MODES = {"sample": Decoding(temperature=1.0), "greedy": Decoding()}


@dataclass(frozen=True, eq=False)
class PrefilledPrompts:
    """Keys and values of prompts of one length. Every prefix of a prompt serves as a shorter prompt."""

    tokens: torch.Tensor  # `(P, T)`: the prompts
    layers: list[tuple[torch.Tensor, torch.Tensor]]  # keys and values per layer, `(P, K, T, D)` each

    def to(self, dtype: torch.dtype) -> "PrefilledPrompts":
        """The same prompts with rounded keys and values.

        The cost of a decoding step does not depend on their last bits, and a bfloat16 prefill takes very long on a
        processor without such instructions.
        """
        return PrefilledPrompts(self.tokens, [(keys.to(dtype), values.to(dtype)) for keys, values in self.layers])

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
    """Decode after prefilled prompts with one target."""

    def __init__(self, model: PreTrainedModel, prompts: PrefilledPrompts, tokens: int):
        self.model, self.prompts, self.tokens = model, prompts, tokens
        self._shape = (0, 0)
        self._cache: Any = None

    def run(
        self, method: Any, rows: slice, context: int, mode: str | Decoding, seed: int, tokens: int | None = None
    ) -> Measurement:
        """Decode after the first `context` tokens of some prompts.

        Plain `generate` is given the cache of all prompt tokens but the last, and the loop that of all but those that
        its drafter looks at first. The rest runs before the first new token, when the clock starts.
        """
        tokens = tokens or self.tokens
        ids = self.prompts.tokens[rows, :context]
        prompt, options = (ids, torch.ones_like(ids)), (MODES[mode] if isinstance(mode, str) else mode).options()
        how: dict[str, Any] = {"decoding": options, "tokens": tokens, "seed": seed}
        if isinstance(method, HfMethod):
            cache: Any = self.prompts.dynamic_cache(rows, context - 1)
            with _new_tokens_only(self.model):
                return run_call(self.model, method, prompt, cache=cache, **how)
        method.generation_config.gate = False  # speculation itself is measured
        return run_call(self.model, method, prompt, cache=self._speculative_cache(method, rows, context, tokens), **how)

    def _speculative_cache(self, draft: Any, rows: slice, context: int, tokens: int) -> SpeculativeCache:
        """One buffer for the present batch size and context, filled anew for every run."""
        batch = rows.stop - rows.start
        if self._shape != (batch, context):
            self._cache = None  # before the next one is allocated
            self._cache = SpeculativeCache(self.model.config, batch, context + max(tokens, self.tokens))
            self._shape = batch, context
        nodes = draft.num_tree_nodes(TargetView(self.model))
        return self.prompts.fill(self._cache, rows, max(0, context - max(nodes, draft.prompt_tokens)))


@contextmanager
def _new_tokens_only(model: PreTrainedModel) -> Iterator[None]:
    """Give the first forward what the cache does not hold.

    Transformers' assisted decoding runs the whole prompt in its first forward even if the cache holds it already, and
    its text is wrong then.
    """

    def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        handle.remove()
        cache, ids = kwargs.get(CACHE_NAME), kwargs.get("input_ids")
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
    """Run prompts `(P, T)` through the model one by one, under its own attention."""
    target = TargetView(model)
    if target.sliding_layers or target.has_latent_cache or target.has_states:
        raise ValueError(
            f"{type(model).__name__} has sliding-window, latent or recurrent layers, which are not supported here: "
            "copies of one prefilled cache are decoded. Choose a target with full attention in every layer."
        )
    layers: list[tuple[torch.Tensor, torch.Tensor]] = []
    size = len(tokens)
    for index, row in enumerate(tokens):
        cache = DynamicCache()
        model(input_ids=row[None], **{CACHE_NAME: cache}, use_cache=True, logits_to_keep=1)
        if not layers:
            like = [(layer.keys[0], layer.values[0]) for layer in cache.layers]
            layers = [
                (keys.new_empty(size, *keys.shape), values.new_empty(size, *values.shape)) for keys, values in like
            ]
        for (keys, values), layer in zip(layers, cache.layers, strict=True):
            keys[index], values[index] = layer.keys[0], layer.values[0]
        done(index)
    return PrefilledPrompts(tokens, layers)
