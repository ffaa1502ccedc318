"""A `DynamicCache` that the user passed: taken over at the start of a call, and updated at its end.

Plain `generate` writes to the cache that it gets. The loop cannot, because a `DynamicCache` cannot stage a tree. Its
layers become views of the used part of the loop's own buffers instead, without a copy. For padded texts they become
copies, with slots for the padding, which the loop drops.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from .cache import SpeculativeCache
from .padding import columns_of


def is_own(cache: Any) -> bool:
    """Return whether `cache` is a [`SpeculativeCache`] of this or another copy of the package."""
    return getattr(cache, "_is_longspec_cache", False)


def user_cache_of(cache: Any) -> DynamicCache | None:
    """Return the user's cache, or `None` for a [`SpeculativeCache`] and for the empty cache that `generate` creates.

    `generate` marks a cache that it was given, and not one that it creates.
    """
    if cache is None or is_own(cache) or not (getattr(cache, "_is_user_defined", False) or _stored(cache)):
        return None
    return cache


def held_by(cache: Any, mask: torch.Tensor) -> list[int]:
    """Return how many tokens of every row a cache holds, if `mask` `(batch, P)` is 0 at the padding of its text."""
    stored = 0 if cache is None else _stored(cache)
    if not is_own(cache):
        return mask[:, :stored].bool().sum(1).tolist() if stored else [0] * len(mask)
    # plain generation adds as many tokens to all rows, and does not count them in `lengths`
    return list(cache.lengths.host) if cache.lengths.longest == stored else [stored] * len(mask)


def why_not_stored(cache: Any, implementation: str | None) -> str | None:
    """Return why the loop cannot keep keys and values in this way; `None` if it can.

    Args:
        cache (*optional*): Argument `past_key_values` of the call.
        implementation (`str`, *optional*): `cache_implementation` of the call. Static ones are accepted, as the loop
            uses buffers of a fixed size anyway.
    """
    if implementation == "quantized" or (implementation or "").startswith("offloaded"):
        return (
            f"cache_implementation={implementation!r}: quantized and offloaded caches are not supported with a draft. "
            "Leave cache_implementation out."
        )
    if is_own(cache) or user_cache_of(cache) is None or (reason := _why_not(cache)) is None:
        return None
    return (
        f"past_key_values is a {type(cache).__name__}, {reason}. Pass a DynamicCache, or a SpeculativeCache, which is "
        "allocated in advance, or leave the argument out."
    )


def refuse_cache(cache: Any, input_ids: torch.Tensor, mask: torch.Tensor | None) -> None:
    """Refuse a cache of other rows than those of `input_ids` `(batch, P)`, and one that does not begin their text.

    Args:
        cache (*optional*): Argument `past_key_values` of the call.
        input_ids (`torch.LongTensor` of shape `(batch, P)`): The whole text.
        mask (`torch.Tensor` of shape `(batch, P)`, *optional*): 0 at padding.
    """
    if not (own := is_own(cache)) and (user_cache_of(cache) is None or _why_not(cache)):
        return
    stored = _stored(cache)
    rows = cache.batch_size if own else next((len(layer.keys) for layer in cache.layers if _holds(layer)), None)
    if rows not in (None, len(input_ids)):
        raise ValueError(
            f"past_key_values has {rows} rows and input_ids {len(input_ids)}. Pass the cache of these rows, or leave "
            "past_key_values out."
        )
    mask = torch.ones_like(input_ids) if mask is None else mask
    held = held_by(cache, mask)
    if own and stored and not _stand_in(cache, held, columns_of(mask, stored)):
        raise ValueError(
            f"past_key_values holds {tuple(held)} tokens, which are not the first ones that attention_mask has "
            "in each row: pass the mask of the whole conversation, and do not change its beginning. Or leave "
            "past_key_values out."
        )
    rows_held = zip(held, mask.bool().sum(1).tolist(), strict=True)
    if stored >= input_ids.shape[1] or any(count >= size for count, size in rows_held):
        raise ValueError(
            f"past_key_values holds {stored} tokens and input_ids has {input_ids.shape[1]}: pass the whole "
            "conversation, which must be longer than what is stored."
        )


def _stand_in(cache: SpeculativeCache, held: list[int], columns: torch.Tensor) -> bool:
    """Return whether the tokens that the rows of a cache hold stand in these columns `(batch, T)` of their texts."""
    slots = torch.arange(columns.shape[1], device=columns.device)
    of_cache = getattr(cache.rows, "columns", None)  # a cache of an older copy has no such field
    of_cache = slots if of_cache is None else of_cache[:, : len(slots)].to(slots.device)
    is_held = slots < torch.tensor(held, device=slots.device)[:, None]
    return not bool((is_held & (columns != of_cache)).any())


def take_over(
    cache: DynamicCache, own: SpeculativeCache, held: Sequence[int], mask: torch.Tensor | None = None
) -> None:
    """Copy the entries of the user's cache to `own`, layer by layer, and point its layers to the copy.

    This frees the original. A layer with a sliding window holds its last tokens only. The slots before them stay zero,
    as no later token attends to them.

    With padding, the entries of the tokens are copied side by side, and the original stays as it is.

    Args:
        cache (`DynamicCache`): The user's cache.
        own ([`SpeculativeCache`]): The loop's cache.
        held (`Sequence[int]`): Result of [`held_by`].
        mask (`torch.Tensor` of shape `(batch, P)`, *optional*): 0 at padding. Nothing is padded by default.
    """
    stored = _stored(cache)
    columns = None if mask is None else columns_of(mask, max(held))
    for layer, taken in zip(cache.layers, own.layers, strict=False):
        if _holds(layer):
            taken.lazy_initialization(layer.keys, layer.values)
            first = stored - layer.keys.shape[2]
            if columns is None:
                taken.keys[:, :, first:stored] = layer.keys
                taken.values[:, :, first:stored] = layer.values
                _point(layer, taken.keys, taken.values, stored)
            else:  # what a window has dropped is filled with any entry, as no later token attends to it
                places = (columns - first).clamp(0, layer.keys.shape[2] - 1)
                taken.keys[:, :, : max(held)] = _slots_of(layer.keys, places)
                taken.values[:, :, : max(held)] = _slots_of(layer.values, places)
    own.set_lengths(held)


def bring_up_to_date(cache: DynamicCache, own: SpeculativeCache, columns: torch.Tensor | None = None) -> None:
    """Point the layers of the user's cache to the entries of `own`, as many as the shortest row has.

    The next call computes the missing tokens of longer rows, like any other token of its input.

    Args:
        cache (`DynamicCache`): The user's cache.
        own ([`SpeculativeCache`]): The loop's cache.
        columns (`torch.LongTensor` of shape `(batch, T)`, *optional*):
            Columns in which the tokens of every row, and the next one, stand. The layers then get copies, with any
            finite entries at padding.
    """
    length = min(own.lengths.host)
    if columns is not None:
        length = int(columns.gather(1, own.lengths.on(columns.device)[:, None]).min())
    for index, taken in enumerate(own.layers):
        if taken.is_initialized:
            while len(cache.layers) <= index:  # a DynamicCache without a config adds its layers on demand
                cache.layers.append(DynamicLayer())
            layer = cache.layers[index]
            if not layer.is_initialized:
                layer.lazy_initialization(taken.keys, taken.values)
            _point(layer, taken.keys, taken.values, length, columns)


def _point(
    layer: Any, keys: torch.Tensor, values: torch.Tensor, length: int, columns: torch.Tensor | None = None
) -> None:
    """Set keys and values of a layer to what it keeps of the first `length` columns: views, unless `columns` differ."""
    first = 0
    if type(layer) is DynamicSlidingWindowLayer:
        first = max(0, length - layer.sliding_window + 1)
        layer.cumulative_length = length
    if columns is None:
        layer.keys, layer.values = keys[:, :, first:length], values[:, :, first:length]
        return
    wanted = torch.arange(first, length, device=columns.device).repeat(len(columns), 1)
    places = (torch.searchsorted(columns, wanted, right=True) - 1).clamp_min(0)
    layer.keys, layer.values = _slots_of(keys, places), _slots_of(values, places)


def _slots_of(states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the entries of keys or values `(B, K, S, D)` in the slots `places` `(B, T)`, `(B, K, T, D)`."""
    index = places.to(states.device)[:, None, :, None]
    return states.gather(2, index.expand(-1, states.shape[1], -1, states.shape[3]))


def _why_not(cache: Any) -> str | None:
    """Return why the layers of this cache cannot be read and written; `None` if they can."""
    if type(cache) is not DynamicCache:
        return "whose way of storing keys and values the loop cannot keep up"
    if cache.offloading:
        return "with offloading=True, and the loop keeps keys and values on the device of the model"
    kinds = {type(layer) for layer in cache.layers if not _is_dummy(layer)}
    if other := kinds - {DynamicLayer, DynamicSlidingWindowLayer}:
        return f"with layers of the kind {', '.join(sorted(kind.__name__ for kind in other))}"
    return None


def _is_dummy(layer: Any) -> bool:
    """Return whether a layer stores nothing, as it reads the keys of another one (transformers from 5.23 on)."""
    return type(layer).__name__ == "DummyLayer"


def _holds(layer: Any) -> bool:
    return not _is_dummy(layer) and layer.is_initialized and layer.keys.numel() > 0


def _stored(cache: Any) -> int:
    """Return the length, which is a tensor in a `StaticCache`."""
    return int(cache.get_seq_length())
