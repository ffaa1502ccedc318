"""Chains that a model drafts token by token: the target over a part of its cache, or a small model."""

from collections.abc import Callable

import torch

from .draft_tree import DraftTree
from .sampling import TokenRule, warped
from .verification import chain_q, exponential_race


def drafted_chain(
    rule: TokenRule | None,
    root: torch.Tensor,
    count: int,
    logits_after: Callable[[int, torch.Tensor], torch.Tensor],
    draws: torch.Tensor | None = None,
) -> DraftTree:
    """Draft a chain under the target's rule.

    Args:
        rule ([`TokenRule`], *optional*): The target's rule; the argmax without one.
        root (`torch.LongTensor` of shape `(B,)`): Last emitted tokens.
        count (`int`): Number of tokens to draft.
        logits_after (`Callable`): Function of a depth and of the tokens `(B,)` there, to the logits `(B, vocab)` that
            follow.
        draws (`torch.Tensor` of shape `(count, B, vocab)`, *optional*): Result of [`independent_draws`].
    """
    noise = noise_of_chain(rule, count, draws)
    tokens, q = drafted_tokens(rule, root, count, logits_after, noise[0] if noise else None, draws is not None)
    return DraftTree.chain(tokens, q=q)


def drafted_tokens(
    rule: TokenRule | None,
    root: torch.Tensor,
    count: int,
    logits_after: Callable[[int, torch.Tensor], torch.Tensor],
    noise: torch.Tensor | None,
    with_q: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Draft the tokens of a chain. It may be part of a graph if the rule `fits_graphs`.

    Args:
        rule ([`TokenRule`], *optional*): As of [`drafted_chain`], like `root`, `count` and `logits_after`.
        noise (`torch.Tensor` of shape `(count, B, vocab)`, *optional*): Decides the tokens; the argmax does without it.
        with_q (`bool`): Whether to return the distributions that the tokens were drawn from.

    Returns:
        `tuple`: The roots and the drafted tokens `(B, count + 1)`, and distributions `(B, count + 1, vocab)` or `None`.
    """
    tokens, distributions = [root], []
    for depth in range(count):
        scores = logits_after(depth, tokens[-1])
        if rule is not None and rule.history_free:
            scores = warped(rule.processors, scores[:, None])[:, 0]
        elif rule is not None:
            scores = rule.scores_at(scores, depth)
        tokens.append(scores.argmax(-1) if noise is None else exponential_race(scores, noise[depth]))
        if rule is not None and not rule.history_free:
            rule.try_out(depth, tokens[-1])
        if with_q:
            distributions.append(scores.softmax(-1))
    return torch.stack(tokens, 1), chain_q(distributions) if with_q else None


def noise_of_chain(rule: TokenRule | None, count: int, draws: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Return the noise `(count, B, vocab)` that decides a chain; none if its tokens are not sampled.

    It is `draws`, or else that with which the target will decide these positions.
    """
    if draws is not None:
        return (draws,)
    return (rule.noise_of(count).transpose(0, 1),) if rule is not None and rule.do_sample else ()
