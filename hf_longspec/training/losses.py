"""Losses of a draft through its target's frozen head, without the logits of a whole row.

The gradient with respect to the hidden states is computed with the loss, chunk by chunk, so that a chunk's logits are
made once and live as long as the chunk.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

Head = Callable[[torch.Tensor], torch.Tensor]
# Logits of some places to the loss of each, its gradient with respect to the logits, and how many tokens are more
# likely than the wanted one.
Score = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
# From a chunk of the places to their score: what all levels are compared with is computed once.
Objective = Callable[[slice, torch.dtype], Score]


def head_loss(
    hidden: torch.Tensor, head: Head, objective: Objective, chunk_size: int, counts: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of an objective over places, through the head, for one or several levels of hidden states.

    Args:
        hidden (`torch.Tensor` of shape `(levels, n, hidden)`): Hidden states of the draft. Gradients reach them alone.
        head (`Callable`): `(m, hidden)` to logits `(m, vocab)`.
        objective (`Callable`): [`cross_entropy`] or [`forward_kl`], bound to what it compares with.
        chunk_size (`int`): Places whose logits exist at once.
        counts (`torch.BoolTensor` of shape `(levels, n)`, *optional*): The places that add to the sum; by default all.

    Returns:
        The sums `(levels,)`, and a `torch.LongTensor` of shape `(levels, n)`: how many tokens the draft takes for more
        likely than the wanted one, 0 for a hit.
    """
    if counts is None:
        counts = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
    totals, ranks = _HeadLoss.apply(hidden, head, objective, chunk_size, counts)
    return totals, ranks


def cross_entropy(labels: torch.Tensor) -> Objective:
    """Cross-entropy of tokens `(n,)`."""

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
    """Kullback-Leibler divergence from the target's distribution to the draft's.

    Args:
        target_hidden (`torch.Tensor` of shape `(n, hidden)`): Hidden states of the target at the same places.
        head (`Callable`): From those to the target's logits.
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
    """Scalar product of each row of `(m, vocab)` with its row of the other, without their product in between."""
    return torch.bmm(a[:, None], b[:, :, None])[:, 0, 0]


def rank(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """How many tokens come before those in `wanted` `(m, 1)` by their logits `(m, vocab)`; of equals, the lower id.

    >>> rank(torch.tensor([[1.0, 3.0, 2.0, 2.0]]), torch.tensor([[3]])).tolist()
    [2]
    """
    own = logits.gather(1, wanted)
    ids = torch.arange(logits.shape[1], device=logits.device)
    return torch.count_nonzero((logits > own) | ((logits == own) & (ids < wanted)), dim=1)


class _HeadLoss(torch.autograd.Function):
    """Computes the gradient in the forward pass and hands it out in the backward pass."""

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
