# Published with a draft by hf_longspec, Apache-2.0.
"""The queries of a verification, kept until it is known which node counts: only then are cache entries scored.

Scoring every node in advance, as [`ScoreCapture`] does with `each_row`, computes and stores N scores per entry, of
which one is used.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from .attention_backends_scores import key_products


@dataclass
class QueryCapture:
    """Collects every layer's queries, and views of its keys: the capture of a [`TreeContext`].

    For layers that attend to their cache itself. Keys that are made for the call, as under MLA, would be kept alive.

    Args:
        skipped_layers (`frozenset[int]`): Layers without scores.
        seen (`dict[int, tuple[torch.Tensor, torch.Tensor]]`): Filled by the forward: per layer the queries
            `(B, H, N, D)` and the keys `(B, K, S, D)`.
    """

    skipped_layers: frozenset[int] = frozenset()
    seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def collect(self, layer_idx: int, query: torch.Tensor, key: torch.Tensor, lse: torch.Tensor, **where: Any) -> None:
        """Keep what one layer saw."""
        if layer_idx not in self.skipped_layers:
            self.seen[layer_idx] = query, key

    def of_node(self, layer_idx: int, row: int, node: torch.Tensor, length: int) -> torch.Tensor:
        """Scores of the first `length` entries of a row by the query of one node.

        The score of an entry is the sum of `q . k` over the query heads that share a KV head: TokenSwift, Eq. 2.

        Args:
            node (`torch.LongTensor` of shape `(1,)`): On any device.

        Returns:
            `torch.Tensor` of shape `(K, length)`, float32.
        """
        query, key = self.seen[layer_idx]
        queries = query[row].index_select(1, node.to(query.device)).float()  # [H, 1, D]
        summed = queries.unflatten(0, (key.shape[1], -1)).sum(1)
        return key_products(summed[None], key[row : row + 1, :, :length])[0, :, 0]
