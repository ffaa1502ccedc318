"""The partial KV cache that TokenSwift drafts on: a buffer of fixed size per layer, kept up token by token."""

from collections.abc import Callable

import torch

from .cache import SpeculativeCache
from .compact_cache import CompactCache, gather_entries
from .partial_policy import PartialKVPolicy


class PartialCache(CompactCache):
    """Entries of the target's cache as a [`PartialKVPolicy`] chooses them, per row, layer and KV head.

    After every commit the new tokens' entries are copied, and nothing else moves until the next build.

    Args:
        cache ([`SpeculativeCache`]): The target's cache.
        dense_layers (`frozenset[int]`): Layers that keep their own attention.
        policy ([`PartialKVPolicy`]): What the buffers hold.

    Attributes:
        built (`list[int | None]`): Tokens of each row at its last build.
        held (`list[int]`): Tokens of each row that the buffers know of.
    """

    def __init__(self, cache: SpeculativeCache, dense_layers: frozenset[int], policy: PartialKVPolicy):
        super().__init__(cache, dense_layers)
        self.policy = policy
        self.built: list[int | None] = [None] * cache.batch_size
        self.held = [0] * cache.batch_size

    def due(self, count: int) -> list[int]:
        """Rows that need a build before `count` more tokens are committed."""
        if len(self.dense_layers) == len(self.layers):
            return []
        lengths = self.cache.host_lengths
        return [row for row, built in enumerate(self.built) if self.policy.is_due(built, lengths[row] + count)]

    def build(self, row: int, length: int, scores_of: Callable[[int], torch.Tensor]) -> None:
        """Choose anew among the first `length` tokens of a row.

        Args:
            scores_of (`Callable`): From a layer to the scores `(1 or K, length)` of these tokens.
        """
        one = slice(row, row + 1)
        for index in self.sparse_layers:
            source, layer = self.cache.layers[index], self.layers[index]
            scores = scores_of(index)
            if scores.shape[0] not in (1, source.keys.shape[1]):  # attention made other heads of the cached ones
                scores = scores.sum(0, keepdim=True)
            chosen = self.policy.select(scores).to(source.keys.device)[None]
            if not layer.is_initialized:
                self._allocate(index)
            layer.keys[one, :, : chosen.shape[-1]] = gather_entries(source.keys[one], chosen)
            layer.values[one, :, : chosen.shape[-1]] = gather_entries(source.values[one], chosen)
        self.built[row] = self.held[row] = length

    def catch_up(self) -> None:
        """Take in what was committed since the last call; every row has been built."""
        self.share_dense()
        lengths = self.cache.host_lengths
        if not self.sparse_layers:
            return
        built = [length or 0 for length in self.built]
        self.used.set([self.policy.used(*row) for row in zip(built, lengths, strict=True)])
        if self.policy.dynamic and self.held != list(lengths):
            self._copy_new(built, lengths)
        self.held = list(lengths)

    def _copy_new(self, built: list[int], lengths: tuple[int, ...]) -> None:
        """Copy the entries of the tokens from `held` to `lengths` to their slots."""
        count = max(length - held for length, held in zip(lengths, self.held, strict=True))
        source, target = [], []
        for first, held, length in zip(built, self.held, lengths, strict=True):
            tokens, missing = range(held, length), count - (length - held)
            # rows with fewer tokens write into the slot behind all entries, which keeps nothing
            source.append([*tokens, *[0] * missing])
            target.append([self.policy.slot(first, token) for token in tokens] + [self.policy.budget] * missing)
        places = torch.tensor([source, target])
        for index in self.sparse_layers:
            places = places.to(self.cache.layers[index].keys.device)  # moves once per device, not per layer
            self._copy(index, places)

    def _copy(self, layer_idx: int, places: torch.Tensor) -> None:
        """Copy one layer's entries; `places` `(2, batch, n)` are slots of the target's cache and of the buffer."""
        source, layer = self.cache.layers[layer_idx], self.layers[layer_idx]
        old, new = places
        row = torch.arange(old.shape[0], device=old.device)[:, None]
        layer.keys[row, :, new] = source.keys[row, :, old]
        layer.values[row, :, new] = source.values[row, :, old]

    def _allocate(self, index: int) -> None:
        """Buffers of one layer: the budget, and a slot for the token that is being drafted on."""
        source, layer = self.cache.layers[index], self.layers[index]
        batch, heads, _, _ = source.keys.shape
        slots = self.policy.budget + 1
        layer.keys = source.keys.new_zeros(batch, heads, slots, source.keys.shape[3])
        layer.values = source.values.new_zeros(batch, heads, slots, source.values.shape[3])
        layer.is_initialized = True
