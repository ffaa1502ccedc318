"""Drafters whose draft attends to the target's cache: those of LongSpec and of the assistants of Gemma 4."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...attention_backends.lengths import SeqLens
from .beams import BeamDrafter, FixedPrefix

# The first entries of a text, which attract attention. A window keeps them.
SINKS = 4


class PrefixStates(NamedTuple):
    """The committed tokens in the layers of the target that are read."""

    lengths: SeqLens  # number of tokens of each row
    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]  # keys and values `(B, K, capacity, D)` of each layer

    def window(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the slots `(B, 1, T)` of the first `SINKS` entries and the last `size`, and how many are used."""
        keys, _ = self.layers[0]
        lengths = self.lengths.on(keys.device)
        first = (lengths - size).clamp_min(SINKS)[:, None]
        slots = first + torch.arange(-SINKS, size, device=first.device)
        slots[:, :SINKS] -= first - SINKS
        return slots.clamp_max(keys.shape[2] - 1)[:, None], lengths.clamp_max(SINKS + size)


class CacheReader(BeamDrafter):
    """Base of these drafters. Subclasses set `read_layers`."""

    read_layers: Sequence[int]
    """Layers of the target that are read."""
    read_window: int | None = None
    """Number of last entries of a prefix that are read besides the sinks. All by default."""

    def prefix(self) -> PrefixStates:
        cache = self.binding.cache
        layers = (cache.layers[index] for index in self.read_layers)
        return PrefixStates(cache.lengths, tuple((layer.keys, layer.values) for layer in layers))

    def attend_prefix(self, prefix: PrefixStates, query: torch.Tensor) -> torch.Tensor:
        """Return the attention output `(B, H, N, D)` of queries to the committed tokens in the first layer."""
        keys, ranks = prefix.layers[0][0], self.binding.target.ranks
        if ranks is None or keys.shape[1] == self.draft.config.num_key_value_heads:
            return self._attend_heads(prefix, query)
        # the cache holds the key/value heads of this rank, while every rank has the whole draft
        return ranks.all_heads(self._attend_heads(prefix, ranks.own_heads(query)))

    def _attend_heads(self, prefix: PrefixStates, query: torch.Tensor) -> torch.Tensor:
        """Likewise, of the heads that are in the cache."""
        (keys, values), kernels = prefix.layers[0], self._kernels
        if self.read_window is not None:
            slots, counts = prefix.window(self.read_window)
            return kernels.sparse_attention(query, keys, values, slots, counts=counts, scaling=self.scaling)[0]
        keys, values = (states[:, :, : prefix.lengths.longest] for states in (keys, values))
        return kernels.prefix_attention(query, keys, values, lengths=prefix.lengths, scaling=self.scaling)[0]

    @property
    def key(self) -> tuple:
        return *super().key, self.read_window

    def fixed_prefix(self, runner: Any, prefix: PrefixStates) -> "CachePrefix | None":
        lengths = runner.lengths(prefix.lengths, 0, prefix.layers[0][0].shape[2])
        if lengths is None:
            return None
        layers = tuple((runner.buffer(keys), runner.buffer(values)) for keys, values in prefix.layers)
        return CachePrefix(prefix.lengths, self.device, lengths, layers, self.binding.cache.layout)


@dataclass(eq=False)
class CachePrefix(FixedPrefix):
    """A [`PrefixStates`], which a graph gets as buffers and lengths."""

    committed: SeqLens
    device: torch.device
    lengths: Any  # how the graph gets them
    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    layout: tuple[int, ...]

    num_tensors = 1

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.committed.on(self.device),)

    @property
    def key(self) -> tuple:
        key: tuple = self.lengths.key
        return key

    @property
    def places(self) -> tuple[int, ...]:
        return self.layout

    def of(self, inputs: Sequence[torch.Tensor]) -> PrefixStates:
        return PrefixStates(self.lengths.of(inputs[0]), self.layers)
