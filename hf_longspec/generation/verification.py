"""Verification: which drafted tokens the target model accepts, and what it emits after them.

Glossary:
    path      nodes from the root downwards that are accepted, the root included
    accepted  a drafted token that the target emits; its node lies on the path
    bonus     the one token per iteration that comes from the target alone: it follows the last accepted token, either
              because the draft ended there or in place of a drafted token that was refused
    n         number of nodes on the path = accepted tokens + 1 = tokens emitted, bonus included
    scores    log-probabilities up to a constant per node, after all logits processors and warpers, of the token after
              each node: `(batch_size, num_nodes, vocab_size)`
    p, q      distributions over the vocabulary: the target's, the draft's

Every function here preserves the target's distribution of the emitted text. `accept_greedy` and `accept_sampled` do so
for any tree, since the target's choice after a node does not depend on the draft; `accept_rejection` needs the
distribution that each token was drawn from. All are batched over rows, with shapes that depend on shapes only and
without a host sync.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .draft_tree import DraftTree


@dataclass(frozen=True, eq=False)
class Acceptance:
    """
    Result of one verification. With M = `tree.max_depth + 1`:
    """

    path: Tensor  # `(batch_size, M)`: accepted nodes, beginning with node 0; from place n on, the last one is repeated
    num_nodes: Tensor  # `(batch_size,)`: n of each row: nodes to commit, and tokens emitted
    # `(batch_size, M)`: tokens emitted, the bonus token last; from place n on, 0. The bonus token is -1 if it could
    # not be drawn, see [`drawn`].
    tokens: Tensor

    @cached_property
    def next_root(self) -> Tensor:
        """The bonus token of each row, `(batch_size,)`, which the next tree grows from; 0 if it could not be drawn."""
        bonus = self.tokens if self.tokens.shape[1] == 1 else self.tokens.gather(1, self.num_nodes[:, None] - 1)
        return bonus.squeeze(1).clamp_min(0)


def packed(acceptance: Acceptance, valid: Tensor) -> Tensor:
    """Return all that the host reads of a verification, `(batch_size, 2 + 2 M)`.

    It holds for each row the number of nodes on the path, the number of nodes of the tree without padding, the emitted
    tokens, and the path.
    """
    counts = torch.stack([acceptance.num_nodes, valid.sum(1)], dim=1)
    return torch.cat([counts, acceptance.tokens, acceptance.path], dim=1)


def walk_lazily(tree: DraftTree, choose: Callable[[int, Tensor, Tensor], Tensor]) -> Acceptance:
    """Follow the target's choices down the tree, and compute each choice only when its node is reached.

    Given a depth from 0 to `tree.max_depth`, the node of every row, and whether its walk has reached this depth,
    `choose` returns the token that the target emits after that node; in other rows it is ignored. Of siblings with the
    same token, the first is taken.

    >>> tree = DraftTree.chain(torch.tensor([[5, 8, 2]]))
    >>> walk_lazily(tree, lambda depth, node, is_walking: torch.tensor([[8, 4, 6][depth]])).tokens.tolist()
    [[8, 4, 0]]
    """
    node = torch.zeros_like(tree.tokens[:, 0])
    walking = torch.ones_like(node, dtype=torch.bool)
    path, emitted, num_nodes = [node], [], walking.long()
    for depth in range(tree.max_depth + 1):
        token = choose(depth, node, walking)
        emitted.append(token.masked_fill(~walking, 0))
        if depth < tree.max_depth:
            matches = (tree.parents == node[:, None]) & (tree.tokens == token[:, None]) & tree.valid  # [B, N]
            walking = walking & matches.any(1)
            # argmax returns the first of equal values, hence the first matching sibling
            node = torch.where(walking, matches.int().argmax(1), node)
            num_nodes = num_nodes + walking
            path.append(node)
    return Acceptance(torch.stack(path, 1), num_nodes, torch.stack(emitted, 1))


def walk(tree: DraftTree, choice: Tensor) -> Acceptance:
    """Follow the target's choices down the tree: move to the child that carries the choice, else emit it and stop.

    `choice` `(batch_size, num_nodes)` is the token that the target emits after each node. If siblings carry the same
    token, the first of them is taken.

    >>> tree = DraftTree(torch.tensor([[5, 8, 2, 3]]), torch.tensor([[-1, 0, 0, 2]]), torch.ones(1, 4).bool())
    >>> result = walk(tree, torch.tensor([[2, 9, 7, 9]]))
    >>> result.path.tolist(), result.num_nodes.tolist(), result.tokens.tolist()
    ([[0, 2, 2, 2]], [2], [[2, 7, 0, 0]])
    """
    if tree.max_depth == 0:  # plain decoding: nothing to compare
        tokens = choice[:, :1]
        return Acceptance(torch.zeros_like(tokens), tokens.new_ones(tokens.shape[0]), tokens)
    if not tree.is_chain:
        return walk_lazily(tree, lambda depth, node, _: choice.gather(1, node[:, None]).squeeze(1))
    agreed = (choice[:, :-1] == tree.tokens[:, 1:]) & tree.valid[:, 1:]
    num_nodes = agreed.long().cumprod(1).sum(1) + 1
    return _along_chain(tree.tokens, num_nodes, choice.gather(1, num_nodes[:, None] - 1).squeeze(1))


def accept_greedy(tree: DraftTree, logits: Tensor) -> Acceptance:
    """Accept the tokens that the target would emit greedily, by processed logits.

    >>> accept_greedy(DraftTree.chain(torch.tensor([[0, 2]])), torch.eye(4)[None, [2, 3]]).tokens.tolist()
    [[2, 3]]
    """
    return walk(tree, logits.argmax(-1))


def draw_noise(*shape: int, generator: torch.Generator | None = None, device: torch.device | None = None) -> Tensor:
    """Return standard exponential noise for [`gumbel_max_sample`], in float32, shape `(*shape)`.

    >>> draw_noise(2, 5, 11, generator=torch.Generator().manual_seed(0)).shape
    torch.Size([2, 5, 11])
    """
    # float64: single precision draws on a GPU lie on a grid of 6e-8 near 0, where unlikely tokens are drawn too often
    dtype = torch.float32 if device is not None and device.type == "mps" else torch.float64
    return torch.empty(shape, dtype=dtype, device=device).exponential_(generator=generator).float()


def gumbel_max_sample(scores: Tensor, noise: Tensor) -> Tensor:
    """Draw one token per row from the distribution `softmax(scores)`, as a function of the noise `(..., vocab_size)`.

    This is the Gumbel-max trick in its exponential form: token i arrives at time `noise[i] / p[i]`, an exponential time
    of rate p[i], and the first to arrive is drawn. The minimum of independent exponential times belongs to i with
    probability p[i] / sum(p), so the result is distributed as that of `torch.multinomial`. Two similar distributions
    mostly draw the same token from the same noise; coupled candidates rely on that. Pass `p.log()` for probabilities. A
    token at -inf is never drawn, unless all are.

    >>> gumbel_max_sample(torch.tensor([0.9, 0.1, 0.0]).log(), torch.tensor([1.0, 0.1, 1e-9])).item()
    1
    """
    return perturbed_log_probs(scores, noise).argmax(-1)


def drawn(scores: Tensor, noise: Tensor) -> Tensor:
    """Return the tokens of [`gumbel_max_sample`], and -1 where the scores give no distribution.

    These are scores that are all -inf, or of which one is nan or inf, for which `torch.multinomial` raises an error. No
    node of a tree holds -1, so a walk ends there.

    >>> drawn(torch.tensor([[0.9, 0.1], [0.0, 0.0], [0.5, torch.nan]]).log(), torch.ones(3, 2)).tolist()
    [0, -1, -1]
    """
    best, token = perturbed_log_probs(scores, noise).max(-1)
    return torch.where(best.isfinite(), token, -1)


def perturbed_log_probs(scores: Tensor, noise: Tensor) -> Tensor:
    """Return the log-probabilities perturbed by the noise, of which [`gumbel_max_sample`] takes the largest.

    This is minus the logarithm of each token's time of arrival, up to the constant of the scores. Shapes are those of
    [`gumbel_max_sample`]; the result has the shape of the scores, in float32 or wider.

    >>> perturbed_log_probs(torch.tensor([0.9, 0.1]).log(), torch.tensor([1.8, 0.1])).exp()
    tensor([0.5000, 1.0000])
    """
    dtype = torch.promote_types(scores.dtype, torch.float32)
    # a noise of 0 would turn -inf into nan, which argmax prefers to every number
    return scores.to(dtype) - noise.to(dtype).clamp_min(torch.finfo(dtype).tiny).log()


def accept_sampled(tree: DraftTree, scores: Tensor, noise: Tensor) -> Acceptance:
    """Accept the tokens that the target would sample: draw once after a node, and go on if a child carries the token.

    No rule accepts more often when candidates are not random. A second draw for the next sibling would favour drafted
    tokens and change the distribution of the text. The tree's `q` is not used, so it may be chosen in any way, even by
    the same noise `(batch_size, max_depth + 1, vocab_size)`, whose row d decides the draw after a node of depth d. With
    one row per position of the text, kept until that position is committed, the text does not depend on the trees.

    >>> tree, noise = DraftTree.chain(torch.tensor([[0, 2]])), torch.ones(1, 2, 4)
    >>> accept_sampled(tree, torch.eye(4)[None, [2, 3]], noise).tokens.tolist()
    [[2, 3]]
    """
    if tree.is_chain or tree.max_depth == 0:  # node i has depth i
        reached = tree.max_depth + 1
        return walk(tree, drawn(scores[:, :reached], noise[:, :reached]))
    return walk_lazily(tree, lambda depth, node, _: drawn(_row(scores, node), noise[:, depth]))


def chain_q(distributions: Sequence[Tensor]) -> Tensor:
    """Return the `q` of a chain, `(batch_size, num_nodes, vocab_size)`, by the distribution of each drafted token.

    The root was not drawn, so its row is 0.
    """
    return torch.stack([torch.zeros_like(distributions[0]), *distributions], 1)


def accept_rejection(tree: DraftTree, scores: Tensor, uniforms: Tensor, noise: Tensor) -> Acceptance:
    """Accept each token of a chain with probability min(1, p / q), up to the first that is refused.

    A refused token is replaced by a draw from the normalised (p - q)+. After a chain that is accepted whole, the bonus
    token is drawn from p. See https://huggingface.co/papers/2211.17192. The tokens were drawn from the tree's `q`,
    independently of `uniforms` `(batch_size, num_nodes - 1)` and of the `noise` `(batch_size, vocab_size)` of the
    bonus.
    """
    if not tree.is_chain or (tree.q is None and tree.num_nodes > 1):
        raise ValueError(
            f"is_chain={tree.is_chain} and q={type(tree.q).__name__}, expected a chain with q. Draw from a q, "
            'or use acceptance="coupled".'
        )
    p = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))  # [B, N, V]
    q = p if tree.q is None else tree.q.to(p.dtype)
    drafted = tree.tokens[:, 1:, None]
    # u < p / q, without the division
    accepted = uniforms * q[:, 1:].gather(2, drafted).squeeze(2) < p[:, :-1].gather(2, drafted).squeeze(2)
    accepted = (accepted & tree.valid[:, 1:]).long().cumprod(1)  # [B, N - 1]
    num_nodes = accepted.sum(1) + 1
    weights = _bonus_distribution(p, q, tree.valid, num_nodes)
    bonus = drawn(weights.log(), noise)
    return _along_chain(tree.tokens, num_nodes, bonus)


def _bonus_distribution(p: Tensor, q: Tensor, valid: Tensor, num_nodes: Tensor) -> Tensor:
    """Return `[B, V]`, not normalised: (p - q)+ if a drafted token was refused, else p."""
    refused_node = num_nodes.clamp_max(p.shape[1] - 1)
    refused = valid.gather(1, refused_node[:, None]) & (num_nodes < p.shape[1])[:, None]
    last = _row(p, num_nodes - 1)
    residual = (last - _row(q, refused_node)).clamp_min(0)
    # equal distributions can refuse a token by rounding alone, with no residual
    return torch.where(refused & (residual.sum(-1, keepdim=True) > 0), residual, last)


def _along_chain(tokens: Tensor, num_nodes: Tensor, bonus: Tensor) -> Acceptance:
    """Return the acceptance of the first n nodes of a chain."""
    places, last = torch.arange(tokens.shape[1], device=tokens.device), num_nodes[:, None] - 1
    following = torch.nn.functional.pad(tokens[:, 1:], (0, 1))
    emitted = torch.where(places < last, following, 0).scatter(1, last, bonus[:, None])
    return Acceptance(torch.minimum(places, last), num_nodes, emitted)


def _row(values: Tensor, node: Tensor) -> Tensor:
    """Return `[B, V]`: the row of one node per batch row, from `values` of shape `[B, N, V]`."""
    return values[torch.arange(values.shape[0], device=values.device), node]


def along_path(values: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
    """Return from values `(batch, N, V)` of all nodes those of the nodes of `path` `(batch, M)`: `(batch, M, V)`."""
    return values.gather(1, path[..., None].expand(-1, -1, values.shape[-1]))
