"""Which prefix entries a sparse drafting phase reads, and the compact cache that holds copies of them."""

import math
from collections.abc import Sequence

import torch
from transformers.cache_utils import Cache

from .cache import RowLengths, SpeculativeCache, SpeculativeLayer

# Attention sinks: always selected (https://huggingface.co/papers/2309.17453).
SINK_TOKENS = 4


def budget(prefix_length: int, ratio: float, floor: int) -> int:
    """Entries to select out of `prefix_length`: a share, at least `floor`, never more than there are."""
    return min(prefix_length, max(floor, math.ceil(ratio * prefix_length)))


def select_top(scores: torch.Tensor, prefix_lengths: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` best entries of every row and head, best first, the sinks before all others.

    Args:
        scores (`torch.Tensor` of shape `(B, K, S)`): Overwritten. Entries at or beyond a row's prefix never win while
            the row has others.
        prefix_lengths (`torch.LongTensor` of shape `(B,)`): Prefix of each row.
        count (`int`): At most S.

    Returns:
        `torch.LongTensor` of shape `(B, K, count)`.
    """
    scores[..., :SINK_TOKENS] = torch.inf
    slots = torch.arange(scores.shape[-1], device=scores.device)
    if scores.shape[0] > 1:
        scores.masked_fill_((slots >= prefix_lengths[:, None])[:, None], -torch.inf)
    # rows share one count, so a row with a smaller budget takes the first of its sorted winners
    return scores.topk(count, dim=-1, sorted=scores.shape[0] > 1).indices


def select_window(prefix_lengths: torch.Tensor, counts: torch.Tensor, count: int) -> torch.Tensor:
    """Sinks and the most recent entries (StreamingLLM), `(B, 1, count)`; a row's first `counts[b]` are meant."""
    places = torch.arange(count, device=counts.device)
    recent = prefix_lengths[:, None] - counts[:, None] + places
    return torch.where(places < SINK_TOKENS, places, recent)[:, None]


class SelectedCache(Cache):
    """Compact copies of selected entries per layer, a dense tail behind them, and room for the drafted tokens.

    A drafting forward of the target uses it as its cache: every layer then attends to a short contiguous buffer.
    Layers that have a sliding window of their own keep reading the target's cache; what they draft is written to the
    slots behind the committed tokens, where the next verification overwrites it.

    Args:
        cache ([`SpeculativeCache`]): The target's cache.
        dense_layers (`frozenset[int]`): Layers that keep their own attention.
        room (`int`): Tokens drafted per phase.
    """

    def __init__(self, cache: SpeculativeCache, dense_layers: frozenset[int], room: int):
        self.cache = cache
        self.dense_layers = dense_layers
        self.room = room
        self.used = RowLengths(cache.batch_size)
        self.dense_used = RowLengths(cache.batch_size)
        self.used.staged = self.dense_used.staged = True
        super().__init__(
            layers=[
                SpeculativeLayer(self.dense_used if index in dense_layers else self.used, layer.capacity)
                for index, layer in enumerate(cache.layers)
            ]
        )

    @property
    def sparse_layers(self) -> list[int]:
        """Layers whose entries are selected; layers that share another one's cache hold nothing and are left out."""
        return [
            index
            for index, layer in enumerate(self.cache.layers)
            if layer.is_initialized and index not in self.dense_layers
        ]

    def begin(self, counts: Sequence[int], tails: Sequence[int]) -> None:
        """Start a phase: `counts[b]` selected entries and the last `tails[b]` committed tokens of every row."""
        self.used.set([count + tail for count, tail in zip(counts, tails, strict=True)])
        self.dense_used.set(self.cache.host_lengths)
        for index in self.dense_layers:
            source, layer = self.cache.layers[index], self.layers[index]
            layer.keys, layer.values, layer.is_initialized = source.keys, source.values, source.is_initialized

    def fill(self, layer_idx: int, selected: torch.Tensor, counts: Sequence[int], tails: Sequence[int]) -> None:
        """Copy one layer's selected entries and tail.

        Args:
            selected (`torch.LongTensor` of shape `(B, 1 or K, T)`): Slots; a row's first `counts[b]` are meant.
        """
        source, layer = self.cache.layers[layer_idx], self.layers[layer_idx]
        slots = self._slots(selected.to(source.keys.device), counts, tails)
        layer.keys = _gather(source.keys, slots)
        layer.values = _gather(source.values, slots)
        layer.is_initialized = True

    def advance(self) -> None:
        """One drafted token was written in every row."""
        for rows in (self.used, self.dense_used):
            rows.set([length + 1 for length in rows.host])

    def _slots(self, selected: torch.Tensor, counts: Sequence[int], tails: Sequence[int]) -> torch.Tensor:
        """Slots of selected entries, then of the tail, then `room` arbitrary ones: `(B, 1 or K, T)`."""
        device = selected.device
        count = torch.tensor(counts, device=device)[:, None]
        start = self.cache.rows.on(device)[:, None] - torch.tensor(tails, device=device)[:, None]
        width = self.used.longest + self.room
        place = torch.arange(width, device=device)
        tail = (start + place - count).clamp_(0, self.cache.layers[0].capacity - 1)[:, None]
        if self.used.equal_length is not None and min(counts) == max(counts):
            tail = tail[..., counts[0] :].expand(-1, selected.shape[1], -1)
            return torch.cat([selected[..., : counts[0]], tail], dim=-1)
        chosen = torch.nn.functional.pad(selected, (0, width - selected.shape[-1]))
        return torch.where(place < count[:, None], chosen, tail)


def _gather(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """`buffer[b, h, slots[b, h]]` as one copy of whole rows; `slots` may have one head for all."""
    batch, heads, capacity, width = buffer.shape
    row = torch.arange(batch * heads, device=buffer.device).view(batch, heads, 1) * capacity
    flat = (row + slots).flatten()
    return buffer.view(-1, width).index_select(0, flat).view(batch, heads, -1, width)
