"""Bounds of the scores of whole pages of a prefix, by which every layer chooses with the query of the step itself.

Quest, https://huggingface.co/papers/2406.10774: the prefix is divided into pages. [`KeyPages`] has the lowest and the
highest value of every channel of the keys in a page, which bound the scores of the page's entries for any query.
[`PageContext`] is the context of a step that reads the pages with the largest bounds, where they lie in the cache.
"""

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch

from ...attention_backends.contexts import GraphStep, LayerAttention, StepContext
from ...attention_backends.registry import AttentionState, merge_attention_states
from ...attention_backends.scores import key_products

# Pages whose keys are gathered at a time, so that a long prefix is not copied as a whole.
PAGES_AT_ONCE = 256


def page_bounds(query: torch.Tensor, lowest: torch.Tensor, highest: torch.Tensor) -> torch.Tensor:
    """Return an upper bound `(B, K, P)` of `q . k` over the keys of every page and the queries that share a KV head.

    Queries are `(B, H, N, D)`, the lowest and the highest value of every channel of every page `(B, K, P, D)`.

    The bound of Quest (https://huggingface.co/papers/2406.10774, Section 3.3): every channel adds the larger one of its
    products with the two extremes. A group of query heads reads the same pages, so their largest bound counts.
    """
    grouped = query.unflatten(1, (lowest.shape[1], -1)).flatten(2, 3)  # [B, K, G * N, D]
    bounds = key_products(grouped.clamp_min(0), highest) + key_products(grouped.clamp_max(0), lowest)
    return bounds.amax(2)


class KeyPages:
    """The lowest and the highest key, channel by channel, of every full page in some layers.

    `bounds` are both `(B, K, P + 1, D)` by layer; the last page takes writes that are not kept. `layout` counts how
    often a tensor was replaced. Pages of the first `num_sinks` entries are always chosen.
    """

    def __init__(self, page_size: int, num_sinks: int):
        self.page_size = page_size
        self.num_sink_pages = -(-num_sinks // page_size)
        self.bounds: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.layout = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all bounds, `2 / page_size` of those of the keys."""
        return sum(part.numel() * part.element_size() for pair in self.bounds.values() for part in pair)

    def reserve(self, layer_idx: int, keys: torch.Tensor) -> None:
        """Make room for the pages of a buffer `(B, K, capacity, D)`, and drop bounds for a buffer of another size."""
        shape = *keys.shape[:2], keys.shape[2] // self.page_size + 1, keys.shape[3]
        if layer_idx in self.bounds and self.bounds[layer_idx][0].shape == shape:
            return
        self.bounds[layer_idx] = keys.new_zeros(shape), keys.new_zeros(shape)
        self.layout += 1

    def update(self, layer_idx: int, keys: torch.Tensor, first: torch.Tensor, end: torch.Tensor, count: int) -> None:
        """Compute the bounds of the pages of a buffer `(B, K, capacity, D)` from `first[b]` to before `end[b]`.

        A row has at most `count` of them.
        """
        lowest, highest = self.bounds[layer_idx]
        spare, last_slot = lowest.shape[2] - 1, keys.shape[2] - 1
        within = torch.arange(self.page_size, device=keys.device)
        for start in range(0, count, PAGES_AT_ONCE):
            pages = first[:, None] + torch.arange(start, min(start + PAGES_AT_ONCE, count), device=keys.device)
            slots = (pages[..., None] * self.page_size + within).flatten(1).clamp_max(last_slot)
            index = slots[:, None, :, None].expand(-1, keys.shape[1], -1, keys.shape[3])
            paged = keys.gather(2, index).unflatten(2, (-1, self.page_size))
            extremes = paged.amin(3), paged.amax(3)
            places = torch.where(pages < end[:, None], pages, spare)[:, None, :, None].expand_as(extremes[0])
            lowest.scatter_(2, places, extremes[0])
            highest.scatter_(2, places, extremes[1])


class PageSizes(NamedTuple):
    """Sizes of a step's tensors. Hashable, as they choose the graph."""

    pages: int  # pages that compete, at least the full pages of the longest row
    chosen: int  # pages that are chosen, at least those of the row with the most
    tail: int  # largest number of entries after the full pages


@dataclass
class PageContext(StepContext):
    """One drafting step, as the attention layers see it. `lengths` includes the query's own slot.

    A layer with bounds attends to the pages with the largest bounds for the step's own query, those of the first
    entries always among them, and to all entries after the last full page. Every KV head has its own pages. All other
    layers attend to the whole cache, and so do those whose attention gets another number of KV heads than the cache.
    """

    full: torch.Tensor  # `(B,)`: number of full pages of every row
    chosen: torch.Tensor  # `(B,)`: number of pages to choose in every row, at most `full`
    pages: KeyPages
    sizes: PageSizes

    def of_step(self) -> tuple[tuple[torch.Tensor, ...], tuple]:
        return (self.positions, self.full, self.chosen), (self.pages, self.pages.layout, self.sizes, self.windows)

    @classmethod
    def in_graph(cls, step: GraphStep) -> Self:
        (pages, _, sizes, windows), (positions, full, chosen) = step.settings, step.changing
        return cls(step.layers[0].plus(1), positions, full, chosen, pages, sizes, windows=windows)

    def state(self, layer: LayerAttention) -> AttentionState:
        bounds = self.pages.bounds.get(layer.layer_idx)
        # jetmoe repeats keys after it has cached them, in an order of its own
        if bounds is None or bounds[0].shape[1] != layer.key.shape[1]:
            return layer.with_sinks(layer.attend_to_prefix(self.lengths, self.positions))
        slots, counts = self.slots(layer.layer_idx, layer.query)
        tensors = (layer.query, layer.key, layer.value, slots, counts)
        state = layer.backend.sparse_attention(*tensors, **layer.options)
        return merge_attention_states([state], layer.sinks)

    def slots(self, layer_idx: int, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the slots `(B, K, T)` that the queries `(B, H, N, D)` of a layer share, and count them, `(B,)`."""
        size, sizes = self.pages.page_size, self.sizes
        if "entries" not in self._memo:
            self._memo["entries"] = self._entries(query.device)
        hidden, is_paged, tail_slots, counts = self._memo["entries"]
        scores = page_bounds(query, *(part[:, :, : sizes.pages] for part in self.pages.bounds[layer_idx]))
        scores[..., : self.pages.num_sink_pages] = torch.inf
        best = scores.masked_fill_(hidden, -torch.inf).topk(sizes.chosen, dim=-1).indices
        paged = (best[..., None] * size + torch.arange(size, device=query.device)).flatten(2)
        return torch.where(is_paged, torch.nn.functional.pad(paged, (0, sizes.tail)), tail_slots), counts

    def _entries(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Return what all layers have in common, as four tensors.

        Which pages `(B, 1, P)` are not full; which of the T places `(B, 1, T)` hold entries of pages; the slots `(B, 1,
        T)` at the other places; and how many places `(B,)` are used.
        """
        size, (pages, chosen, tail) = self.pages.page_size, self.sizes
        full, num_paged = self.full[:, None, None], self.chosen[:, None, None] * size
        lengths = self.lengths.on(device)
        places = torch.arange(chosen * size + tail, device=device)
        after = torch.minimum(full * size + (places - num_paged).clamp_min(0), lengths[:, None, None] - 1)
        hidden = torch.arange(pages, device=device) >= full
        return hidden, places < num_paged, after, lengths + (self.chosen - self.full) * size
