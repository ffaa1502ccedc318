# Published with a draft by hf_longspec, Apache-2.0.
"""Which prefix entries mattered to a verification: scores collected while the full attention runs.

SpecAttn (Vegas in its later version, https://huggingface.co/papers/2602.07223), Eq. 3: the score of entry i in a layer
is the mean over some query rows and over all heads of q . k_i. That is linear in q, so the queries of the wanted rows
are summed first and one product per KV head gives the score; no logits of single heads or rows are written.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from .attention_backends_score_rows import ScoreRows, boundary_rows

ROWS = ("two_rows", "all_rows", "each_row")
SCORES = ("logits", "weights", "quest")
GRANULARITIES = ("layer", "kv_head")
QUEST_PAGE = 16
# Keys cast at a time on a CPU: 4 MB in float32, which stays in its cache.
CAST_BLOCK = 2**20


@dataclass
class ScoreCapture:
    """Collects, per layer, one score for every committed entry.

    The capture of a [`TreeContext`]. From a backend that writes scores while it attends it takes those
    (`score_rows`, `keep_scores`); from others it computes them from queries and keys (`collect`).

    Args:
        last_node (`torch.LongTensor` of shape `(B,)`): Index of every row's last node.
        rows (`str`): Queries that count: `two_rows` (node 0 and the last node), `all_rows`, or `each_row` (one set of
            scores for every node, to choose from once the acceptance is known).
        score (`str`): `logits` (Eq. 3), `weights` (attention probabilities, comparable between heads), or `quest`
            (upper bound of the logits within pages of 16 entries, https://huggingface.co/papers/2406.10774).
        granularity (`str`): One score per `layer`, or one per `kv_head`.
        skipped_layers (`frozenset[int]`): Layers without scores.
        sum_ranks (`Callable`, *optional*): Where the heads of a layer are divided among processes: sums a tensor over
            them. Scores per KV head stay where their head is.
        scores (`dict[int, torch.Tensor]`): Filled by the forward: `(B, 1 or K, S)` per layer, with `each_row`
            `(B, 1 or K, N, S)`; S is the longest prefix, entries beyond a row's own prefix are junk.
    """

    last_node: torch.Tensor
    rows: str = "two_rows"
    score: str = "logits"
    granularity: str = "layer"
    skipped_layers: frozenset[int] = frozenset()
    sum_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None
    scores: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def score_rows(self) -> ScoreRows | None:
        """What a backend may write in place of `collect`; None for scores that take a pass of their own."""
        if self.rows != "two_rows" or self.score == "quest":
            return None
        return ScoreRows(self.score == "weights", self.granularity == "layer", self.skipped_layers)

    def keep_scores(self, layer_idx: int, scores: torch.Tensor, host_lengths: tuple[int, ...]) -> None:
        """Take one layer's `(B, 1 or K, S)`, S at least the longest prefix."""
        self._keep(layer_idx, scores[..., : max(host_lengths)])

    def collect(
        self,
        layer_idx: int,
        query: torch.Tensor,
        key: torch.Tensor,
        lse: torch.Tensor,
        *,
        lengths: torch.Tensor,
        host_lengths: tuple[int, ...],
        scaling: float,
        softcap: float | None = None,
    ) -> None:
        """Score one layer; `query` is `(B, H, N, D)`, `key` `(B, K, S, D)`, `lse` `(B, H, N)` of all attention."""
        if layer_idx in self.skipped_layers:
            return
        prefix = key[:, :, : max(host_lengths)]
        grouped = query.unflatten(1, (key.shape[1], -1))  # [B, K, G, N, D]
        if self.score == "weights":
            scores = self._weights(grouped, prefix, lse.unflatten(1, (key.shape[1], -1)), scaling, softcap)
        elif self.score == "quest":
            scores = self._quest(grouped, prefix)
        else:
            summed = self._sum_of_rows(grouped).sum(2)  # [B, K, R, D]
            scores = key_products(summed, prefix) if _emulated(prefix) else summed @ prefix.transpose(2, 3)
        scores = scores.float()
        if self.granularity == "layer":
            scores = scores.sum(1, keepdim=True)
        self._keep(layer_idx, scores if self.rows == "each_row" else scores.squeeze(2))

    def of_node(self, layer_idx: int, row: int, node: torch.Tensor, length: int) -> torch.Tensor:
        """With `each_row`: scores `(1 or K, length)` of a row's first entries by one node, given as `(1,)`."""
        scores = self.scores[layer_idx][row]
        return scores.index_select(1, node.to(scores.device)).squeeze(1)[:, :length]

    def _keep(self, layer_idx: int, scores: torch.Tensor) -> None:
        if self.granularity == "layer" and self.sum_ranks is not None:
            scores = self.sum_ranks(scores)
        self.scores[layer_idx] = scores

    def _sum_of_rows(self, values: torch.Tensor) -> torch.Tensor:
        """`(B, K, G, N, X)` to `(B, K, G, R, X)`: the rows that count summed up, or all of them apart."""
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

    def _quest(self, grouped: torch.Tensor, prefix: torch.Tensor) -> torch.Tensor:
        """Sum over heads and rows of the highest logit that any key inside the page's bounds could have."""
        length = prefix.shape[2]
        pages = torch.arange(length, device=prefix.device) // QUEST_PAGE
        shape = (*prefix.shape[:2], (length + QUEST_PAGE - 1) // QUEST_PAGE, prefix.shape[3])
        index = pages[None, None, :, None].expand_as(prefix)
        highest = prefix.new_empty(shape).scatter_reduce(2, index, prefix, "amax", include_self=False)
        lowest = prefix.new_empty(shape).scatter_reduce(2, index, prefix, "amin", include_self=False)
        positive = self._sum_of_rows(grouped.clamp_min(0)).sum(2)
        negative = self._sum_of_rows(grouped.clamp_max(0)).sum(2)
        bounds = positive @ highest.transpose(2, 3) + negative @ lowest.transpose(2, 3)  # [B, K, R, pages]
        return bounds.index_select(-1, pages)


def _emulated(keys: torch.Tensor) -> bool:
    """Whether products in the keys' dtype are slower than casts: half types on x86 processors without AVX-512."""
    return keys.device.type == "cpu" and keys.itemsize < 4 and torch.backends.cpu.get_cpu_capability() == "AVX2"


def key_products(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """`q . k` in float32, of `(B, K, R, D)` and `(B, K, S, D)`: `(B, K, R, S)`."""
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
