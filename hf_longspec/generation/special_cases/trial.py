"""The first trial of a model: which keys its attention layers see, and whether they can follow a tree.

Only its mask completely describes which keys a layer attends to: a config may contain a `sliding_window` that the model
does not use, and a model may apply a window without passing it to its attention function. The model therefore runs two
tokens at the beginning of a text and after a long prefix that its cache only claims to hold, and every layer's mask is
compared with the causal one. Queries are compared between both runs. They are equal if the model uses the positions
that it is given. No attention is computed, and the prefix takes no memory.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from ...attention_backends.interface import REFUSED
from ..cache import CACHE_NAME, Rows, layers_of
from ..special_case import LayerTraits, VerificationMode
from ..target_modules import foreign_methods
from .hooks import bare

QUERIES = 2
# Length of the longest text if the config has no limit. The claimed prefix is as long as the longest text.
NO_LIMIT = 1 << 17
MOST_NAMED = 4
# Largest difference of two logits of a trial, relative to their standard deviation. Rounding in float32 changed those
# of the tiny targets of the tests by at most 1e-5; models that ignored the mask or the positions, by 0.2 and more, and
# models without training that attend to later tokens (BERT's kin in transformers 5.17) by 5e-4.
TRIAL_TOLERANCE = 2e-4


@contextmanager
def rotary_state_kept(model: PreTrainedModel) -> Iterator[None]:
    """Restore the frequencies that forwards leave on rotary embeddings: a trial must not change a later text."""
    modules = [module for module in model.modules() if hasattr(module, "max_seq_len_cached")]
    states = [(module, dict(module._buffers), dict(vars(module))) for module in modules]
    try:
        yield
    finally:
        for module, buffers, attributes in states:
            vars(module).update(attributes)
            module._buffers.update(buffers)


class HybridMode(VerificationMode):
    """Verify nodes by hybrid tree attention, if a trial finds that all layers go through it."""

    def is_reached(self, target: Any) -> bool:
        return bool(target.traits_by(self).is_reached)

    def trial(self, model: PreTrainedModel, config: Any) -> LayerTraits:
        return try_backends(model, config)


def ignores(target: Any, name: str, value: Any = None) -> bool:
    """Return whether the input `value` of a model changes nothing of text after a prefix.

    Such an input may be the size of an image without its pixels. Without a value, the answer is for zeros at the
    beginning of a text, which is found once and has the same effect as no input for most token types.
    """
    if not target.mode.takes_inputs:
        return False
    if value is None:
        ignored = target.traits.ignored
        if name not in ignored:
            zeros = torch.zeros(1, QUERIES, dtype=torch.long, device=target.model.device)
            ignored[name] = _ignores(target, name, zeros, 0)
        return ignored[name]
    # settings may have effects outside of the logits
    return isinstance(value, torch.Tensor) and _ignores(target, name, value, QUERIES)


def _ignores(target: Any, name: str, value: torch.Tensor, offset: int) -> bool:
    """Return whether an input of two tokens after a claimed prefix changes none of what their forward shows."""
    model, config = target.model, target.config
    try:
        with target.attention():
            without, with_value = _run(model, config, offset), _run(model, config, offset, {name: value})
    except Exception:  # some models refuse it without the pixels, which is no proof of either
        return False
    same = with_value.reasons() == without.reasons() and torch.equal(with_value.logits, without.logits)
    return same and with_value.layers.keys() == without.layers.keys() and not with_value.differs_from(without)


def try_backends(model: PreTrainedModel, config: Any) -> LayerTraits:
    """Run two tokens under the attention of this package, and read the masks and queries of all layers."""
    longest = max([getattr(config, "max_position_embeddings", None) or NO_LIMIT, *_lengths(config)])
    try:
        first, again, later = (_run(model, config, offset) for offset in (0, 0, longest - QUERIES))
        differs = later.differs_from(first) and not again.differs_from(first)  # some kernels never repeat
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        failed = f"a forward of two tokens failed under its attention: {named(error)}"
        return LayerTraits((), [failed], None, is_reached=False)
    windows = {layer: found.window for layer, found in later.layers.items()}
    if any(layer is None or layer < 0 for layer in windows):
        shared = "its attention layers share one module, whose layer_idx names none of them"
        return LayerTraits((), [shared], None)
    reasons, missing = [], later.cached - set(windows)
    if not windows:
        reasons.append(
            "it never called the attention backend, so it would ignore the draft tree; its attention must go through "
            "transformers' AttentionInterface"
        )
    elif extra := later.cached - set(range(config.num_hidden_layers)):
        reasons.append(f"{_named_layers(extra)} cache keys, but config.num_hidden_layers is {config.num_hidden_layers}")
    elif missing:
        reasons.append(f"{_named_layers(missing)} never called the attention backend and would ignore the draft tree")
    for reason in dict.fromkeys(reason for trial in (first, later) for reason in trial.reasons()):
        reasons.append(reason)
    if differs:
        reasons.append(
            "it takes positions from the length of its cache or from its tokens, not from position_ids, which the "
            "nodes of a tree need"
        )
    of_layers = tuple(windows.get(layer) for layer in range(max(windows, default=-1) + 1))
    is_reached = bool(windows) and not missing
    return LayerTraits(of_layers, reasons, cut_by_the_stock_cache(config, windows), is_reached=is_reached)


def largest_gap(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference of logits; those that are -inf or nan in both are equal."""
    is_same = (one == other) | (one.isnan() & other.isnan())
    return float((one.float() - other.float()).masked_fill(is_same, 0).abs().max())


def spread_of(logits: torch.Tensor) -> float:
    """Return the standard deviation of the logits that are finite."""
    return float(logits[logits.isfinite()].float().std())


def named(error: Exception) -> str:
    """Return the class of an error and the first line of its message."""
    return f"{type(error).__name__}: {(str(error) or 'no message').splitlines()[0]}"


def _lengths(config: Any) -> Iterable[int]:
    """Yield the numbers of a config that may be windows, plus 2, so that each of them hides a key."""
    for name, value in config.to_dict().items():
        if isinstance(value, int) and ("window" in name or "chunk" in name):
            yield value + QUERIES


def cut_by_the_stock_cache(config: Any, windows: dict[int, int | None]) -> int | None:
    """Return the window by which transformers' cache drops keys that the layers attend to; `None` if it drops none."""
    layers = enumerate(DynamicCache(config=config).layers)  # may include dummy layers
    lengths = {layer: getattr(cached, "sliding_window", None) for layer, cached in layers if layer in windows}
    sliding = {layer: length for layer, length in lengths.items() if length is not None}
    return min((cut for layer, cut in sliding.items() if cut < (windows[layer] or torch.inf)), default=None)


@torch.no_grad()
def _run(model: PreTrainedModel, config: Any, offset: int = 0, more: dict[str, Any] | None = None) -> "AttentionProbe":
    """Run one forward like a verification after a claimed prefix, or like `generate` at the beginning of a text.

    Both get the positions of the first tokens, and the inputs `more`.
    """
    model, trial, cache = bare(model), AttentionProbe(offset), DummyCache(config, offset)
    device = model.device if model.device.type != "meta" else torch.device("cpu")  # weights offloaded to disk
    positions = torch.arange(QUERIES, device=device)[None]
    inputs = {"position_ids": positions, CACHE_NAME: cache, "use_cache": True}
    inputs |= more or {}
    tokens = positions + 1
    if offset:
        inputs["input_ids"] = tokens
    else:
        # a user's method, with which a call cannot use a draft, is not tried out
        own = model.prepare_inputs_for_generation
        prepare = partial(GenerationMixin.prepare_inputs_for_generation, model) if foreign_methods(model) else own
        inputs = prepare(tokens, is_first_iteration=True, **inputs)
    # A compiled forward would be compiled again for two tokens.
    with rotary_state_kept(model), torch.compiler.set_stance("force_eager"):
        trial.logits = model(**inputs, trial=trial).logits
    trial.cached = cache.updated
    return trial


@dataclass
class LayerMask:
    """Inputs of one layer."""

    window: int | None  # sliding window of the layer
    query: torch.Tensor  # `(1, H, 2, D)`: queries of the layer
    reasons: tuple[str, ...]  # reasons why a tree cannot be verified with it, as predicates of the layer


class AttentionProbe:
    """Record the inputs of the attention layers of one forward, in place of a backend.

    The cache of the forward claims to hold `offset` tokens.
    """

    logits: torch.Tensor

    def __init__(self, offset: int):
        self.offset = offset
        self.layers: dict[int, LayerMask] = {}
        self.cached: set[int] = set()
        self._read: dict[int, tuple[torch.Tensor, int | None, tuple[str, ...]]] = {}

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        sliding_window: int | None,
        causal: bool,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Record the inputs of the layer, and return zeros `(B, N, H, Dv)` as its output."""
        window, reasons = sliding_window, tuple[str, ...]()
        if mask is not None:
            if id(mask) not in self._read:  # stored with the mask, so that no other object gets its id
                self._read[id(mask)] = mask, *self._read_mask(mask)
            _, window, reasons = self._read[id(mask)]
        if not causal:  # also if there is no mask: transformers omits one that equals is_causal
            reasons += ("attend to later tokens",)
        reasons += tuple(f"need {name}: {why}" for name, why in REFUSED.items() if options.get(name) is not None)
        layer: Any = module.layer_idx
        self.layers[layer] = LayerMask(window, query, reasons)
        return value.new_zeros(*query.transpose(1, 2).shape[:3], value.shape[3])

    def reasons(self) -> list[str]:
        """Return the reasons why a tree cannot be verified, each with its layers."""
        layers: dict[str, list[int]] = {}
        for layer, found in self.layers.items():
            for reason in found.reasons:
                layers.setdefault(reason, []).append(layer)
        return [f"{_named_layers(which)} {reason}" for reason, which in layers.items()]

    def differs_from(self, other: "AttentionProbe") -> bool:
        """Return whether queries differ although tokens, positions and attention outputs are the same."""
        return any(
            layer not in other.layers or not torch.equal(found.query, other.layers[layer].query)
            for layer, found in self.layers.items()
        )

    def _read_mask(self, mask: torch.Tensor) -> tuple[int | None, tuple[str, ...]]:
        end = self.offset + QUERIES
        mask = mask[..., :end]
        visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        if mask.dtype != torch.bool and bool((mask[visible] != 0).any()):
            return None, ("add values of their own to the scores",)
        count = int(visible[0, 0, -1].sum())
        distance = torch.arange(self.offset, end, device=mask.device)[:, None] - torch.arange(end, device=mask.device)
        if not bool((visible == ((distance >= 0) & (distance < count))).all()):
            return None, ("have a mask that is neither causal nor a sliding window",)
        return (count if count < end else None), ()


class DummyLayer(DynamicLayer):
    """Layer of a [`DummyCache`]."""

    def __init__(self, offset: int):
        super().__init__()
        self.offset = offset
        self.is_initialized = offset > 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count = self.offset + key_states.shape[2]
        keys, values = (states[:, :, :1].expand(-1, -1, count, -1) for states in (key_states, value_states))
        return keys, values

    def get_seq_length(self) -> int:
        return self.offset


class DummyCache(Cache):
    """Cache that claims to hold `offset` tokens in every layer and holds none."""

    def __init__(self, config: Any, offset: int):
        self._keys = keys = DummyLayer(offset)
        layers = layers_of(config, Rows(1), 1, lambda *_: keys)
        for layer in layers:
            if hasattr(layer, "length"):  # with something beside its keys
                layer.length, layer.is_initialized = offset, offset > 0
        super().__init__(layers=layers)
        self.updated: set[int] = set()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.updated.add(layer_idx)
        return self._keys.update(key_states, value_states)

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """Return the offset as a tensor, so that mask functions create the mask instead of omitting it."""
        return torch.tensor(self._keys.offset)


def _named_layers(layers: Iterable[int]) -> str:
    names = [str(layer) for layer in sorted(layers)]
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"its layers {', '.join(names[:MOST_NAMED])}{more}"


HYBRID = HybridMode()
