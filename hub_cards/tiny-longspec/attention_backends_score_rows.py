# Published with a draft by hf_longspec, Apache-2.0.
"""Scores that attention itself writes while it reads the keys, in place of a second pass over them.

A backend that offers `scored_attention` returns, beside the attention, the products of two query rows with every key:
node 0 and the last node, the rows of SpecAttn's Eq. 3 (https://huggingface.co/papers/2602.07223). Other rows, and
bounds of pages, need the pass of scores.py.
"""

from typing import NamedTuple

import torch


class ScoreRows(NamedTuple):
    """Which scores are wanted. Hashable, and the same for every step of a drafter.

    Args:
        weights (`bool`): Attention probabilities; otherwise the sums of `q . k`.
        per_layer (`bool`): One score for all KV heads of a layer, rather than one each.
        skipped_layers (`frozenset[int]`): Layers without scores.
    """

    weights: bool
    per_layer: bool
    skipped_layers: frozenset[int]

    def of_entries(self, scores: torch.Tensor, lse: torch.Tensor, last_node: torch.Tensor) -> torch.Tensor:
        """One score per entry and head, or per entry.

        Args:
            scores (`torch.Tensor` of shape `(B, K, S)`, with `weights` `(B, K, 2, G, S)`): What the backend wrote.
            lse (`torch.Tensor` of shape `(B, H, N)`): Log-sum-exp of all attention.
            last_node (`torch.LongTensor` of shape `(B,)`): Index of every row's last node.

        Returns:
            `torch.Tensor` of shape `(B, 1 or K, S)`.
        """
        if self.weights:
            grouped = lse.unflatten(1, (scores.shape[1], -1))[..., None]  # [B, K, G, N, 1]
            # in place: with a copy for every operation these are the largest tensors of a step
            scores = scores.sub_(boundary_rows(grouped, last_node).transpose(2, 3)).exp_().sum((2, 3))
        return scores.sum(1, keepdim=True) if self.per_layer else scores


def boundary_rows(values: torch.Tensor, last_node: torch.Tensor) -> torch.Tensor:
    """Node 0 and the last node: `(B, K, G, 2, X)` of `(B, K, G, N, X)`.

    A lone node counts twice, which ranks as if it counted once.
    """
    batch = torch.arange(values.shape[0], device=values.device)
    last = values[batch, :, :, last_node.to(values.device)]
    return torch.stack([values[:, :, :, 0], last], 3)
