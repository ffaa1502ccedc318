"""The queries of a verification, kept until it is known which node counts: only then are cache entries scored.

Scoring every node in advance, as [`ScoreCapture`] does with `each_row`, computes and stores N scores per entry, of which
one is used.
"""

from dataclasses import dataclass, field

import torch

from .scores import key_products


@dataclass
class LayerQueries:
    """What one layer's attention saw: queries `(B, H, N, D)`, keys `(B, K, S, D)`, log-sum-exp `(B, H, N)`."""

    query: torch.Tensor
    key: torch.Tensor
    lse: torch.Tensor
    scaling: float
    softcap: float | None


@dataclass
class QueryCapture:
    """Collects every layer's queries, and views of its keys: the capture of a [`TreeContext`].

    For layers that attend to their cache itself. Keys that are computed for the call, as under MLA, would be kept alive.

    Args:
        score (`str`): `logits` (sums of `q . k` over the query heads of a KV head) or `weights` (sums of attention
            probabilities).
        skipped_layers (`frozenset[int]`): Layers without scores.
        layers (`dict[int, LayerQueries]`): Filled by the forward.
    """

    score: str = "logits"
    skipped_layers: frozenset[int] = frozenset()
    layers: dict[int, LayerQueries] = field(default_factory=dict)

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
        """Keep what one layer saw; shapes are those of [`LayerQueries`]."""
        if layer_idx not in self.skipped_layers:
            self.layers[layer_idx] = LayerQueries(query, key, lse, scaling, softcap)

    def of_node(self, layer_idx: int, row: int, node: torch.Tensor, length: int) -> torch.Tensor:
        """Scores `(K, length)` of the first `length` entries of a row by the query of one node, given as `(1,)`."""
        seen = self.layers[layer_idx]
        keys = seen.key[row, :, :length][None]
        node = node.to(keys.device)
        query = seen.query[row].index_select(1, node).squeeze(1).float().unflatten(0, (keys.shape[1], -1))  # [K, G, D]
        if self.score == "logits":
            return key_products(query.sum(1, keepdim=True)[None], keys)[0, :, 0]
        logits = key_products(query[None], keys)[0] * seen.scaling  # [K, G, length]
        if seen.softcap is not None:
            logits = seen.softcap * torch.tanh(logits / seen.softcap)
        lse = seen.lse[row].index_select(1, node).float().view(keys.shape[1], -1, 1)
        return (logits - lse).exp_().sum(1)
