"""Which prefix entries matter: scores that a verification collects, and bounds of the scores of whole pages.

SpecAttn (Vegas in its later version, https://huggingface.co/papers/2602.07223), Eq. 3: the score of entry i in a layer
is the mean over some query rows and over all heads of q . k_i. That is linear in q. So the queries of the wanted rows
are summed first, one product per KV head gives the score, and no logits of single heads or rows are written.

Scores come from one of three places:

- attention itself, while it reads the keys: a backend with `attention_with_scores` computes those of node 0 and of the
  last node, as [`ScoreRows`] describes;
- a second pass over the keys: [`ScoreCapture`], for all other backends, rows and scores;
- a pass after the step, once the accepted node is known: [`QueryCapture`] keeps the queries until then.

Quest, https://huggingface.co/papers/2406.10774: every layer chooses by the query of the step itself. The prefix is
divided into pages. [`KeyPages`] has the lowest and the highest value of every channel of the keys in a page, which
bound the scores of the page's entries for any query. [`PageContext`] is the context of a step that reads the pages with
the largest bounds, where they lie in the cache.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch

from .contexts import GraphStep, LayerAttention, StepContext
from .lengths import SeqLens
from .registry import AttentionState, merge_attention_states

GRANULARITIES = ("layer", "kv_head")
# Keys cast at a time on a CPU: 4 MB in float32, which stays in its cache.
CAST_BLOCK = 2**20
# Pages whose keys are gathered at a time, so that a long prefix is not copied as a whole.
PAGES_AT_ONCE = 256


class ScoreRows(NamedTuple):
    """Which scores a backend computes while it attends. Hashable, and the same for every step of a drafter."""

    weights: bool  # attention probabilities; otherwise the sums of `q . k`.
    per_layer: bool  # one score for all KV heads of a layer, rather than one each
    skipped_layers: frozenset[int]  # layers without scores


@dataclass
class ScoreCapture:
    """Collects, per layer, one score for every committed entry: the capture of a [`TreeContext`].

    A backend that computes scores while it attends delivers them (`score_rows`, `keep_scores`). For other backends they
    are computed from queries and keys (`collect`).
    """

    last_node: torch.Tensor  # `(B,)`: index of every row's last node
    # queries that count: `two_rows` (node 0 and the last node), `all_rows`, or `each_row` (one set of scores for
    # every node, to choose from once the acceptance is known)
    rows: str = "two_rows"
    score: str = "logits"  # `logits` (Eq. 3), or `weights` (attention probabilities, comparable between heads).
    granularity: str = "layer"  # one score per `layer`, or one per `kv_head`
    skipped_layers: frozenset[int] = frozenset()  # layers without scores
    # where the heads of a layer are divided among processes: sums a tensor over them. Scores per KV head stay where
    # their head is.
    sum_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None
    # filled by the forward: `(B, 1 or K, S)` per layer, with `each_row` `(B, 1 or K, N, S)`. S is at least the
    # longest prefix; entries after a row's own prefix are arbitrary.
    scores: dict[int, torch.Tensor] = field(default_factory=dict)
    is_replayed: bool = False  # whether the scores lie where a replayed graph writes them

    @property
    def score_rows(self) -> ScoreRows | None:
        """Return the scores that a backend may compute in place of `collect`; `None` if they need their own pass."""
        if self.rows != "two_rows":
            return None
        return ScoreRows(self.score == "weights", self.granularity == "layer", self.skipped_layers)

    def keep_scores(self, layer_idx: int, scores: torch.Tensor) -> None:
        """Take one layer's `(B, 1 or K, S)`, S at least the longest prefix."""
        self._keep(layer_idx, scores)

    def collect(
        self,
        layer_idx: int,
        query: torch.Tensor,
        key: torch.Tensor,
        lse: torch.Tensor,
        *,
        lengths: SeqLens,
        scaling: float,
        softcap: float | None = None,
    ) -> None:
        """Score one layer; `query` is `(B, H, N, D)`, `key` `(B, K, S, D)`, `lse` `(B, H, N)` of all attention."""
        if layer_idx in self.skipped_layers:
            return
        prefix = key[:, :, : lengths.longest]
        grouped = query.unflatten(1, (key.shape[1], -1))  # [B, K, G, N, D]
        if self.score == "weights":
            scores = self._weights(grouped, prefix, lse.unflatten(1, (key.shape[1], -1)), scaling, softcap)
        else:
            summed = self._sum_of_rows(grouped).sum(2)  # [B, K, R, D]
            scores = key_products(summed, prefix) if _emulated(prefix) else summed @ prefix.transpose(2, 3)
        scores = scores.float()
        if self.granularity == "layer":
            scores = scores.sum(1, keepdim=True)
        self._keep(layer_idx, scores if self.rows == "each_row" else scores.squeeze(2))

    def of_node(self, layer_idx: int, row: int, node: torch.Tensor, length: int) -> torch.Tensor:
        """With `each_row`: return `(1 or K, length)`, scores of a row's first entries by one node, given as `(1,)`."""
        scores = self.scores[layer_idx][row]
        return scores.index_select(1, node.to(scores.device)).squeeze(1)[:, :length]

    def _keep(self, layer_idx: int, scores: torch.Tensor) -> None:
        if self.granularity == "layer" and self.sum_ranks is not None:
            scores = self.sum_ranks(scores)
        self.scores[layer_idx] = scores

    def _sum_of_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Reduce `(B, K, G, N, X)` to `(B, K, G, R, X)`: the rows that count are summed, or all of them stay apart."""
        if self.rows == "each_row":
            return values
        if self.rows == "all_rows":
            nodes = torch.arange(values.shape[3], device=values.device)
            counted = nodes <= self.last_node.to(values.device)[:, None]
            return (values * counted[:, None, None, :, None]).sum(3, keepdim=True)
        return boundary_rows(values, self.last_node).sum(3, keepdim=True)

    def _weights(
        self, grouped: torch.Tensor, prefix: torch.Tensor, lse: torch.Tensor, scaling: float, softcap: float | None
    ) -> torch.Tensor:
        lse = lse.to(torch.float32)[..., None]
        if self.rows == "two_rows":
            grouped, lse = boundary_rows(grouped, self.last_node), boundary_rows(lse, self.last_node)
        # One matrix product per KV head: broadcasting the keys over the group would copy them (11.0 against 1.7 ms per
        # layer at 16K).
        rows = key_products(grouped.flatten(2, 3), prefix)
        # In place: each of these holds 4 * H * R bytes per entry. With a copy for every operation the scores of 32K
        # entries took 11.2 MB in 16 layers with H=8, now 5.1 MB, of 537 MB of keys and values.
        weights = rows.unflatten(2, grouped.shape[2:4]).mul_(scaling)  # [B, K, G, R, S]
        if softcap is not None:
            weights.div_(softcap).tanh_().mul_(softcap)
        weights.sub_(lse).exp_()
        if self.rows == "two_rows":
            return weights.sum((2, 3))[:, :, None]
        return self._sum_of_rows(weights).sum(2)


@dataclass
class QueryCapture:
    """Collects every layer's queries, and views of its keys, until the accepted node is known.

    The capture of a [`TreeContext`], like [`ScoreCapture`]. That one with `each_row` would compute and store N scores
    per entry, of which one is used. Only for layers that attend to their cache itself: keys that are made for the call,
    as under MLA, would be kept alive.
    """

    skipped_layers: frozenset[int] = frozenset()  # layers without scores
    # filled by the forward: per layer the queries `(B, H, N, D)` and the keys `(B, K, S, D)`
    inputs: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def collect(self, layer_idx: int, query: torch.Tensor, key: torch.Tensor, lse: torch.Tensor, **where: Any) -> None:
        """Keep the queries and keys of one layer."""
        if layer_idx not in self.skipped_layers:
            self.inputs[layer_idx] = query, key

    def of_node(self, layer_idx: int, row: int, node: torch.Tensor, length: int) -> torch.Tensor:
        """Return float32 scores `(K, length)` of the first entries of a row by the query of one node, given as `(1,)`.

        The score of an entry is the sum of `q . k` over the query heads that share a KV head: TokenSwift, Eq. 2
        (https://huggingface.co/papers/2502.18890).
        """
        query, key = self.inputs[layer_idx]
        queries = query[row].index_select(1, node.to(query.device)).float()  # [H, 1, D]
        summed = queries.unflatten(0, (key.shape[1], -1)).sum(1)
        return key_products(summed[None], key[row : row + 1, :, :length])[0, :, 0]


def boundary_rows(values: torch.Tensor, last_node: torch.Tensor) -> torch.Tensor:
    """Select node 0 and the last node: `(B, K, G, 2, X)` of `(B, K, G, N, X)`.

    A lone node counts twice, which ranks as if it counted once.
    """
    batch = torch.arange(values.shape[0], device=values.device)
    last = values[batch, :, :, last_node.to(values.device)]
    return torch.stack([values[:, :, :, 0], last], 3)


def key_products(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return `q . k` in float32, of `(B, K, R, D)` and `(B, K, S, D)`: `(B, K, R, S)`."""
    queries, length = queries.float(), keys.shape[2]
    if keys.dtype == torch.float32 or keys.device.type != "cpu" or keys.numel() <= CAST_BLOCK:
        return queries @ keys.float().transpose(2, 3)
    # Block by block: a float32 copy of a long prefix costs more in fresh memory than its product (59 against 9 ms per
    # layer at 16K with 8 KV heads of size 128).
    products = queries.new_empty(*queries.shape[:3], length)
    step = max(1, CAST_BLOCK * length // keys.numel())
    for start in range(0, length, step):
        block = slice(start, start + step)
        products[..., block] = queries @ keys[:, :, block].float().transpose(2, 3)
    return products


def _emulated(keys: torch.Tensor) -> bool:
    """Return whether products in the keys' dtype are slower than casts: half types on x86 without AVX-512."""
    return keys.device.type == "cpu" and keys.itemsize < 4 and torch.backends.cpu.get_cpu_capability() == "AVX2"


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
