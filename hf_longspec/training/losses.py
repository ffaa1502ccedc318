"""Losses of a draft through its target's frozen head, without holding the logits of a whole row.

The gradient with respect to the hidden states is computed together with the loss, chunk by chunk. The logits of a chunk
are computed once and freed before the next chunk.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..generation.target_modules import LOGIT_DIVISORS, LOGIT_FACTORS, TargetEnds

try:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
except ImportError:
    LigerFusedLinearCrossEntropyLoss = None

Head = Callable[[torch.Tensor], torch.Tensor]
# Takes the logits of some tokens. Returns the loss of each, its gradient with respect to the logits, and the rank of
# the wanted token.
Score = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
# Takes a chunk and returns its score function. What all levels are compared with is computed once per chunk.
Objective = Callable[[slice, torch.dtype], Score]

# Liger's kernel returns no logits. Acceptance is then estimated from at most this many tokens of a batch.
SAMPLED_PLACES = 1024


class DraftObjective:
    """Sums the loss over the predicted tokens of a batch, from the draft's hidden states through the target's head.

    With the target's hidden states, the loss is the divergence from the target's distribution. Without them, it is the
    cross-entropy of the labels, computed by Liger's kernel where that runs.

    Args:
        ends ([`TargetEnds`]): The target's head.
        chunk_size (`int`): Tokens whose logits are in memory at a time.
        norm (`torch.nn.Module`, *optional*): Norm to apply to the target's hidden states before the head.
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
        """Return the summed losses of `n` tokens, and the ranks of the wanted tokens.

        Args:
            hidden (`torch.Tensor` of shape `(levels, n, hidden)`): Hidden states of the draft, input of the head.
            labels (`torch.LongTensor` of shape `(n,)`): The tokens of the text.
            counts (`torch.BoolTensor` of shape `(levels, n)`, *optional*): Tokens that count; by default all.
            target_hidden (`torch.Tensor` of shape `(n, hidden)`, *optional*): Hidden states of the target.

        Returns:
            The sums `(levels,)`. For `m` of the tokens, the number of tokens that the draft finds more likely than the
            wanted one, `(levels, m)`. A slice that selects these `m` tokens: all `n`, except with Liger's kernel.
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
        """Compute logits in the dtype of the target's head, whatever the dtype of the draft."""
        return self.ends.head(hidden.to(self.ends.model.get_output_embeddings().weight.dtype))

    def _target_head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the logits of the target's own hidden states."""
        return self._head(hidden if self.norm is None else self.norm(hidden))

    def _fused(
        self,
        fused: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        hidden: torch.Tensor,
        labels: torch.Tensor,
        counts: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, slice]:
        """Sum the losses with a kernel that returns no logits. The ranks are those of a sample."""
        sample = slice(None, None, 1 + len(labels) // SAMPLED_PLACES)
        with torch.no_grad():
            few = hidden[:, sample]
            _, ranks = head_loss(few, self._head, cross_entropy(labels[sample]), self.chunk_size)
        places = [slice(None)] * len(hidden) if counts is None else list(counts)
        totals = [fused(states[own], labels[own]) for states, own in zip(hidden, places, strict=True)]
        return torch.stack(totals), ranks, sample


def liger_cross_entropy(
    ends: TargetEnds, hidden: torch.Tensor
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """Return a function that sums the cross-entropy of labels `(n,)` given hidden states `(n, hidden)`, or `None`.

    Liger's kernels run on GPUs. They support a head that is one linear layer, optionally with a softcap.

    Source: Liger Kernel (https://github.com/linkedin/Liger-Kernel), `LigerFusedLinearCrossEntropyLoss`.
    """
    kind = ends.config.model_type
    if LigerFusedLinearCrossEntropyLoss is None or not hidden.is_cuda or kind in LOGIT_FACTORS | LOGIT_DIVISORS:
        return None
    head = ends.model.get_output_embeddings()
    softcap = getattr(ends.config, "final_logit_softcapping", None)
    fused = LigerFusedLinearCrossEntropyLoss(reduction="sum", softcap=softcap)

    def loss(states: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = fused(head.weight, states.to(head.weight.dtype), labels, getattr(head, "bias", None))
        return total.float()

    return loss


def head_loss(
    hidden: torch.Tensor, head: Head, objective: Objective, chunk_size: int, counts: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum an objective over tokens, through the head, for one or several levels of hidden states.

    Args:
        hidden (`torch.Tensor` of shape `(levels, n, hidden)`): Hidden states of the draft; only they get a gradient.
        head (`Callable`): Maps `(m, hidden)` to logits `(m, vocab)`.
        objective (`Callable`): [`cross_entropy`] or [`forward_kl`], bound to what the draft is compared with.
        chunk_size (`int`): Tokens whose logits are in memory at a time.
        counts (`torch.BoolTensor` of shape `(levels, n)`, *optional*): Tokens that add to the sum; by default all.

    Returns:
        The sums `(levels,)`, and a `torch.LongTensor` of shape `(levels, n)` with the number of tokens that the draft
        finds more likely than the wanted one. It is 0 for a hit.
    """
    if counts is None:
        counts = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
    totals, ranks = _HeadLoss.apply(hidden, head, objective, chunk_size, counts)
    return totals, ranks


def cross_entropy(labels: torch.Tensor) -> Objective:
    """Return the cross-entropy of tokens `(n,)` as an objective."""

    def objective(chunk: slice, dtype: torch.dtype) -> Score:
        wanted = labels[chunk, None]

        def score(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            log_draft = logits.log_softmax(-1)
            losses = -log_draft.gather(1, wanted)[:, 0]
            gradient = log_draft.exp_()
            gradient.scatter_add_(1, wanted, gradient.new_full(wanted.shape, -1.0))
            return losses, gradient, rank(logits, wanted)

        return score

    return objective


def forward_kl(target_hidden: torch.Tensor, head: Head) -> Objective:
    """Return the Kullback-Leibler divergence from the target's distribution to the draft's as an objective.

    Args:
        target_hidden (`torch.Tensor` of shape `(n, hidden)`): Hidden states of the target for the same tokens.
        head (`Callable`): Maps them to the target's logits.
    """

    def objective(chunk: slice, dtype: torch.dtype) -> Score:
        log_target = head(target_hidden[chunk]).to(dtype).log_softmax(-1)
        wanted, target = log_target.argmax(-1, keepdim=True), log_target.exp()
        negative_entropy = dot(target, log_target)

        def score(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            log_draft = logits.log_softmax(-1)
            losses = negative_entropy - dot(target, log_draft)
            return losses, log_draft.exp_().sub_(target), rank(logits, wanted)

        return score

    return objective


def dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the scalar products of the rows of two `(m, vocab)` tensors, without allocating their product."""
    return torch.bmm(a[:, None], b[:, :, None])[:, 0, 0]


def rank(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Count the tokens that come before `wanted` `(m, 1)` in the order of the logits `(m, vocab)`.

    Tokens with equal logits are ordered by their ids.

    >>> rank(torch.tensor([[1.0, 3.0, 2.0, 2.0]]), torch.tensor([[3]])).tolist()
    [2]
    """
    own = logits.gather(1, wanted)
    ids = torch.arange(logits.shape[1], device=logits.device)
    return torch.count_nonzero((logits > own) | ((logits == own) & (ids < wanted)), dim=1)


class _HeadLoss(torch.autograd.Function):
    """Computes the gradient in the forward pass and returns it in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, head: Head, objective: Objective, chunk_size: int, counts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        totals = torch.zeros(len(hidden), dtype=wide, device=hidden.device)
        ranks = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for start in range(0, hidden.shape[1], chunk_size):
            chunk = slice(start, start + chunk_size)
            score = objective(chunk, wide)
            for level, states in enumerate(hidden):
                with torch.set_grad_enabled(gradient is not None):
                    leaf = states[chunk].detach().requires_grad_(gradient is not None)
                    logits = head(leaf)
                losses, slope, ranks[level, chunk] = score(logits.detach().to(wide))
                weight = counts[level, chunk].to(wide)
                totals[level] += losses @ weight
                if gradient is not None:
                    slope = slope.mul_(weight[:, None]).to(logits.dtype)
                    (gradient[level, chunk],) = torch.autograd.grad(logits, leaf, slope)
        ctx.gradient = gradient
        ctx.mark_non_differentiable(ranks)
        return totals, ranks

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient = ctx.gradient
        if gradient is not None:
            gradient = gradient * slope[:, None, None].to(gradient.dtype)
        return gradient, None, None, None, None
