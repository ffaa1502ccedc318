"""Which prefix entries matter: scores that a verification collects.

SpecAttn (Vegas in its later version, https://huggingface.co/papers/2602.07223), Eq. 3: the score of entry i in a layer
is the mean over some query rows and over all heads of q . k_i. That is linear in q. So the queries of the wanted rows
are summed first, one product per KV head gives the score, and no logits of single heads or rows are written.

A backend with `attention_with_scores` computes scores while it reads the keys. For other backends, rows and scores,
[`ScoreCapture`] makes a second pass. [`QueryCapture`] keeps the queries until the accepted node is known.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from .lengths import SeqLens

GRANULARITIES = ("layer", "kv_head")
# Keys cast at a time on a CPU: 4 MB in float32, which stays in its cache.
CAST_BLOCK = 2**20


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
        """Take one layer's `(B, 1 or K, S)`, or with `each_row` `(B, 1 or K, N, S)`; S at least the longest prefix."""
        if self.granularity == "layer" and self.sum_ranks is not None:
            scores = self.sum_ranks(scores)
        self.scores[layer_idx] = scores

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
            # products in half types are slower than casts on x86 without AVX-512
            is_emulated = prefix.is_cpu and prefix.itemsize < 4 and torch.backends.cpu.get_cpu_capability() == "AVX2"
            scores = key_products(summed, prefix) if is_emulated else summed @ prefix.transpose(2, 3)
        scores = scores.float()
        if self.granularity == "layer":
            scores = scores.sum(1, keepdim=True)
        self.keep_scores(layer_idx, scores if self.rows == "each_row" else scores.squeeze(2))

    def of_node(self, layer_idx: int, row: int, node: torch.Tensor, length: int) -> torch.Tensor:
        """With `each_row`: return `(1 or K, length)`, scores of a row's first entries by one node, given as `(1,)`."""
        scores = self.scores[layer_idx][row]
        return scores.index_select(1, node.to(scores.device)).squeeze(1)[:, :length]

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
