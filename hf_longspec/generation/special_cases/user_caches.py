"""A cache that the user passed is taken over at the start of a call, and updated at its end.

Plain `generate` writes to the cache that it gets. The loop cannot, because neither a `DynamicCache` nor a `StaticCache`
can stage a tree. The layers of a `DynamicCache` become views of the used part of the loop's own buffers instead, or
copies of it if most of the buffers is free. The tensors of a `StaticCache` stay, and get the entries. For padded texts
all get copies, with slots for the padding: the loop drops it, and plain `generate` keeps a column for it in the cache
and in its windows.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig, StaticCache, cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer
from transformers.utils import logging

from ..cache import CACHE_NAME, SpeculativeCache, shifted
from ..call import USER_CACHE, Call, CallCache, pack_if_mostly_free
from ..special_case import SpecialCase

logger = logging.get_logger(__name__)

# Layers of a DynamicCache or a StaticCache that can be taken over. Those with indexers (from transformers 5.23 on)
# choose among as many keys as a static layer has slots.
KNOWN_LAYERS = {
    DynamicLayer,
    DynamicSlidingWindowLayer,
    getattr(cache_utils, "DynamicIndexedLayer", DynamicLayer),
    StaticLayer,
    StaticSlidingWindowLayer,
    cache_utils.LinearAttentionLayer,
    cache_utils.LinearAttentionAndFullAttentionLayer,
    cache_utils.LinearAttentionAndSlidingWindowAttentionLayer,
    cache_utils.LinearAttentionAndStaticFullAttentionLayer,
    cache_utils.LinearAttentionAndStaticSlidingWindowAttentionLayer,
}


def is_own(cache: Any) -> bool:
    """Return whether `cache` is one of this package."""
    return isinstance(cache, SpeculativeCache)


def user_cache_of(cache: Any) -> Any:
    """Return the user's cache, or `None` for a [`SpeculativeCache`] and for the empty cache that `generate` creates.

    `generate` marks a cache that it was given, and not one that it creates.
    """
    if cache is None or is_own(cache) or not (getattr(cache, "_is_user_defined", False) or _stored(cache)):
        return None
    return cache


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
            "Drop cache_implementation."
        )
    if is_own(cache) or user_cache_of(cache) is None or (reason := _why_not(cache)) is None:
        return None
    return (
        f"{CACHE_NAME} is a {type(cache).__name__}; {reason}. Pass a DynamicCache, or a SpeculativeCache, which is "
        "allocated in advance, or leave the argument out."
    )


def _padding_before(counts: list[int], mask: torch.Tensor) -> list[int]:
    """Return for each row the zeros of a mask `(batch, P)` before the last of its first `counts[b]` tokens.

    >>> _padding_before([2, 1], torch.tensor([[0, 1, 0, 1], [1, 0, 1, 1]]))
    [2, 0]
    """
    is_before = mask.bool().cumsum(1) < torch.tensor(counts, device=mask.device)[:, None]
    zeros: list[int] = (is_before & (mask == 0)).sum(1).tolist()
    return zeros


def take_over(
    cache: Any, buffers: SpeculativeCache, past_lengths: Sequence[int], padding: torch.Tensor | None = None
) -> None:
    """Copy the entries of the user's cache to the loop's `buffers`, layer by layer, and point its layers to the copy.

    This frees the original, unless it is static. A layer with a sliding window holds its last tokens only. The slots
    before them stay zero, as no later token attends to them.

    With padding, the entries of the tokens are copied side by side, and the original stays as it is.

    Args:
        past_lengths (`Sequence[int]`): Result of [`OwnCache.past_lengths`].
        padding (`torch.Tensor` of shape `(batch,)`, *optional*): Columns before the tokens of every row.
    """
    stored, longest = _stored(cache), max(past_lengths)
    for layer, buffer in zip(cache.layers, buffers.layers, strict=False):
        if hasattr(buffer, "adopt"):
            buffer.adopt(layer, past_lengths, padding)
        if _holds(layer):
            buffer.lazy_initialization(layer.keys, layer.values)
            count = min(stored, layer.keys.shape[2])  # a static layer has free slots
            first = stored - count
            if padding is None:
                buffer.keys[:, :, first:stored] = layer.keys[:, :, :count]
                buffer.values[:, :, first:stored] = layer.values[:, :, :count]
                if not isinstance(layer, StaticLayer):
                    _point(layer, buffer.keys, buffer.values, stored)
            else:  # what a window has dropped is filled with any entry, as no later token attends to it
                buffer.keys[:, :, :longest] = shifted(layer.keys, padding - first, 0, longest)
                buffer.values[:, :, :longest] = shifted(layer.values, padding - first, 0, longest)
    buffers.set_lengths(past_lengths)


def bring_up_to_date(cache: Any, buffers: SpeculativeCache, padding: torch.Tensor | None = None) -> None:
    """Let the layers of the user's cache hold the entries of `buffers`, as many as the shortest row has.

    The next call computes the missing tokens of longer rows, like any other token of its input.

    Args:
        padding (`torch.LongTensor` of shape `(batch,)`, *optional*):
            Columns before the tokens of every row. The layers then get copies, with any finite entries at padding.
    """
    before = [0] * buffers.batch_size if padding is None else padding.tolist()
    length = min(held + count for held, count in zip(buffers.lengths.host, before, strict=True))
    for index, buffer in enumerate(buffers.layers):
        if _holds(buffer):
            while len(cache.layers) <= index:  # a DynamicCache without a config adds its layers on demand
                cache.layers.append(DynamicLayer())
            layer = cache.layers[index]
            if not layer.is_initialized:
                layer.lazy_initialization(buffer.keys, buffer.values)
            _point(layer, buffer.keys, buffer.values, length, padding)
        if hasattr(buffer, "give_back"):
            buffer.give_back(cache.layers[index], length, padding)


def _point(
    layer: Any, keys: torch.Tensor, values: torch.Tensor, length: int, padding: torch.Tensor | None = None
) -> None:
    """Set keys and values of a layer to what it keeps of the first `length` columns: views, unless there is padding."""
    first = 0
    if isinstance(layer, StaticLayer):
        first = max(0, length - layer.max_cache_len)
    elif isinstance(layer, DynamicSlidingWindowLayer):
        first = max(0, length - layer.sliding_window + 1)
        layer.cumulative_length = length
    if padding is None:
        keys, values = keys[:, :, first:length], values[:, :, first:length]
    else:
        keys, values = (shifted(states, -padding, first, length) for states in (keys, values))
    if isinstance(layer, StaticLayer):  # its tensors stay, as graphs read them
        layer.keys[:, :, : length - first] = keys
        layer.values[:, :, : length - first] = values
        layer.cumulative_length.fill_(length)
        if isinstance(layer, StaticSlidingWindowLayer):
            layer.cumulative_length_int = length
    else:
        layer.keys, layer.values = keys, values


def _why_not(cache: Any) -> str | None:
    """Return why the layers of this cache cannot be read and written; `None` if they can."""
    if type(cache) not in (DynamicCache, StaticCache):
        return "only DynamicCache, StaticCache and SpeculativeCache work with a draft"
    if cache.offloading:
        return "offloading=True moves keys and values away from the device of the model, where the loop needs them"
    kinds = {type(layer) for layer in cache.layers if not _is_dummy(layer)}
    if other := kinds - KNOWN_LAYERS:
        return f"layers of the kind {', '.join(sorted(kind.__name__ for kind in other))} are not supported with a draft"
    return None


def why_too_short(cache: Any, call: Call) -> str | None:
    """Return why a static cache has no room for the text of a call, but for its last token; `None` if it has.

    A layer with as many slots as a window has room.
    """
    if not isinstance(cache, StaticCache) or user_cache_of(cache) is None:
        return None
    sizes = [layer.max_cache_len for layer in cache.layers if isinstance(layer, StaticLayer)]
    if all(size >= call.max_length - 1 or size in call.target.windows for size in sizes):
        return None
    return (
        f"{CACHE_NAME} is a StaticCache of {max(sizes)} slots, and the text may have {call.max_length} tokens. Make it "
        f"with max_cache_len={call.max_length - 1} or more."
    )


def _is_dummy(layer: Any) -> bool:
    """Return whether a layer stores nothing, as it reads the keys of another one (transformers from 5.23 on)."""
    return type(layer).__name__ == "DummyLayer"


def _holds(layer: Any) -> bool:
    return getattr(layer, "is_initialized", False) and not _is_dummy(layer) and layer.keys.numel() > 0


def _stored(cache: Any) -> int:
    """Return the length, which is a tensor in a `StaticCache`."""
    return int(cache.get_seq_length())


class OwnCache(CallCache):
    """A [`SpeculativeCache`] of the user."""

    is_users = True

    def __init__(self, cache: Any):
        self.cache = cache

    def refuse(self, call: Call) -> None:
        """Refuse a cache of other rows than those of the call, and one that does not begin their text.

        For a target with recurrent states, it must also have layers for them.
        """
        cache, tokens, config = self.cache, call.tokens, call.target.config
        if not (is_ours := is_own(cache)) and _why_not(cache):
            return
        if call.target.has_states:
            self._refuse_other_layers(config)
        stored = _stored(cache)
        rows = cache.batch_size if is_ours else next((len(layer.keys) for layer in cache.layers if _holds(layer)), None)
        if rows not in (None, len(tokens)):
            raise ValueError(
                f"{CACHE_NAME} has {rows} rows, and input_ids has {len(tokens)}. Pass the cache of these rows, or drop "
                f"{CACHE_NAME}."
            )
        mask = torch.ones_like(tokens) if call.mask is None else call.mask
        past_lengths = self.past_lengths(mask)
        padding = cache.rows.padding if is_ours else None
        before = [0] * len(tokens) if padding is None else padding.tolist()
        if is_ours and stored and before != _padding_before(past_lengths, mask):
            raise ValueError(
                f"{CACHE_NAME} holds {tuple(past_lengths)} tokens after {tuple(before)} columns of padding, and "
                "attention_mask has other padding. Pass the mask of the whole conversation with its beginning "
                f"unchanged, or drop {CACHE_NAME}."
            )
        rows_held = zip(past_lengths, mask.bool().sum(1).tolist(), strict=True)
        if stored >= tokens.shape[1] or any(count >= size for count, size in rows_held):
            raise ValueError(
                f"{CACHE_NAME} holds {stored} tokens, and input_ids has {tokens.shape[1]}. Pass the whole "
                "conversation, which must be longer than the cache, or its new tokens with attention_mask of the whole."
            )

    def _refuse_other_layers(self, config: PreTrainedConfig) -> None:
        """Refuse a cache whose layers are not of the kinds that one for this config has."""
        cache, kind = self.cache, type(self.cache)
        options, arguments = {"config": config}, "config=config"
        if is_own(cache):
            options, arguments = options | {"batch_size": 1, "max_length": 1}, "config, batch_size, max_length"
        elif isinstance(cache, StaticCache):
            options |= {"max_cache_len": 1}
        if list(map(type, cache.layers)) != list(map(type, kind(**options).layers)):
            raise ValueError(
                f"{CACHE_NAME} is a {kind.__name__} whose layers are not those of this model, which has recurrent "
                f"layers. Make it with {kind.__name__}({arguments}) and the config of this model, or leave the "
                "argument out."
            )

    def past_lengths(self, mask: torch.Tensor) -> list[int]:
        in_mask: list[int] = mask[:, : _stored(self.cache)].bool().sum(1).tolist()
        return self.cache.counts if is_own(self.cache) else in_mask

    def open(self, call: Call, nodes: int, earlier: SpeculativeCache | None) -> SpeculativeCache:
        self._was_packed = self.cache.max_length == 0
        return super().open(call, nodes, self.cache)

    def settle(self, session: Any, is_kept: bool) -> None:
        session.cache.rows.padding = session.prompts.padding
        if self._was_packed:  # buffers that the user has made stay
            pack_if_mostly_free(session.cache)


class UserCache(OwnCache):
    """A `DynamicCache` or `StaticCache` of the user, which is adopted at the start, and updated at the end."""

    def open(self, call: Call, nodes: int, earlier: SpeculativeCache | None) -> SpeculativeCache:
        cache = CallCache.open(self, call, nodes, None)
        take_over(self.cache, cache, call.prompts.past_lengths, call.prompts.padding)
        return cache

    def settle(self, session: Any, is_kept: bool) -> None:
        padding = session.prompts.padding
        texts = zip(session.cache.lengths.host, session.prompts.texts, strict=True)
        # rows of which some have got more tokens end in different columns
        is_even = is_kept and len({held - len(text) for held, text in texts}) == 1
        if session.target.has_states and not is_even:
            logger.info("%s is as before the call, as states of rows of different lengths do not fit it.", CACHE_NAME)
        else:
            if padding is None and not isinstance(self.cache, StaticCache):  # others get copies
                pack_if_mostly_free(session.cache)
            bring_up_to_date(self.cache, session.cache, padding)

    def returned(self, cache: SpeculativeCache) -> Any:
        return self.cache


class UserCaches(SpecialCase):
    """Calls with a cache of the user, or in which the loop would have to store keys and values in another way."""

    case = USER_CACHE

    def change(self, call: Call) -> None:
        cache = call.model_kwargs[CACHE_NAME]
        if is_own(cache):
            call.store = OwnCache(cache)
        elif user_cache_of(cache) is not None:
            call.store = UserCache(cache)

    def why_not_made(self, implementation: str | None) -> str | None:
        """Return why the loop cannot run with a cache that `generate` makes for this `cache_implementation`."""
        return why_not_stored(None, implementation)

    def why_not(self, call: Call) -> Iterator[str]:
        cache = call.model_kwargs[CACHE_NAME]
        if reason := why_not_stored(cache, call.config.cache_implementation) or why_too_short(cache, call):
            yield reason
        if call.columns_apart and call.inputs:
            yield (
                f"input_ids lacks {call.columns_apart} tokens of {CACHE_NAME}, with {', '.join(call.inputs)}. Pass the "
                "whole conversation."
            )
