"""The loss of drafted tokens through a language-model head, chunk by chunk: logits of a row are never in memory.

The gradient with respect to the draft's states is computed together with the loss of a chunk. So the logits of a chunk
are computed once, and freed before the next one.
"""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
from torch.nn.functional import nll_loss
from torch.utils.checkpoint import checkpoint

from ..generation.target_modules import PartOfHead, TargetEnds

Head = Callable[[torch.Tensor], torch.Tensor]


class DraftLoss:
    """Sums the loss of drafted tokens: their divergence from the target's distribution, or the cross-entropy of a text.

    Args:
        loss (`str`): `"kl"` or `"ce"`, see [`DraftTrainingArguments`].
        ends ([`TargetEnds`]): Head of the target.
        chunk_size (`int`): Tokens whose logits are in memory at a time.
        norm (`torch.nn.Module`, *optional*): Final norm of the target, if `goals` are states before it.
        token_ids (`torch.LongTensor` of shape `(draft vocabulary,)`, *optional*): Tokens of a draft that has not all of
            the target's. The divergence is that over these tokens, and another token is never hit.
    """

    def __init__(
        self,
        loss: str,
        ends: TargetEnds,
        chunk_size: int,
        norm: torch.nn.Module | None = None,
        token_ids: torch.Tensor | None = None,
    ):
        self.loss, self.ends, self.chunk_size, self.token_ids = loss, ends, chunk_size, token_ids
        self.norm = norm or torch.nn.Identity()

    def __call__(
        self,
        states: torch.Tensor,
        goals: torch.Tensor,
        counts: torch.Tensor | None = None,
        head: Head | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summed losses of `n` tokens on each level, `(levels,)`, and which of them the draft hits.

        Args:
            states (`torch.Tensor` of shape `(levels, n, width)`): States of the draft, input of the head.
            goals (`torch.Tensor`): With `"ce"` the wanted tokens `(n,)`, which the draft has. With `"kl"` states of
                the target `(n, hidden)`, by which the most likely token is wanted.
            counts (`torch.BoolTensor` of shape `(levels, n)`, *optional*): Tokens that add to the loss; by default all.
            head (`Callable`, *optional*): Maps states `(m, width)` to logits `(m, draft vocabulary)`, by default as the
                target does. One that is passed may have weights to train: it is run again for their gradient.

        Returns:
            The sums, and `(levels, n)`, whether the wanted token is the most likely one of the draft.
        """
        counts = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device) if counts is None else counts
        run = self._chunk if head is None else partial(checkpoint, self._chunk, use_reentrant=False)
        size = self.chunk_size
        chunks = zip(states.split(size, 1), goals.split(size), counts.split(size, 1), strict=True)
        results = [run(*chunk, head) for chunk in chunks]
        totals, hits = zip(*results, strict=True)
        return torch.stack(totals).sum(0), torch.cat(hits, 1)

    def _chunk(
        self, states: torch.Tensor, goals: torch.Tensor, counts: torch.Tensor, head: Head | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sums `(levels,)` and hits `(levels, m)` of `m` tokens."""
        wanted, log_target = self._wanted(goals, torch.promote_types(states.dtype, torch.float32))
        scores = partial(score, wanted, log_target)
        levels = zip(states, counts, strict=True)
        if head is None:
            parts = [_at_once(partial(scores, counted, self._head), own) for own, counted in levels]
        else:
            parts = [scores(counted, head, own) for own, counted in levels]
        totals, hits = map(torch.stack, zip(*parts, strict=True))
        if log_target is not None and self.token_ids is not None:
            tokens = self.token_ids.to(wanted.device)[wanted]
            hits = hits & self._is_best(tokens, goals, hits.any(0))
        return totals, hits

    @torch.no_grad()
    def _wanted(self, goals: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the places of the wanted tokens in the draft's vocabulary, and with `"kl"` log-probabilities."""
        if self.loss == "kl":
            logits = self._part_of_head(self.norm(goals)).to(dtype)
            return logits.argmax(-1), logits.log_softmax(-1)
        if self.token_ids is None:
            return goals, None
        ids = self.token_ids.to(goals.device)
        places = torch.full((self.ends.config.vocab_size,), -1, device=ids.device)
        return places.scatter(0, ids, torch.arange(len(ids), device=ids.device))[goals], None

    @torch.no_grad()
    def _is_best(self, tokens: torch.Tensor, goals: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        """Return whether `tokens` `(m,)` are the target's most likely ones of all its tokens.

        The logits of all tokens are computed only at the places `where` `(m,)`. Elsewhere the result is False.
        """
        is_best = torch.zeros_like(where)
        is_best[where] = self.ends.head(self.norm(goals[where])).argmax(-1) == tokens[where]
        return is_best

    def _head(self, states: torch.Tensor) -> torch.Tensor:
        """Compute logits of the draft's tokens in the dtype of the target's head, whatever the dtype of the draft."""
        return self._part_of_head(states.to(self.ends.model.get_output_embeddings().weight.dtype))

    @cached_property
    def _part_of_head(self) -> Head:
        return self.ends.head if self.token_ids is None else PartOfHead(self.ends, self.token_ids)


def score(
    wanted: torch.Tensor,
    log_target: torch.Tensor | None,
    counts: torch.Tensor,
    head: Head,
    states: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed loss of states `(m, width)`, and whether the wanted places `(m,)` have the largest logits.

    The loss is the divergence from `log_target` `(m, vocab)`, or without it the cross-entropy of the wanted tokens.
    """
    logits = head(states).to(torch.promote_types(states.dtype, torch.float32))
    log_draft = logits.log_softmax(-1)
    if log_target is None:
        losses = nll_loss(log_draft, wanted, reduction="none")
    else:
        losses = (log_target.exp() * (log_target - log_draft)).sum(-1)  # on a CPU half the time of kl_div
    return losses @ counts.to(losses.dtype), logits.argmax(-1) == wanted


def _at_once(function: Callable[..., Any], states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a sum and more of a function of states, with the gradient of the sum, whose graph is freed."""
    if not torch.is_grad_enabled():
        return function(states)
    leaf = states.detach().requires_grad_()
    total, hits = function(leaf)
    (slope,) = torch.autograd.grad(total, leaf)
    # the second term is 0, and has the gradient
    return total.detach() + ((states - leaf.detach()) * slope).sum(), hits
