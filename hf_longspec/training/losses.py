"""Losses of a draft through its target's frozen head, without the logits of a whole row.

The gradient with respect to the hidden states is computed with the loss, chunk by chunk, so that a chunk's logits are
made once and live as long as the chunk.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

Head = Callable[[torch.Tensor], torch.Tensor]
# Logits of a chunk and its place, to the loss of each place, its gradient with respect to the logits, and whether the
# most likely token is the wanted one.
Objective = Callable[[torch.Tensor, slice], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def head_loss(
    hidden: torch.Tensor, head: Head, objective: Objective, chunk_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of an objective over places, through the head.

    Args:
        hidden (`torch.Tensor` of shape `(n, hidden)`): Hidden states of the draft. Gradients reach them alone.
        head (`Callable`): `(m, hidden)` to logits `(m, vocab)`.
        objective (`Callable`): [`cross_entropy`] or [`forward_kl`], bound to what it compares with.
        chunk_size (`int`): Places whose logits exist at once.

    Returns:
        The sum, and a `torch.BoolTensor` of shape `(n,)`: whether the draft's most likely token is the wanted one.
    """
    total, hits = _HeadLoss.apply(hidden, head, objective, chunk_size)
    return total, hits


def cross_entropy(labels: torch.Tensor) -> Objective:
    """Cross-entropy of tokens `(n,)`."""

    def objective(logits: torch.Tensor, chunk: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        wanted = labels[chunk, None]
        log_draft = logits.log_softmax(-1)
        loss = -log_draft.gather(1, wanted)
        gradient = log_draft.exp_()
        gradient.scatter_add_(1, wanted, gradient.new_full(wanted.shape, -1.0))
        return loss.sum(), gradient, logits.argmax(-1) == wanted[:, 0]

    return objective


def forward_kl(target_hidden: torch.Tensor, head: Head) -> Objective:
    """Kullback-Leibler divergence from the target's distribution to the draft's.

    Args:
        target_hidden (`torch.Tensor` of shape `(n, hidden)`): Final hidden states of the target at the same places.
        head (`Callable`): The target's head.
    """

    def objective(logits: torch.Tensor, chunk: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        target_logits = head(target_hidden[chunk]).to(logits.dtype)
        hits = logits.argmax(-1) == target_logits.argmax(-1)
        log_target, log_draft = target_logits.log_softmax(-1), logits.log_softmax(-1)
        target = log_target.exp()
        loss = (target * (log_target - log_draft)).sum()
        return loss, log_draft.exp_().sub_(target), hits

    return objective


class _HeadLoss(torch.autograd.Function):
    """Computes the gradient in the forward pass and hands it out in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, head: Head, objective: Objective, chunk_size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        hits = torch.zeros(len(hidden), dtype=torch.bool, device=hidden.device)
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for start in range(0, len(hidden), chunk_size):
            chunk = slice(start, start + chunk_size)
            with torch.set_grad_enabled(gradient is not None):
                leaf = hidden[chunk].detach().requires_grad_(gradient is not None)
                logits = head(leaf)
            loss, slope, hits[chunk] = objective(logits.detach().to(wide), chunk)
            total += loss
            if gradient is not None:
                (gradient[chunk],) = torch.autograd.grad(logits, leaf, slope.to(logits.dtype))
        ctx.gradient = gradient
        ctx.mark_non_differentiable(hits)
        return total, hits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        gradient = ctx.gradient
        return (None if gradient is None else gradient * slope.to(gradient.dtype)), None, None, None
