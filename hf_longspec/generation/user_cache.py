"""A `DynamicCache` that the user passed: taken over at the start of a call, brought up to date at its end.

Stock `generate` writes into the cache it is given. The loop cannot, because such a cache holds no tree, but its
layers may hold views: they are pointed at the used part of the loop's own buffers, without a copy.
"""

from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from .cache import SpeculativeCache


def is_own(cache: Any) -> bool:
    """Whether this is a [`SpeculativeCache`], of this copy of the package or another."""
    return getattr(cache, "_is_longspec_cache", False)


def user_cache_of(cache: Any) -> "UserCache | None":
    """What has to be honoured; None for a cache of our own and for the empty one that `generate` makes by default.

    `generate` marks what it was given, and not what it makes itself.
    """
    if cache is None or is_own(cache) or not (getattr(cache, "_is_user_defined", False) or _stored(cache)):
        return None
    return UserCache(cache)


def refuse_cache(cache: Any, input_ids: torch.Tensor, mask: torch.Tensor | None, implementation: Any) -> None:
    """Raise ValueError for a cache that cannot be honoured.

    Args:
        cache (*optional*): `past_key_values` as the loop got it.
        input_ids (`torch.LongTensor` of shape `(batch, P)`): The whole text.
        mask (`torch.Tensor` of shape `(batch, P)`, *optional*): 0 at padding.
        implementation (`str`, *optional*): `cache_implementation` of the call. The static ones give what the loop does
            anyway: buffers of a fixed size.
    """
    if implementation == "quantized" or (implementation or "").startswith("offloaded"):
        raise ValueError(
            f"cache_implementation={implementation!r}: with a draft, keys and values are kept as the "
            "model computes them, "
            "on its device. Leave cache_implementation out, or call generate() without assistant_model."
        )
    if is_own(cache):
        cache.require(input_ids, mask)
    if user_cache_of(cache) is None:
        return
    if reason := _why_not(cache):
        raise ValueError(
            f"past_key_values is a {type(cache).__name__}, {reason}. Pass a DynamicCache, or a "
            "SpeculativeCache, which is "
            "allocated in advance, or leave the argument out."
        )
    if mask is not None and not bool(mask.all()):
        raise ValueError(
            "past_key_values is a DynamicCache, and attention_mask has padding: such a cache has slots "
            "for the padding, "
            "which the loop drops. Leave past_key_values out, or continue each row in a cache of its own."
        )
    held = [layer.keys.shape[0] for layer in cache.layers if _holds(layer)]
    if held and held[0] != input_ids.shape[0]:
        raise ValueError(
            f"past_key_values has {held[0]} rows and input_ids {input_ids.shape[0]}. Pass that batch's own."
        )
    if _stored(cache) >= input_ids.shape[1]:
        raise ValueError(
            f"past_key_values holds {_stored(cache)} tokens and input_ids has {input_ids.shape[1]}: pass the whole "
            "conversation, which must be longer than what is stored."
        )


class UserCache:
    """A `DynamicCache` of the user's.

    Args:
        cache (`DynamicCache`): Checked by [`refuse_cache`].
    """

    def __init__(self, cache: DynamicCache):
        self.cache = cache
        self.stored = _stored(cache)

    def lend_to(self, own: SpeculativeCache) -> None:
        """Copy what is stored into `own`, layer by layer, and point the layers at the copy, which frees the original.

        A layer with a sliding window has its last tokens only. The slots before them stay zero: no later token
        sees them.
        """
        for layer, taken in zip(self.cache.layers, own.layers, strict=False):
            if _holds(layer):
                taken.lazy_initialization(layer.keys, layer.values)
                first = self.stored - layer.keys.shape[2]
                taken.keys[:, :, first : self.stored] = layer.keys
                taken.values[:, :, first : self.stored] = layer.values
                _point(layer, taken.keys, taken.values, self.stored)
        own.set_lengths([self.stored] * own.batch_size)

    def update_from(self, own: SpeculativeCache) -> None:
        """Point the layers at what `own` holds of all rows: of a batch, as many tokens as the shortest row has.

        What is missing of the longer rows is computed by the next call, like any other token of its input.
        """
        length = min(own.host_lengths)
        for index, taken in enumerate(own.layers):
            if taken.is_initialized:
                while len(self.cache.layers) <= index:  # a DynamicCache without a config makes its layers as it goes
                    self.cache.layers.append(DynamicLayer())
                layer = self.cache.layers[index]
                if not layer.is_initialized:
                    layer.lazy_initialization(taken.keys, taken.values)
                _point(layer, taken.keys, taken.values, length)


def _point(layer: Any, keys: torch.Tensor, values: torch.Tensor, length: int) -> None:
    """Views of the tokens that a layer keeps out of the first `length` ones."""
    first = 0
    if type(layer) is DynamicSlidingWindowLayer:
        first = max(0, length - layer.sliding_window + 1)
        layer.cumulative_length = length
    layer.keys, layer.values = keys[:, :, first:length], values[:, :, first:length]


def _why_not(cache: Any) -> str | None:
    """Why the layers of this cache cannot be read and written."""
    if type(cache) is not DynamicCache:
        return "whose way of storing keys and values the loop cannot keep up"
    if cache.offloading:
        return "with offloading=True, and the loop keeps keys and values on the device of the model"
    kinds = {type(layer) for layer in cache.layers if not _is_dummy(layer)}
    if other := kinds - {DynamicLayer, DynamicSlidingWindowLayer}:
        return f"with layers of the kind {', '.join(sorted(kind.__name__ for kind in other))}"
    return None


def _is_dummy(layer: Any) -> bool:
    """Whether a layer stores nothing, like those that read the keys of another layer (transformers from 5.23 on)."""
    return type(layer).__name__ == "DummyLayer"


def _holds(layer: Any) -> bool:
    return not _is_dummy(layer) and layer.is_initialized and layer.keys.numel() > 0


def _stored(cache: Any) -> int:
    """Tokens in the cache; a `StaticCache` counts in a tensor."""
    return int(cache.get_seq_length())
