"""Selection of the prefix entries that a sparse drafting phase reads, and the compact cache with copies of them."""

import math
from collections.abc import Sequence

import torch

from ..attention_backends.lengths import SeqLens, on_device
from .cache import SpeculativeCache
from .compact_cache import CompactCache, gather_entries

# Number of attention sinks, which are always selected (https://huggingface.co/papers/2309.17453).
SINK_TOKENS = 4


def budget(prefix_length: int, ratio: float, floor: int) -> int:
    """Return the number of entries to select of a prefix: a share of it, at least `floor`, at most all."""
    return min(prefix_length, max(floor, math.ceil(ratio * prefix_length)))


def select_top(scores: torch.Tensor, prefix_lengths: torch.Tensor, count: int) -> torch.Tensor:
    """Return the `count` best entries of every row and head, sinks first, then the others by falling score.

    Args:
        scores (`torch.Tensor` of shape `(B, K, S)`): Scores of the entries, which are overwritten. Entries after a
            row's prefix are selected last. S is at least the longest prefix.
        prefix_lengths (`torch.LongTensor` of shape `(B,)`): Length of each row's prefix.
        count (`int`): Number of entries to select, at most S.

    Returns:
        `torch.LongTensor` of shape `(B, K, count)`: Slots of the entries.
    """
    slots = torch.arange(scores.shape[-1], device=scores.device)
    scores[..., :SINK_TOKENS] = torch.inf
    scores.masked_fill_((slots >= prefix_lengths[:, None])[:, None], -torch.inf)
    # a row with a smaller budget takes the first ones
    return scores.topk(count, dim=-1).indices


def select_window(prefix_lengths: torch.Tensor, counts: torch.Tensor, count: int) -> torch.Tensor:
    """Return slots `(B, 1, count)` of sinks and most recent entries (StreamingLLM); the first `counts[b]` are valid."""
    places = torch.arange(count, device=counts.device)
    recent = prefix_lengths[:, None] - counts[:, None] + places
    return torch.where(places < SINK_TOKENS, places, recent)[:, None]


def capacity_for(entries: int) -> int:
    """Return the size of a buffer for this many entries, which rarely changes from phase to phase.

    A captured graph is bound to the addresses of its buffers. At most an eighth of a buffer above 512 entries is free.

    >>> [capacity_for(entries) for entries in (1, 64, 65, 600, 1000, 5000)]
    [64, 64, 128, 640, 1024, 5120]
    """
    step = max(64, (1 << (entries - 1).bit_length()) // 16)
    return -(-entries // step) * step


class SelectedCache(CompactCache):
    """Compact copies of selected entries per layer, followed by a dense tail and room for the drafted tokens.

    The buffers stay where they are until a phase needs larger or much smaller ones.

    Args:
        cache ([`SpeculativeCache`]): The target's cache.
        dense_layers (`frozenset[int]`): Indices of the layers that attend to the full cache.
        room (`int`): Number of tokens drafted per phase.
    """

    def __init__(self, cache: SpeculativeCache, dense_layers: frozenset[int], room: int):
        super().__init__(cache, dense_layers)
        self.room = room
        self.counts: list[int] = []
        self._size = 0
        self._shift: list[int] = []
        self._rest: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def begin(self, counts: Sequence[int], tails: Sequence[int]) -> None:
        """Start a phase with `counts[b]` selected entries and the last `tails[b]` committed tokens of every row."""
        self.counts = list(counts)
        used = [count + tail for count, tail in zip(counts, tails, strict=True)]
        # difference between a slot of the target's cache and its place after the selected entries
        self._shift = [stored - own for stored, own in zip(self.cache.lengths.host, used, strict=True)]
        self.used.lengths = SeqLens(used)
        self.share_dense()
        self._rest.clear()
        self._size = capacity_for(self.used.lengths.longest + self.room)

    def allocate(self, layer_idx: int) -> None:
        """Replace the buffers of one layer if they do not have the size of this phase."""
        source, layer = self.cache.layers[layer_idx], self.layers[layer_idx]
        if not layer.is_initialized or layer.keys.shape[2] != self._size:
            buffers = source.keys, source.values
            layer.place(*(x.new_empty(*x.shape[:2], self._size, x.shape[3]) for x in buffers))

    def table(self, device: torch.device) -> torch.Tensor:
        """Return the shift and the number of selected entries of every row, `(2, B)`, and keep the used lengths.

        All that a phase needs to have on the device reaches it in one copy.
        """
        table = on_device([self._shift, self.counts], device)
        self.used.lengths = SeqLens(self.used.lengths.host, self.cache.lengths.on(device) - table[0])
        return table

    def fill(self, layer_idx: int, selected: torch.Tensor) -> None:
        """Copy one layer's selected entries and tail.

        Args:
            layer_idx (`int`): Index of the layer.
            selected (`torch.LongTensor` of shape `(B, 1 or K, n)`): Slots of the selected entries, of which the first
                `counts[b]` of a row are valid.
        """
        device = self.cache.layers[layer_idx].keys.device
        self.allocate(layer_idx)
        if device not in self._rest:
            self._rest[device] = self.rest(self.table(device))
        self.gather(layer_idx, selected.to(device), *self._rest[device])

    def fill_all(self, scores: Sequence[torch.Tensor], prefix_lengths: torch.Tensor, table: torch.Tensor) -> None:
        """Select the best entries of all sparse layers by these scores, and copy them. It may be part of a graph.

        Args:
            scores (`Sequence[torch.Tensor]`): Scores `(B, 1 or K, S)` of each layer.
            prefix_lengths (`torch.LongTensor` of shape `(B,)`): Length of each row's scored prefix.
            table (`torch.LongTensor` of shape `(2, B)`): Result of `table`.
        """
        rest = self.rest(table)
        for layer_idx, of_layer in zip(self.sparse_layers, scores, strict=True):
            count = min(of_layer.shape[-1], rest[0].shape[-1])
            self.gather(layer_idx, select_top(of_layer, prefix_lengths, count), *rest)

    def rest(self, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return slots `(B, 1, T)` of the tail at its places, and which places `(B, 1, T)` selected entries take."""
        places, (shift, counts) = torch.arange(self._size, device=table.device), table[:, :, None, None]
        return (places + shift).clamp_(0, self.cache.layers[0].capacity - 1), places < counts

    def gather(self, layer_idx: int, selected: torch.Tensor, rest: torch.Tensor, is_selected: torch.Tensor) -> None:
        """Copy one layer's entries: selected ones `(B, 1 or K, n)` at their places, and the `rest`."""
        padded = torch.nn.functional.pad(selected, (0, rest.shape[-1] - selected.shape[-1]))
        slots = torch.where(is_selected, padded, rest)
        source, layer = self.cache.layers[layer_idx], self.layers[layer_idx]
        gather_entries(source.keys, slots, layer.keys)
        gather_entries(source.values, slots, layer.values)
