"""Caches with a part of a text's keys and values, for drafts that read less than the target does.

- [`CompactCache`] holds some entries of the target's cache, a short buffer per layer, and [`SelectedCache`] those that
  a sparse drafting phase selects.
- [`WindowedCache`] holds the first and the last tokens of a text, for drafts of constant cost. StreamingLLM,
  https://huggingface.co/papers/2309.17453, keeps a few first tokens (sinks) and a window of last ones. Keys are rotated
  before they are cached, so here tokens stay at their true positions, and attention sees a gap after the sinks.
  StreamingLLM numbers the kept tokens anew instead, for which it caches keys that are not rotated.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from ...attention_backends.contexts import SparseContext, StepContext
from ...attention_backends.lengths import SeqLens, on_device
from ...generation.cache import Rows, SpeculativeCache, parts_of, slots_of
from ...generation.draft_tree import DraftTree
from ...generation.target import TargetView


class CompactCache(Cache):
    """Hold copies of some entries of the target's cache, and free slots after them for drafted tokens.

    A subclass chooses the entries of each layer, writes them to `keys` and `values` of the layer, and sets `used`.
    Layers in `dense_layers` read the target's cache. Their drafted tokens are written to the slots after the committed
    tokens, where the next verification overwrites them. Other parts of the cache are copied whole at the start of a
    phase, and drafting steps change the copies.
    """

    def __init__(self, cache: SpeculativeCache, dense_layers: frozenset[int]):
        self.cache = cache
        self.keyed_layers = frozenset(i for i, layer in enumerate(cache.layers) if hasattr(layer, "capacity"))
        self.dense_layers = dense_layers & self.keyed_layers
        self.used = Rows(cache.batch_size)
        self.dense_used = Rows(cache.batch_size)
        self.used.staged = self.dense_used.staged = True
        rows = (self.dense_used if index in dense_layers else self.used for index in range(len(cache.layers)))
        layers = (
            layer.like(of) if hasattr(layer, "like") else layer for layer, of in zip(cache.layers, rows, strict=True)
        )
        super().__init__(layers=list(layers))
        self.parts = parts_of(self)

    @property
    def sparse_layers(self) -> list[int]:
        """Indices of the layers whose entries are selected, without layers that share the cache of another layer."""
        others = self.keyed_layers - self.dense_layers
        return sorted(index for index in others if self.cache.layers[index].is_initialized)

    @property
    def layout(self) -> tuple[int, ...]:
        return self.used.layout, self.dense_used.layout

    @property
    def nbytes(self) -> int:
        """Size of the copies in bytes; dense layers have none."""
        own = [self.layers[index] for index in self.sparse_layers if self.layers[index].is_initialized]
        keys = sum(layer.keys.nbytes + layer.values.nbytes for layer in own)
        return keys + sum(part.nbytes for part in self.parts)

    def share_dense(self) -> None:
        """Let the dense layers read the target's cache at its present length, and copy its other parts."""
        for part, of_target in zip(self.parts, self.cache.parts, strict=True):
            part.copy_from(of_target)
        self.dense_used.lengths = self.cache.lengths
        for index in self.dense_layers:
            source, layer = self.cache.layers[index], self.layers[index]
            if source.is_initialized and layer.keys is not source.keys:
                layer.place(source.keys, source.values)

    def context(self, target: TargetView, positions: torch.Tensor) -> StepContext:
        """Return the context of a drafting step at `positions` `(B, 1)`."""
        used, dense = self.used.lengths.plus(1), self.dense_used.lengths.plus(1)
        return SparseContext(used, positions, dense, dense_layers=self.dense_layers, windows=target.windows)

    def advance(self) -> None:
        """Count one drafted token that was written in every row."""
        for rows in (self.used, self.dense_used):
            rows.lengths = rows.lengths.plus(1)

    def step(
        self,
        target: TargetView,
        token: torch.Tensor,
        max_length: int,
        with_hidden: bool = False,
        fixed_shape: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the target on one `token` `(batch_size,)` per row, which attends to the entries and to itself.

        Its keys and values are written to the slot after the used entries. Its true position is clamped below
        `max_length`. See [`TargetView.step`] for `with_hidden` and `fixed_shape`.
        """
        device = token.device
        dense = self.dense_used.lengths
        position = dense.on(device)[:, None]
        if dense.longest >= max_length:
            position = position.clamp_max(max_length - 1)
        context = self.context(target, position)
        mask = DraftTree.root_only(token).mask[:, None]
        logits, hidden = target.step(
            token[:, None], self.cache.position_ids(position), self, mask, context, fixed_shape, with_hidden
        )
        return logits[:, 0], None if hidden is None else hidden[:, 0]


def flat_slots(slots: torch.Tensor, batch: int, heads: int, capacity: int) -> torch.Tensor:
    """Return the rows `(..., B, K, n)` of a buffer `(B * K * capacity, D)` that are its slots `(..., B, 1 or K, n)`."""
    return torch.arange(0, batch * heads * capacity, capacity, device=slots.device).view(batch, heads, 1) + slots


def gather_entries(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return `buffer[b, h, slots[b, h]]` as one copy of whole rows, `(B, K, n, D)`."""
    batch, heads, capacity, width = buffer.shape
    flat = flat_slots(slots, batch, heads, capacity).flatten()
    return torch.index_select(buffer.view(-1, width), 0, flat).view(batch, heads, -1, width)


# Number of attention sinks, which are always selected (https://huggingface.co/papers/2309.17453).
SINK_TOKENS = 4


def budget(prefix_length: int, ratio: float, floor: int) -> int:
    """Return the number of entries to select of a prefix: a share of it, at least `floor`, at most all."""
    return min(prefix_length, max(floor, math.ceil(ratio * prefix_length)))


def select_top(scores: torch.Tensor, prefix_lengths: torch.Tensor, count: int, is_sorted: bool = True) -> torch.Tensor:
    """Return the slots `(..., B, K, count)` of the best entries of every row and head.

    The scores `(..., B, K, S)` are overwritten. Entries after a row's prefix are selected last. S is at least the
    longest prefix. Slots are sorted, sinks first, then by falling score, so that a row with a smaller budget takes the
    first ones; without `is_sorted` their order is arbitrary.
    """
    slots = torch.arange(scores.shape[-1], device=scores.device)
    scores[..., :SINK_TOKENS] = torch.inf
    scores.masked_fill_((slots >= prefix_lengths[:, None])[:, None], -torch.inf)
    return scores.topk(count, dim=-1, sorted=is_sorted).indices


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
    """Compact copies of selected entries per layer, followed by a dense tail and `room` for the drafted tokens.

    The buffers stay where they are until a phase needs larger or much smaller ones.
    """

    def __init__(self, cache: SpeculativeCache, dense_layers: frozenset[int], room: int):
        super().__init__(cache, dense_layers)
        self.room = room
        self.counts: list[int] = []
        self._size = 0
        self._shift: list[int] = []

    def begin(self, counts: Sequence[int], tails: Sequence[int]) -> None:
        """Start a phase with `counts[b]` selected entries and the last `tails[b]` committed tokens of every row."""
        self.counts = list(counts)
        used = [count + tail for count, tail in zip(counts, tails, strict=True)]
        # difference between a slot of the target's cache and its place after the selected entries
        self._shift = [stored - own for stored, own in zip(self.cache.lengths.host, used, strict=True)]
        self.used.lengths = SeqLens(used)
        self.share_dense()
        self._size = capacity_for(self.used.lengths.longest + self.room)

    def take(self, row: int, other: "SelectedCache", of: int = 0) -> None:
        """Replace the phase of a row by that of row `of` of another such cache, which the cache has taken, too."""
        counts, used = list(self.counts), list(self.used.lengths.host)
        counts[row], used[row] = other.counts[of], other.used.lengths.host[of]
        self.begin(counts, [length - count for length, count in zip(used, counts, strict=True)])
        for index in self.sparse_layers:
            layer, taken = self.layers[index], other.layers[index]
            if layer.keys.shape[2] < self._size:  # see `allocate`
                missing = self._size - layer.keys.shape[2]
                layer.place(*(torch.nn.functional.pad(x, (0, 0, 0, missing)) for x in (layer.keys, layer.values)))
            layer.keys[row, :, : used[row]] = taken.keys[of, :, : used[row]]
            layer.values[row, :, : used[row]] = taken.values[of, :, : used[row]]

    def layers_by_device(self) -> dict[torch.device, list[int]]:
        """Return the sparse layers of every device."""
        found: dict[torch.device, list[int]] = {}
        for layer_idx in self.sparse_layers:
            found.setdefault(self.cache.layers[layer_idx].keys.device, []).append(layer_idx)
        return found

    def allocate(self, layers: Sequence[int]) -> None:
        """Replace the buffers of layers that do not have the size of this phase."""
        for source, layer in ((self.cache.layers[index], self.layers[index]) for index in layers):
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

    def fill_top(
        self,
        layers: Sequence[int],
        scores: Sequence[torch.Tensor],
        prefix_lengths: torch.Tensor,
        table: torch.Tensor,
        any_counts: bool = False,
    ) -> None:
        """Select the best entries of layers by their scores `(B, 1 or K, S)`, and copy them and the tail.

        `prefix_lengths` `(B,)` are those of the scored prefixes. With `any_counts` it may be part of a graph, which
        serves all phases that buffers of this size have room for: nothing but the tensors depends on the counts.
        """
        alike: dict[torch.Size, list[int]] = {}
        for place, of_layer in enumerate(scores):
            alike.setdefault(of_layer.shape, []).append(place)
        is_sorted = any_counts or len(set(self.counts)) > 1
        for shape, places in alike.items():
            count = min(shape[-1], self._size) if any_counts else max(self.counts)
            selected = select_top(torch.stack([scores[place] for place in places]), prefix_lengths, count, is_sorted)
            self.fill([layers[place] for place in places], selected, table)

    def fill(self, layers: Sequence[int], selected: torch.Tensor, table: torch.Tensor) -> None:
        """Copy the selected entries and the tail of layers on one device.

        The first `counts[b]` of the slots `selected` `(L or 1, B, 1 or K, n)` of a row are valid.
        """
        places, (shift, counts) = torch.arange(self._size, device=table.device), table[:, :, None, None]
        tail = (places + shift).clamp_(0, self.cache.key_layers[0].capacity - 1)  # [B, 1, T], at its places
        if selected.shape[-1] < self._size:
            selected = torch.nn.functional.pad(selected, (0, self._size - selected.shape[-1]))
        slots = torch.where(places < counts, selected, tail)
        flat: dict[torch.Size, torch.Tensor] = {}  # by the shape of a buffer
        for place, (source, layer) in enumerate((self.cache.layers[index], self.layers[index]) for index in layers):
            shape = source.keys.shape[:3]
            if shape not in flat:
                flat[shape] = flat_slots(slots, *shape).flatten(1).expand(len(layers), -1)
            for own, copied in ((source.keys, layer.keys), (source.values, layer.values)):
                width = own.shape[3]
                torch.index_select(own.view(-1, width), 0, flat[shape][place], out=copied.view(-1, width))


class WindowedCache(SpeculativeCache):
    """Hold the first `sinks` and at least the last `window` tokens of every row; all tokens without a window.

    A row drops tokens when it holds a quarter of the window more than that, all at once, so that few steps move
    entries. Every row decides by its own length. Kept tokens lie side by side in the order of the text: the token at
    position p lies in slot `p - dropped`, except for the sinks.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        batch_size: int,
        max_length: int,
        tree_slots: int,
        window: int | None = None,
        sinks: int = 4,
    ):
        self.window, self.sinks = window, sinks
        self.most = max_length if window is None else min(max_length, sinks + window + max(1, window // 4))
        self.dropped = SeqLens((0,) * batch_size)
        super().__init__(config, batch_size, self.most, tree_slots)

    @property
    def positions(self) -> list[int]:
        """Position of the token that follows the committed ones, in every row."""
        return [held + dropped for held, dropped in zip(self.lengths.host, self.dropped.host, strict=True)]

    def kept_of(self, length: int) -> list[int]:
        """Return the positions that a text of `length` tokens has in an empty cache, without those it would drop."""
        if self.window is None or length <= self.sinks + self.window:
            return list(range(length))
        return [*range(self.sinks), *range(length - self.window, length)]

    def trim(self) -> None:
        """Drop tokens of rows that hold too many."""
        if self.window is None or self.lengths.longest <= self.most:
            return
        size, host = self.sinks + self.window, self.lengths.host
        drops = [length - size if length > self.most else 0 for length in host]
        lengths = [length - drop for length, drop in zip(host, drops, strict=True)]
        dropped = [before + drop for before, drop in zip(self.dropped.host, drops, strict=True)]
        numbers = on_device([drops, lengths, dropped], self.key_layers[0].keys.device)  # one copy for all of them
        places = torch.arange(self.sinks, size, device=numbers.device) + numbers[0][:, None]  # [B, window]
        for layer in self.key_layers:
            if layer.is_initialized:
                states = layer.keys, layer.values
                moved = [slots_of(x, places) for x in states]
                torch._foreach_copy_([x[:, :, self.sinks : size] for x in states], moved)
        self.dropped = SeqLens(dropped, numbers[2])
        self._set_lengths(SeqLens(lengths, numbers[1]))  # recurrent states stay those of the whole text

    def take_row(self, row: int, other: Any, of: int = 0) -> None:
        super().take_row(row, other, of)
        dropped = list(self.dropped.host)
        dropped[row] = other.dropped.host[of]
        self.dropped = SeqLens(dropped)

    def reset(self) -> None:
        super().reset()
        self.dropped = SeqLens((0,) * self.batch_size)
