"""Quest: the target drafts for itself, and every layer reads the pages of its cache that fit the query of the step.

A draft outside of the package, which shows one that runs the target on a part of its cache. Import this file before
`QuestDraftModel.from_target(target)`, or before a saved draft is loaded.

Sources: the selection is that of Quest, https://huggingface.co/papers/2406.10774, and MagicDec drafts with it,
https://huggingface.co/papers/2408.11049.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.nn.functional import pad

import hf_longspec
from hf_longspec.attention_backends.contexts import LayerAttention, StepContext
from hf_longspec.attention_backends.lengths import on_device
from hf_longspec.attention_backends.registry import AttentionState
from hf_longspec.generation.target import TargetView
from hf_longspec.modeling.settings import Setting
from hf_longspec.modeling.shared.self_drafts import SelfDrafter, SelfDraftModel
from hf_longspec.modeling.shared.sparse_caches import SINK_TOKENS, CompactCache


class QuestConfig(hf_longspec.DraftConfig):
    model_type = "longspec_quest"


class QuestDraftModel(SelfDraftModel):
    """Draft with the target model itself on the pages of its cache that fit the query of every step.

    ```python
    draft = QuestDraftModel.from_target(target, num_assistant_tokens=6, sparse_ratio=0.1)
    target.generate(**inputs, assistant_model=draft)
    ```
    """

    config_class = QuestConfig
    settings: ClassVar[dict[str, Any]] = {
        "page_size": Setting(16, "Tokens of a page.", int),
        "num_dense_layers": Setting(2, "Number of first layers that read the whole prefix.", int, least=0),
    }

    def make_drafter(self, binding: hf_longspec.Binding) -> "QuestDrafter":
        return QuestDrafter(binding, self)

    def check_settings(self, target: TargetView) -> None:
        super().check_settings(target)
        if target.has_latent_cache:
            raise ValueError(
                "this target caches one latent for all heads (MLA) and computes the keys from it in every step, so "
                "there are no pages of keys to choose from. Use SpecAttnDraftModel, or another draft."
            )


class QuestDrafter(SelfDrafter):
    """Draft chains with the target itself. Its steps are not captured: the number of pages differs between them."""

    steps_have_one_shape = False

    def __init__(self, binding: hf_longspec.Binding, draft: QuestDraftModel):
        super().__init__(binding, draft)
        whole_layers = binding.target.sliding_layers | frozenset(range(draft.setting("num_dense_layers")))
        self.sparse = PagedCache(binding.cache, whole_layers, draft.setting("page_size"), self.num_selected)

    def resume(self, texts: Sequence[torch.Tensor], verification: hf_longspec.Verification) -> None:
        """Compute the bounds of all pages, since plain steps may have computed the keys again."""
        self.sparse.full = [0] * len(texts)
        self.observe(verification)

    def take(self, row: int, other: Any) -> None:
        """Compute the bounds of all pages of a row."""
        self.sparse.full[row] = 0
        self.sparse.find_bounds()

    def observe(self, verification: hf_longspec.Verification) -> None:
        """Compute the bounds of the pages that this commit filled."""
        self.sparse.find_bounds()

    def propose(self, root: torch.Tensor) -> hf_longspec.DraftTree:
        self.sparse.share_dense()  # drafted tokens follow the committed ones, which the next verification overwrites
        return super().propose(root)


class PagedCache(CompactCache):
    """The target's own cache, as drafting steps read it: by pages, with drafted tokens after the committed ones.

    `bounds` are the lowest and the highest value of every channel of the keys of each page, `(B, K, P, D)`, by layer.

    Args:
        cache ([`SpeculativeCache`]): The target's cache.
        whole_layers (`frozenset[int]`): Layers that read all entries.
        page_size (`int`): Number of entries of a page.
        num_selected (`Callable`): How many of so many committed tokens a step may read.
    """

    def __init__(self, cache: Any, whole_layers: frozenset[int], page_size: int, num_selected: Any):
        super().__init__(cache, frozenset(range(len(cache.layers))))  # no layer has a copy of its own
        self.whole_layers, self.page_size, self.num_selected = whole_layers, page_size, num_selected
        self.num_sink_pages = -(-SINK_TOKENS // page_size)
        self.bounds: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.full = [0] * cache.batch_size  # number of pages of each row whose bounds are known

    @property
    def sparse_layers(self) -> list[int]:
        others = sorted(self.keyed_layers - self.whole_layers)
        return [index for index in others if self.cache.layers[index].is_initialized]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for pair in self.bounds.values() for x in pair) + sum(part.nbytes for part in self.parts)

    def find_bounds(self) -> None:
        """Compute the bounds of the pages that were filled since the last call."""
        size, full = self.page_size, [length // self.page_size for length in self.cache.lengths.host]
        for index in self.sparse_layers:
            keys, known = self.cache.layers[index].keys, self.full
            shape = (*keys.shape[:2], keys.shape[2] // size, keys.shape[3])
            if index not in self.bounds or self.bounds[index][0].shape != shape:
                self.bounds[index] = keys.new_zeros(shape), keys.new_zeros(shape)
                known = [0] * len(full)
            lowest, highest = self.bounds[index]
            for row, (first, end) in enumerate(zip(known, full, strict=True)):
                if first < end:
                    pages = keys[row, :, first * size : end * size].unflatten(1, (-1, size))
                    lowest[row, :, first:end], highest[row, :, first:end] = pages.amin(2), pages.amax(2)
        self.full = full

    def num_pages(self, length: int) -> int:
        """Return how many pages of a prefix of this length to read, at least those of the sinks."""
        within = self.num_selected(length) // self.page_size
        return min(length // self.page_size, max(within, self.num_sink_pages))

    def context(self, target: TargetView, positions: torch.Tensor) -> StepContext:
        return PageContext(self.dense_used.lengths.plus(1), positions, self, windows=target.windows)

    def slots(self, index: int, query: torch.Tensor, ends: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the slots `(B, K, T)` that the queries `(B, H, 1, D)` of a layer read, and count them, `(B,)`.

        They are those of the pages with the largest bounds, the first ones among them, and all slots after the last
        full page and before `ends[b]`.
        """
        size, prefixes = self.page_size, self.cache.lengths.host
        num_pages = list(map(self.num_pages, prefixes))
        counts = [end - (full - n) * size for end, full, n in zip(ends, self.full, num_pages, strict=True)]
        numbers = on_device([self.full, num_pages, ends, counts], query.device)
        full, chosen, end, count = numbers[..., None, None]  # [B, 1, 1]
        scores = page_bounds(query, *(part[:, :, : max(self.full)] for part in self.bounds[index]))
        scores[..., : self.num_sink_pages] = torch.inf
        hidden = torch.arange(scores.shape[2], device=query.device) >= full
        best = scores.masked_fill(hidden, -torch.inf).topk(max(num_pages)).indices
        paged = (best[..., None] * size + torch.arange(size, device=query.device)).flatten(2)
        places = torch.arange(max(counts), device=query.device)
        tail = torch.minimum(full * size + (places - chosen * size).clamp_min(0), end - 1)
        return torch.where(places < chosen * size, pad(paged, (0, max(counts) - paged.shape[2])), tail), count[:, 0, 0]


@dataclass
class PageContext(StepContext):
    """One drafting step, as the attention layers see it. `lengths` includes the query's own slot."""

    cache: PagedCache

    def state(self, layer: LayerAttention) -> AttentionState:
        bounds = self.cache.bounds.get(layer.layer_idx)
        # jetmoe repeats keys after it has cached them, in an order of its own
        if bounds is None or bounds[0].shape[1] != layer.key.shape[1]:
            return layer.with_sinks(layer.attend_to_prefix(self.lengths, self.positions))
        slots, counts = self.cache.slots(layer.layer_idx, layer.query, self.lengths.host)
        read = layer.backend.sparse_attention(layer.query, layer.key, layer.value, slots, counts, **layer.options)
        return layer.with_sinks(read)


def page_bounds(query: torch.Tensor, lowest: torch.Tensor, highest: torch.Tensor) -> torch.Tensor:
    """Return an upper bound `(B, K, P)` of `q . k` over the keys of every page and the queries that share a KV head.

    Queries are `(B, H, 1, D)`, the lowest and the highest value of every channel of every page `(B, K, P, D)`.

    The bound of Quest (section 3.3): every channel adds the larger one of its products with the two extremes. A group
    of query heads reads the same pages, so their largest bound counts.
    """
    grouped = query.float().unflatten(1, (lowest.shape[1], -1)).flatten(2, 3)  # [B, K, G, D]
    low, high = (part.float().transpose(2, 3) for part in (lowest, highest))
    return (grouped.clamp_min(0) @ high + grouped.clamp_max(0) @ low).amax(2)


hf_longspec.register_draft(QuestConfig, QuestDraftModel)
