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
            row's prefix are selected last.
        prefix_lengths (`torch.LongTensor` of shape `(B,)`): Length of each row's prefix.
        count (`int`): Number of entries to select, at most S.

    Returns:
        `torch.LongTensor` of shape `(B, K, count)`: Slots of the entries.
    """
    scores[..., :SINK_TOKENS] = torch.inf
    slots = torch.arange(scores.shape[-1], device=scores.device)
    if scores.shape[0] > 1:
        scores.masked_fill_((slots >= prefix_lengths[:, None])[:, None], -torch.inf)
    # rows share one count, so a row with a smaller budget takes the first ones, and the result is sorted
    return scores.topk(count, dim=-1, sorted=scores.shape[0] > 1).indices


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
        self._counts: list[int] = []
        self._shift: list[int] = []
        self._behind: dict[torch.device, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def begin(self, counts: Sequence[int], tails: Sequence[int]) -> None:
        """Start a phase with `counts[b]` selected entries and the last `tails[b]` committed tokens of every row."""
        self.used.lengths = SeqLens([count + tail for count, tail in zip(counts, tails, strict=True)])
        self.share_dense()
        self._counts = list(counts)
        # difference between a slot of the target's cache and its place after the selected entries
        pairs = zip(self.cache.lengths.host, self.used.lengths.host, strict=True)
        self._shift = [stored - used for stored, used in pairs]
        self._behind.clear()

    def fill(self, layer_idx: int, selected: torch.Tensor) -> None:
        """Copy one layer's selected entries and tail.

        Args:
            layer_idx (`int`): Index of the layer.
            selected (`torch.LongTensor` of shape `(B, 1 or K, max(counts))`): Slots of the selected entries. The first
                `counts[b]` of a row are valid.
        """
        source, layer = self.cache.layers[layer_idx], self.layers[layer_idx]
        slots = self._slots(selected.to(source.keys.device))
        if not layer.is_initialized or layer.keys.shape[2] != slots.shape[-1]:
            layer.keys, layer.values = (
                buffer.new_empty(*buffer.shape[:2], slots.shape[-1], buffer.shape[3])
                for buffer in (source.keys, source.values)
            )
            layer.is_initialized = True
        gather_entries(source.keys, slots, layer.keys)
        gather_entries(source.values, slots, layer.values)

    def advance(self) -> None:
        """Count one drafted token that was written in every row."""
        for rows in (self.used, self.dense_used):
            rows.lengths = rows.lengths.plus(1)

    def _slots(self, selected: torch.Tensor) -> torch.Tensor:
        """Return the slots `(B, 1 or K, T)` of the selected entries, then of the tail, then arbitrary ones."""
        rest, is_selected = self._behind_selected(selected.device)
        if is_selected is None:
            return torch.cat([selected, rest.expand(-1, selected.shape[1], -1)], dim=-1)
        padded = torch.nn.functional.pad(selected, (0, rest.shape[-1] - selected.shape[-1]))
        return torch.where(is_selected, padded, rest)

    def _behind_selected(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the slots after the selected entries, and a mask of the selected ones, for all layers of a device.

        If all rows have the same count, the slots are `(B, 1, T - count)` and the mask is `None`. Otherwise both have
        the shape `(B, 1, T)`, and the mask is True in places of selected entries.
        """
        if device not in self._behind:
            equal = min(self._counts) == max(self._counts)
            end = capacity_for(self.used.lengths.longest + self.room)
            place = torch.arange(self._counts[0] if equal else 0, end, device=device)
            shift, counts = on_device([self._shift, self._counts], device)[:, :, None, None]
            slots = (place + shift).clamp_(0, self.cache.layers[0].capacity - 1)
            is_selected = None if equal else place < counts
            self._behind[device] = slots, is_selected
        return self._behind[device]
