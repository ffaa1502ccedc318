# Published with a draft by hf_longspec, Apache-2.0.
"""Which prefix entries a sparse drafting phase reads, and the compact cache that holds copies of them."""

import math
from collections.abc import Sequence

import torch

from .generation_cache import SpeculativeCache
from .generation_compact_cache import CompactCache, gather_entries

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


class SelectedCache(CompactCache):
    """Compact copies of selected entries per layer, a dense tail behind them, and room for the drafted tokens.

    Args:
        cache ([`SpeculativeCache`]): The target's cache.
        dense_layers (`frozenset[int]`): Layers that keep their own attention.
        room (`int`): Tokens drafted per phase.
    """

    def __init__(self, cache: SpeculativeCache, dense_layers: frozenset[int], room: int):
        super().__init__(cache, dense_layers)
        self.room = room
        self._counts: list[int] = []
        self._shift: list[int] = []
        self._behind: dict[torch.device, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def begin(self, counts: Sequence[int], tails: Sequence[int]) -> None:
        """Start a phase: `counts[b]` selected entries and the last `tails[b]` committed tokens of every row."""
        self.used.set([count + tail for count, tail in zip(counts, tails, strict=True)])
        self.share_dense()
        self._counts = list(counts)
        # from a place behind the selected entries to its slot
        self._shift = [stored - used for stored, used in zip(self.cache.host_lengths, self.used.host, strict=True)]
        self._behind.clear()

    def fill(self, layer_idx: int, selected: torch.Tensor) -> None:
        """Copy one layer's selected entries and tail.

        Args:
            selected (`torch.LongTensor` of shape `(B, 1 or K, max(counts))`): Slots; a row's first `counts[b]` are
                meant.
        """
        source, layer = self.cache.layers[layer_idx], self.layers[layer_idx]
        slots = self._slots(selected.to(source.keys.device))
        layer.keys = gather_entries(source.keys, slots)
        layer.values = gather_entries(source.values, slots)
        layer.is_initialized = True

    def advance(self) -> None:
        """One drafted token was written in every row."""
        for rows in (self.used, self.dense_used):
            rows.set([length + 1 for length in rows.host])

    def _slots(self, selected: torch.Tensor) -> torch.Tensor:
        """Slots of selected entries, then of the tail, then `room` arbitrary ones: `(B, 1 or K, T)`."""
        behind, is_selected = self._behind_selected(selected.device)
        if is_selected is None:
            return torch.cat([selected, behind.expand(-1, selected.shape[1], -1)], dim=-1)
        padded = torch.nn.functional.pad(selected, (0, behind.shape[-1] - selected.shape[-1]))
        return torch.where(is_selected, padded, behind)

    def _behind_selected(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the layers on a device share in a phase: the slots behind the selected ones, and where those end.

        With one count for all rows the slots are `(B, 1, T - count)`, and no mask is needed. Otherwise both are
        `(B, 1, T)`, and the mask says which places hold selected entries.
        """
        if device not in self._behind:
            equal = min(self._counts) == max(self._counts)
            place = torch.arange(self._counts[0] if equal else 0, self.used.longest + self.room, device=device)
            shift = torch.tensor(self._shift, device=device)[:, None, None]
            slots = (place + shift).clamp_(0, self.cache.layers[0].capacity - 1)
            is_selected = None if equal else place < torch.tensor(self._counts, device=device)[:, None, None]
            self._behind[device] = slots, is_selected
        return self._behind[device]
