"""Beam search over draft trees: each level keeps the continuations with the largest cumulative log-probability."""

import torch


class Beam:
    """Grow a draft tree level by level.

    No node is discarded: a node without a continuation in the next level stays as a leaf. The number of nodes depends
    on the widths alone, and there is no host sync.

    Args:
        root (`torch.LongTensor` of shape `(B,)`): Last emitted tokens.

    Attributes:
        tokens (`torch.LongTensor` of shape `(B, n)`): The newest level.
        reach (`torch.BoolTensor` of shape `(B, n, N)`): Rows of the tree mask for the newest level: each node's
            ancestors among all N nodes so far, and the node itself.
        levels (`list[torch.LongTensor]`): Tokens of every level, the root's first.
        parents (`list[torch.LongTensor]`): Parents of the nodes of every level, as indices into the tree.
        scores (`torch.Tensor` of shape `(B, n)`): Sum of the draft's log-probabilities along each path of the newest
            level.
    """

    def __init__(self, root: torch.Tensor):
        self.tokens = root[:, None]
        self.reach = torch.ones(*self.tokens.shape, 1, dtype=torch.bool, device=root.device)
        self.scores = torch.zeros(self.tokens.shape, device=root.device)
        self.levels = [self.tokens]
        self.parents = [torch.full_like(self.tokens, -1)]
        self._reaches = [self.reach]

    @property
    def num_nodes(self) -> int:
        """Number of nodes so far, root included."""
        return self.reach.shape[2]

    def paths(self) -> torch.Tensor:
        """Return the drafted tokens `(B, n, depth)` that lead to each node of the newest level, its own token last.

        A node that a processor forbids gets the path of the best node, as some processors fail after a forbidden token.
        """
        node, tokens = torch.arange(self.tokens.shape[1], device=self.tokens.device).expand_as(self.tokens), []
        node = node.masked_fill(self.scores.isneginf(), 0)
        first = self.first_node
        for depth in range(len(self.levels) - 1, 0, -1):
            tokens.append(self.levels[depth].gather(1, node))
            first -= self.levels[depth - 1].shape[1]
            node = self.parents[depth].gather(1, node) - first
        return torch.stack(tokens[::-1], -1) if tokens else self.tokens[..., None][..., :0]

    @property
    def first_node(self) -> int:
        """Index of the first node of the newest level."""
        return self.num_nodes - self.tokens.shape[1]

    def grow(self, logits: torch.Tensor, width: int) -> None:
        """Add the best `width` continuations of the newest level as the next level.

        Args:
            logits (`torch.Tensor` of shape `(B, n, V)`): The draft's logits after each node of the newest level, or
                other log-probabilities up to a constant per node.
            width (`int`): Nodes of the next level; fewer if there are fewer continuations.
        """
        each = min(width, logits.shape[-1])
        best, tokens = logits.topk(each, dim=-1)
        scores = best.float() + (self.scores - log_normaliser(logits))[..., None]
        scores = scores.masked_fill(scores.isnan(), -torch.inf)  # after a node whose tokens are all forbidden
        self.scores, chosen = scores.flatten(1).topk(min(width, scores.shape[1] * each), dim=-1)
        parent = chosen // each
        first, size = self.first_node, chosen.shape[1]
        self.tokens = tokens.flatten(1).gather(1, chosen)
        inherited = self.reach.gather(1, parent[..., None].expand(-1, -1, self.num_nodes))
        itself = torch.eye(size, dtype=torch.bool, device=chosen.device).expand(len(chosen), -1, -1)
        self.reach = torch.cat([inherited, itself], dim=-1)
        self.levels.append(self.tokens)
        self.parents.append(parent + first)
        self._reaches.append(self.reach)

    def fields(self) -> tuple[torch.Tensor, ...]:
        """Return the [`DraftTree.fields`] of all levels, in level order."""
        tokens = torch.cat(self.levels, 1)
        depths = torch.cat([torch.full_like(level, depth) for depth, level in enumerate(self.levels)], 1)
        total = tokens.shape[1]
        mask = torch.cat([torch.nn.functional.pad(r, (0, total - r.shape[2])) for r in self._reaches], 1)
        return tokens, torch.cat(self.parents, 1), torch.ones_like(tokens, dtype=torch.bool), depths, mask


def log_normaliser(logits: torch.Tensor) -> torch.Tensor:
    """Return `logsumexp` over the last dimension in float32, without a float32 copy of bfloat16 logits.

    >>> log_normaliser(torch.zeros(1, 4)).exp().item()
    4.0
    """
    largest = logits.amax(-1, keepdim=True)
    total = (logits - largest).exp_().sum(-1, dtype=torch.float32)
    return total.log() + largest.squeeze(-1).float()
