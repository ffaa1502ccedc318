# Published with a draft by hf_longspec, Apache-2.0.
"""Beam over draft trees: each level keeps the continuations with the largest cumulative log-probability."""

from functools import lru_cache

import torch

from .generation_draft_tree import DraftTree


class Beam:
    """A draft tree that grows level by level.

    Nothing is discarded: a node whose continuations do not make it into the next level stays as a leaf. The number of
    nodes depends on the widths alone, and nothing is read back to the host.

    Args:
        root (`torch.LongTensor` of shape `(B,)`): Last emitted tokens.

    Attributes:
        tokens (`torch.LongTensor` of shape `(B, n)`): The newest level.
        reach (`torch.BoolTensor` of shape `(B, n, N)`): Which of all N nodes so far each of them descends from or is.
        levels (`list[torch.LongTensor]`): Tokens of every level, the root's first.
        parents (`list[torch.LongTensor]`): Index of each one's parent.
        scores (`torch.Tensor` of shape `(B, n)`): Sum of the draft's log-probabilities along their paths.
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
        """Nodes so far."""
        return self.reach.shape[2]

    @property
    def first_node(self) -> int:
        """Index of the newest level's first node."""
        return self.num_nodes - self.tokens.shape[1]

    def grow(self, logits: torch.Tensor, width: int) -> None:
        """Add the best `width` continuations of the newest level as the next one.

        Args:
            logits (`torch.Tensor` of shape `(B, n, V)`): The draft's logits after each node of the newest level.
            width (`int`): Nodes of the next level; fewer if there are not so many continuations.
        """
        each = min(width, logits.shape[-1])
        best, tokens = logits.topk(each, dim=-1)
        scores = best.float() + (self.scores - log_normaliser(logits))[..., None]
        self.scores, chosen = scores.flatten(1).topk(min(width, scores.shape[1] * each), dim=-1)
        parent = chosen // each
        first, size = self.first_node, chosen.shape[1]
        self.tokens = tokens.flatten(1).gather(1, chosen)
        inherited = self.reach.gather(1, parent[..., None].expand(-1, -1, self.num_nodes))
        self.reach = torch.cat([inherited, _identity(size, chosen.device).expand(len(chosen), -1, -1)], dim=-1)
        self.levels.append(self.tokens)
        self.parents.append(parent + first)
        self._reaches.append(self.reach)

    def tree(self) -> DraftTree:
        """All levels as one tree, in level order."""
        tokens = torch.cat(self.levels, 1)
        depths, valid = _depths(tuple(level.shape[1] for level in self.levels), tokens.device)
        depths, valid = depths.expand_as(tokens), valid.expand_as(tokens)
        tree = DraftTree(tokens, torch.cat(self.parents, 1), valid, max_depth=len(self.levels) - 1)
        total = tokens.shape[1]
        mask = torch.cat([torch.nn.functional.pad(r, (0, total - r.shape[2])) for r in self._reaches], 1)
        tree.__dict__.update(depths=depths, mask=mask)  # fills the cached properties
        return tree


def log_normaliser(logits: torch.Tensor) -> torch.Tensor:
    """`logsumexp` over the last dimension in float32, without a float32 copy of bfloat16 logits.

    >>> log_normaliser(torch.zeros(1, 4)).exp().item()
    4.0
    """
    largest = logits.amax(-1, keepdim=True)
    total = (logits - largest).exp_().sum(-1, dtype=torch.float32)
    return total.log() + largest.squeeze(-1).float()


@lru_cache(maxsize=64)
def _identity(size: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):  # it outlives the call, which may run under inference mode
        return torch.eye(size, dtype=torch.bool, device=device)[None]


@lru_cache(maxsize=64)
def _depths(widths: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.inference_mode(False):
        depths = torch.tensor([depth for depth, width in enumerate(widths) for _ in range(width)], device=device)[None]
        return depths, torch.ones_like(depths, dtype=torch.bool)
