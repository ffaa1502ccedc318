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

    def choose(logits: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        scores = logits if rule is None else rule.scores_at(logits, depth)
        if draws is not None:
            token = exponential_race(scores, draws[depth])
        else:  # greedy, or coupled: sampled with the noise row that the target will use at this position
            token = scores.argmax(-1) if rule is None else rule.choose(scores, depth)
        if rule is not None and not rule.history_free:
            rule.try_out(depth, token)
        return scores, token

    tokens, q = _drafted(root, count, logits_after, choose, draws is not None)
    return DraftTree.chain(tokens, q=q)


def drafted_in_graph(
    rule: TokenRule | None,
    root: torch.Tensor,
    count: int,
    logits_after: Callable[[int, torch.Tensor], torch.Tensor],
    noise: torch.Tensor | None,
    with_q: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Draft a chain inside a graph, under a rule that `fits_graphs`.

    Args:
        rule ([`TokenRule`], *optional*): The target's rule; the argmax without one.
        root (`torch.LongTensor` of shape `(B,)`): Last emitted tokens.
        count (`int`): Number of tokens to draft.
        logits_after (`Callable`): As of [`drafted_chain`].
        noise (`torch.Tensor` of shape `(count, B, vocab)`, *optional*): Decides the tokens; the argmax does without it.
        with_q (`bool`): Whether to return the distributions that the tokens were drawn from.

    Returns:
        `tuple`: The roots and the drafted tokens `(B, count + 1)`, and distributions `(B, count + 1, vocab)` or `None`.
    """

    def choose(logits: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        scores = logits if rule is None else warped(rule.processors, logits[:, None])[:, 0]
        return scores, scores.argmax(-1) if noise is None else exponential_race(scores, noise[depth])

    return _drafted(root, count, logits_after, choose, with_q)


def _drafted(
    root: torch.Tensor,
    count: int,
    logits_after: Callable[[int, torch.Tensor], torch.Tensor],
    choose: Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]],
    with_q: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    tokens, distributions = [root], []
    for depth in range(count):
        scores, token = choose(logits_after(depth, tokens[-1]), depth)
        tokens.append(token)
        if with_q:
            distributions.append(scores.softmax(-1))
    return torch.stack(tokens, 1), chain_q(distributions) if with_q else None


def noise_of_chain(rule: TokenRule | None, count: int, draws: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Return the noise `(count, B, vocab)` that [`drafted_in_graph`] chooses by: `draws`, or that of the target.

    It is empty if tokens are not sampled.
    """
    if draws is not None:
        return (draws,)
    return (rule.noise_of(count).transpose(0, 1),) if rule is not None and rule.do_sample else ()
