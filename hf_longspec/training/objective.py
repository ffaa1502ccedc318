"""The loss of a batch, from the draft's hidden states to a sum for each of its levels."""

from collections.abc import Callable

import torch

from ..generation.target_ends import TargetEnds
from .liger import SAMPLED_PLACES, liger_cross_entropy
from .losses import cross_entropy, forward_kl, head_loss


class DraftObjective:
    """Sums the loss of hidden states over the places that predict a token, through the target's head.

    With the target's hidden states the loss is the divergence from the target's distribution, without them the
    cross-entropy of the labels, by Liger's kernel where that runs.

    Args:
        ends ([`TargetEnds`]): The target's head.
        chunk_size (`int`): Places whose logits exist at once.
        norm (`torch.nn.Module`, *optional*): What the target's hidden states still have to go through before the head.
    """

    def __init__(self, ends: TargetEnds, chunk_size: int, norm: torch.nn.Module | None = None):
        self.ends = ends
        self.chunk_size = chunk_size
        self.norm = norm

    def __call__(
        self,
        hidden: torch.Tensor,
        labels: torch.Tensor,
        counts: torch.Tensor | None = None,
        target_hidden: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, slice]:
        """The summed losses of a batch, and how good the draft is.

        Args:
            hidden (`torch.Tensor` of shape `(levels, n, hidden)`): What the draft has for the head at these places.
            labels (`torch.LongTensor` of shape `(n,)`): The text's tokens there.
            counts (`torch.BoolTensor` of shape `(levels, n)`, *optional*): The places that count; by default all.
            target_hidden (`torch.Tensor` of shape `(n, hidden)`, *optional*): The target's hidden states there.

        Returns:
            The sums `(levels,)`; for some of the places, how many tokens the draft takes for more likely than the
            wanted one, `(levels, m)`; and which places those are, all of them but with Liger's kernel.
        """
        if target_hidden is not None:
            objective = forward_kl(target_hidden, self._target_head)
        elif torch.is_grad_enabled() and (fused := liger_cross_entropy(self.ends, hidden)) is not None:
            return self._fused(fused, hidden, labels, counts)
        else:
            objective = cross_entropy(labels)
        totals, ranks = head_loss(hidden, self._head, objective, self.chunk_size, counts)
        return totals, ranks, slice(None)

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's logits, in the type of its head, whatever the draft is trained in."""
        return self.ends.head(hidden.to(self.ends.model.get_output_embeddings().weight.dtype))

    def _target_head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of the target's own hidden states."""
        return self._head(hidden if self.norm is None else self.norm(hidden))

    def _fused(
        self,
        fused: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        hidden: torch.Tensor,
        labels: torch.Tensor,
        counts: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, slice]:
        """By a kernel that gives no tokens: ranks come from a sample."""
        sample = slice(None, None, 1 + len(labels) // SAMPLED_PLACES)
        with torch.no_grad():
            few = hidden[:, sample]
            _, ranks = head_loss(few, self._head, cross_entropy(labels[sample]), self.chunk_size)
        places = [slice(None)] * len(hidden) if counts is None else list(counts)
        totals = [fused(states[own], labels[own]) for states, own in zip(hidden, places, strict=True)]
        return torch.stack(totals), ranks, sample
