"""Sparse attention to the best pages of a prefix, which every layer chooses by the query of the step itself.

Quest, https://huggingface.co/papers/2406.10774. The prefix is divided into pages. [`KeyPages`] has the lowest and the
highest value of every channel of the keys in a page, which bound the scores of the page's entries for any query.
[`PageContext`] is the context of a step that reads the pages with the largest bounds, where they lie in the cache.
"""

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch

from .contexts import GraphStep, LayerInputs, StepContext
from .merge import AttentionState, merge_attention_states
from .scores import key_products

# Pages whose keys are gathered at a time, so that a long prefix is not copied as a whole.
PAGES_AT_ONCE = 256


def page_extremes(keys: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lowest and the highest value of every channel in every page of keys `(B, K, S, D)`.

    Args:
        keys (`torch.Tensor` of shape `(B, K, S, D)`): Keys, S at least 1.
        page_size (`int`): Entries of a page. The last page may have fewer.

    Returns:
        `tuple`: Two tensors of shape `(B, K, pages, D)`.
    """
    full = keys.shape[2] // page_size
    whole, rest = keys[:, :, : full * page_size], keys[:, :, full * page_size :]
    parts = [whole.unflatten(2, (full, page_size))] if full else []
    if rest.shape[2]:
        parts.append(rest[:, :, None])
    return torch.cat([part.amin(3) for part in parts], 2), torch.cat([part.amax(3) for part in parts], 2)


def page_bounds(query: torch.Tensor, lowest: torch.Tensor, highest: torch.Tensor) -> torch.Tensor:
    """Return an upper bound of `q . k` over the keys of every page and the queries that share a KV head.

    The bound of Quest (https://huggingface.co/papers/2406.10774, Section 3.3): every channel adds the larger one of its
    products with the two extremes. A group of query heads reads the same pages, so their largest bound counts.

    Args:
        query (`torch.Tensor` of shape `(B, H, N, D)`): Queries.
        lowest (`torch.Tensor` of shape `(B, K, P, D)`): Lowest value of every channel of every page.
        highest (`torch.Tensor` of shape `(B, K, P, D)`): Highest value.

    Returns:
        `torch.Tensor` of shape `(B, K, P)`, float32.
    """
    grouped = query.unflatten(1, (lowest.shape[1], -1)).flatten(2, 3)  # [B, K, G * N, D]
    bounds = key_products(grouped.clamp_min(0), highest) + key_products(grouped.clamp_max(0), lowest)
    return bounds.amax(2)


class KeyPages:
    """The lowest and the highest key, channel by channel, of every full page in some layers.

    Args:
        page_size (`int`): Entries of a page.
        num_sinks (`int`): Number of first entries whose pages are always chosen.

    Attributes:
        bounds (`dict[int, tuple[torch.Tensor, torch.Tensor]]`): Lowest and highest values `(B, K, P + 1, D)` by layer.
            The last page takes writes that are not kept.
        layout (`int`): Number of times that a tensor was replaced.
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
        """Compute the bounds of the pages from `first[b]` to before `end[b]`, at most `count` of each row.

        Args:
            layer_idx (`int`): Index of the layer.
            keys (`torch.Tensor` of shape `(B, K, capacity, D)`): Buffer of its keys.
            first (`torch.LongTensor` of shape `(B,)`): First page of every row.
            end (`torch.LongTensor` of shape `(B,)`): Page after the last one.
            count (`int`): Largest number of pages of a row.
        """
        lowest, highest = self.bounds[layer_idx]
        spare, last_slot = lowest.shape[2] - 1, keys.shape[2] - 1
        within = torch.arange(self.page_size, device=keys.device)
        for start in range(0, count, PAGES_AT_ONCE):
            pages = first[:, None] + torch.arange(start, min(start + PAGES_AT_ONCE, count), device=keys.device)
            slots = (pages[..., None] * self.page_size + within).flatten(1).clamp_max(last_slot)
            index = slots[:, None, :, None].expand(-1, keys.shape[1], -1, keys.shape[3])
            found = page_extremes(keys.gather(2, index), self.page_size)
            places = torch.where(pages < end[:, None], pages, spare)[:, None, :, None].expand_as(found[0])
            lowest.scatter_(2, places, found[0])
            highest.scatter_(2, places, found[1])


class PageSizes(NamedTuple):
    """Sizes of a step's tensors. Hashable, as they choose the graph.

    Args:
        pages (`int`): Pages that compete, at least the full pages of the longest row.
        chosen (`int`): Pages that are chosen, at least those of the row with the most.
        rest (`int`): Largest number of entries after the full pages.
    """

    pages: int
    chosen: int
    rest: int


@dataclass
class PageContext(StepContext):
    """One drafting step, as the attention layers see it.

    A layer with bounds attends to the pages with the largest bounds for the step's own query, those of the first
    entries always among them, and to all entries after the last full page. Every KV head has its own pages. All other
    layers attend to the whole cache, and so do those whose attention gets another number of KV heads than the cache.

    Args:
        lengths ([`SeqLens`]): Used slots of the cache, including the query's own.
        positions (`torch.LongTensor` of shape `(B, N)`): Absolute positions of the queries.
        full (`torch.LongTensor` of shape `(B,)`): Number of full pages of every row.
        chosen (`torch.LongTensor` of shape `(B,)`): Number of pages to choose in every row, at most `full`.
        pages ([`KeyPages`]): Bounds of the pages.
        sizes ([`PageSizes`]): Sizes of the tensors.
    """

    full: torch.Tensor
    chosen: torch.Tensor
    pages: KeyPages
    sizes: PageSizes

    def of_step(self) -> tuple[tuple[torch.Tensor, ...], tuple]:
        """Return positions and numbers of pages; the bounds with their layout, the sizes and the windows."""
        return (self.positions, self.full, self.chosen), (self.pages, self.pages.layout, self.sizes, self.windows)

    @classmethod
    def in_graph(cls, step: GraphStep) -> Self:
        """Return the context of a drafting step inside a graph."""
        (pages, _, sizes, windows), (positions, full, chosen) = step.settings, step.changing
        return cls(step.layers[0].plus(1), positions, full, chosen, pages, sizes, windows=windows)

    def state(self, layer: LayerInputs) -> AttentionState:
        """Attend to the pages of the queries, or to the whole cache."""
        bounds = self.pages.bounds.get(layer.layer_idx)
        # jetmoe repeats keys after it has cached them, in an order of its own
        if bounds is None or bounds[0].shape[1] != layer.key.shape[1]:
            return layer.attend_to_prefix(self.lengths, self.positions)
        slots, counts = self.slots(layer.layer_idx, layer.query)
        state = layer.backend.sparse_attention(*layer.tensors, slots, counts, **layer.options)
        return merge_attention_states([state], layer.sinks)

    def slots(self, layer_idx: int, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the entries that a layer attends to.

        Args:
            layer_idx (`int`): Index of the layer.
            query (`torch.Tensor` of shape `(B, H, N, D)`): Queries of the step, which share the entries.

        Returns:
            `tuple`: Slots `(B, K, T)`, and how many of them every row uses, `(B,)`.
        """
        size, sizes = self.pages.page_size, self.sizes
        if "entries" not in self._memo:
            self._memo["entries"] = self._entries(query.device)
        hidden, is_paged, rest, counts = self._memo["entries"]
        scores = page_bounds(query, *(part[:, :, : sizes.pages] for part in self.pages.bounds[layer_idx]))
        scores[..., : self.pages.num_sink_pages] = torch.inf
        best = scores.masked_fill_(hidden, -torch.inf).topk(sizes.chosen, dim=-1).indices
        paged = (best[..., None] * size + torch.arange(size, device=query.device)).flatten(2)
        return torch.where(is_paged, torch.nn.functional.pad(paged, (0, sizes.rest)), rest), counts

    def _entries(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Return what all layers have in common.

        Returns:
            `tuple`: Which pages `(B, 1, P)` are not full; which of the T places `(B, 1, T)` hold entries of pages; the
            slots `(B, 1, T)` at the other places; and how many places `(B,)` are used.
        """
        size, (pages, chosen, rest) = self.pages.page_size, self.sizes
        full, taken = self.full[:, None, None], self.chosen[:, None, None] * size
        lengths = self.lengths.on(device)
        places = torch.arange(chosen * size + rest, device=device)
        after = torch.minimum(full * size + (places - taken).clamp_min(0), lengths[:, None, None] - 1)
        hidden = torch.arange(pages, device=device) >= full
        return hidden, places < taken, after, lengths + (self.chosen - self.full) * size
