"""Quest: the target drafts for itself, and every layer reads the pages that fit the query of the step.

The selection is that of Quest, https://huggingface.co/papers/2406.10774, and MagicDec drafts with it,
https://huggingface.co/papers/2408.11049. Every drafting step runs the target on one token. In every sparse layer the
step's own query bounds the scores of all pages of the prefix, and the best pages within the budget are read where they
lie in the target's cache. Drafted tokens are written after the prefix, where the next verification overwrites them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...attention_backends.contexts import StepContext
from ...attention_backends.lengths import SeqLens, on_device
from ...generation.cache import SpeculativeCache
from ...generation.drafter import Binding, Verification
from ...generation.target import TargetView
from ..shared.self_drafter import Chain, ChainSteps, SelfDrafter
from ..shared.sparse_caches import SINK_TOKENS, CompactCache, capacity_for
from .pages import KeyPages, PageContext, PageSizes


class PagedCache(CompactCache):
    """The target's own cache as drafting steps read it: by pages, with drafted tokens after the committed ones."""

    def __init__(self, cache: SpeculativeCache, dense_layers: frozenset[int], page_size: int, room: int):
        # no layer has copies, so for the base all are dense
        super().__init__(cache, frozenset(range(len(cache.layers))))
        self.pages = KeyPages(page_size, SINK_TOKENS)
        self.room = room
        self._other_layers = dense_layers
        self._rows: list[list[int]] = []
        self._tables: dict[torch.device, torch.Tensor] = {}
        self.forget()

    @property
    def layout(self) -> tuple[int, ...]:
        return *super().layout, self.pages.layout

    @property
    def nbytes(self) -> int:
        return self.pages.nbytes + sum(part.nbytes for part in self.parts)

    def forget(self) -> None:
        """Drop all bounds, as the keys may have been computed again."""
        self.full = [0] * self.cache.batch_size

    def extend(self, target: TargetView, num_pages: Sequence[int], most: int) -> None:
        """Compute the bounds of pages that were filled since the last call: at most `most` by a commit.

        `num_pages` are those that each row will read.
        """
        self.share_dense()
        before = self.pages.layout
        for index in self.sparse_layers:
            self.pages.reserve(index, self.cache.layers[index].keys)
        if self.pages.layout != before:
            self.forget()
        size = self.pages.page_size
        first, full = self.full, [length // size for length in self.cache.lengths.host]
        count = max(end - start for start, end in zip(first, full, strict=True))
        self.full, self._rows = full, [first, full, list(num_pages)]
        self._tables.clear()
        self.sizes = PageSizes(max(full), max(num_pages), size - 1 + self.room)
        if target.steps.captures:  # graphs serve several lengths
            pages = min(self.cache.key_layers[0].capacity // size, capacity_for(max(full)))
            self.sizes = PageSizes(pages, min(pages, capacity_for(max(num_pages))), self.sizes.tail)
        devices = {self.cache.layers[index].keys.device for index in self.sparse_layers}
        tables = [self.table(device) for device in devices]  # one copy in every iteration, not two in some
        if target.steps.captures and 0 < count <= most and len(devices) == 1:
            target.run(self.find_bounds, self, *tables, count=most, layout=self.layout)
        elif count:
            self.find_bounds(*tables, count=count)

    def find_bounds(self, *tables: torch.Tensor, count: int, layout: Any = None) -> tuple[()]:
        """Compute the bounds of at most `count` new pages of each row, by the [`PagedCache.table`] of each device."""
        numbers = {table.device: table for table in tables}
        for index in self.sparse_layers:
            keys = self.cache.layers[index].keys
            first, full, _ = numbers[keys.device]
            self.pages.update(index, keys, first, full, count)
        return ()

    def context(self, target: TargetView, positions: torch.Tensor) -> StepContext:
        _, full, chosen = self.table(positions.device)
        lengths = self.dense_used.lengths.plus(1)
        return PageContext(lengths, positions, full, chosen, self.pages, self.sizes, windows=target.windows)

    def table(self, device: torch.device) -> torch.Tensor:
        """Return first new page, number of full pages and number of pages to read of every row, `(3, B)`."""
        if device not in self._tables:
            self._tables[device] = on_device(self._rows, device)
        return self._tables[device]


@dataclass(eq=False)
class PagedChain(Chain):
    """A chain in one graph, which depends on the places of `bounds`."""

    pages: KeyPages
    sizes: PageSizes
    bounds: list[tuple[torch.Tensor, torch.Tensor]]
    layout: tuple[int, ...]

    @property
    def key(self) -> tuple:
        return *super().key, self.sizes, self.layout

    def context(self, ends: Sequence[SeqLens], positions: torch.Tensor, *inputs: torch.Tensor) -> StepContext:
        _, full, chosen = inputs[0]
        return PageContext(ends[0], positions, full, chosen, self.pages, self.sizes, windows=self.steps.windows)


class QuestDrafter(SelfDrafter):
    """Draft chains with the target itself on the pages that fit the query of each step."""

    steps_compile = False  # a step would be compiled anew for other numbers of pages

    def __init__(self, binding: Binding, draft: Any):
        super().__init__(binding, draft)
        self.page_size = draft.setting("page_size")
        dense_layers = binding.target.sliding_layers | frozenset(range(draft.setting("num_dense_layers")))
        shape = (binding.cache, dense_layers, self.page_size, self.max_depth)
        self.sparse: PagedCache = binding.part((PagedCache, *shape), lambda: PagedCache(*shape))
        self.sparse.forget()

    def num_selected(self, length: int) -> int:
        return self.num_pages(length) * self.page_size

    def num_pages(self, length: int) -> int:
        """Return how many pages of a prefix of this length to read, at least those of the sinks."""
        within = super().num_selected(length) // self.page_size
        return min(length // self.page_size, max(within, -(-SINK_TOKENS // self.page_size)))

    def resume(self, texts: Sequence[torch.Tensor], verification: Verification) -> None:
        """Compute the bounds of all pages, since plain steps may have computed the keys again."""
        self.sparse.forget()
        self.observe(verification)

    def take(self, row: int, other: Any) -> None:
        """Compute the bounds of all pages of a row."""
        self.sparse.full[row] = 0
        self._extend()

    def observe(self, verification: Verification) -> None:
        """Compute the bounds of the pages that this commit filled."""
        self._extend()

    def _extend(self) -> None:
        cache = self.binding.cache
        num_pages = list(map(self.num_pages, cache.lengths.host))
        most = 1 + max(self.max_depth, self.ngram_depth) // self.page_size
        self.sparse.extend(self.binding.target, num_pages, most)

    def chain(self, root: torch.Tensor, steps: ChainSteps) -> tuple[Chain, Any, tuple[torch.Tensor, ...]]:
        paged, cache = self.sparse, self.binding.cache
        paged.share_dense()
        chain = PagedChain(steps, paged.pages, paged.sizes, list(paged.pages.bounds.values()), paged.layout)
        return chain, cache, (cache.lengths.on(root.device), paged.table(root.device))
