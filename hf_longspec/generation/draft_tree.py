"""The draft tree: the tokens that a drafter proposes, and the node that each of them follows.

Node 0 is the root, the last emitted token. Every other node has one parent with a smaller index. A node's path is found
by following parents, so a tree is two integer tensors of a fixed size. Rows with fewer candidates are padded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

import torch
from torch import Tensor

from ..attention_backends.lengths import on_device


@dataclass(frozen=True, eq=False)
class DraftTree:
    """
    Candidate continuations of every batch row, as one tree per row.

    Nothing is checked on construction, since a tree is built in every iteration.

    Args:
        tokens (`torch.LongTensor` of shape `(batch_size, num_nodes)`):
            Token of each node. Node 0, the root, holds the last emitted token.
        parents (`torch.LongTensor` of shape `(batch_size, num_nodes)`):
            Index of each node's parent, smaller than the node's own; -1 for the root. Any node for padding.
        valid (`torch.BoolTensor` of shape `(batch_size, num_nodes)`):
            False marks padding, which attends to itself only and is never accepted.
        q (`torch.Tensor` of shape `(batch_size, num_nodes, vocab_size)`, *optional*): Row i is the distribution that
            the token of node i was drawn from; row 0 is unused. `None` if the candidates are not random.
        is_chain (`bool`, *optional*, defaults to `False`):
            Whether node i has parent i - 1 in every row, so that accepted nodes already lie side by side.
        max_depth (`int`, *optional*, defaults to `num_nodes - 1`):
            Bound on the depth of any node, known without reading the tensors. Deeper nodes are never accepted.

    >>> tree = DraftTree.chain(torch.tensor([[5, 8, 2]]))
    >>> tree.depths.tolist(), tree.mask.int().tolist()
    ([[0, 1, 2]], [[[1, 0, 0], [1, 1, 0], [1, 1, 1]]])
    """

    tokens: Tensor
    parents: Tensor
    valid: Tensor
    q: Tensor | None = None
    is_chain: bool = False
    max_depth: int = -1

    def __post_init__(self) -> None:
        if self.max_depth < 0 or self.is_chain:
            object.__setattr__(self, "max_depth", self.num_nodes - 1)

    @classmethod
    def chain(cls, tokens: Tensor, valid: Tensor | None = None, q: Tensor | None = None) -> "DraftTree":
        """Return a tree without branches: each node follows the one before it, root first.

        The arguments are those of the class. Padding comes last in a row, and there is none by default.
        """
        batch_size, num_nodes = tokens.shape
        structure = _chain_structure(batch_size, num_nodes, tokens.device)
        tree = cls(tokens, structure["parents"], structure["valid"] if valid is None else valid, q, is_chain=True)
        if valid is None:  # fills the cached properties, so that a step launches no kernel for them
            tree.__dict__.update(structure)
        return tree

    @classmethod
    def of_fields(cls, fields: Sequence[Tensor], max_depth: int, is_chain: bool = False) -> "DraftTree":
        """Return the tree of which `fields` are the [`DraftTree.fields`]."""
        tokens, parents, valid, depths, mask = fields
        tree = cls(tokens, parents, valid, is_chain=is_chain, max_depth=max_depth)
        tree.__dict__.update(depths=depths, mask=mask)  # fills the cached properties
        return tree

    @property
    def fields(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Tokens, parents, validity and depths `(batch_size, num_nodes)`, and the mask of the tree."""
        return self.tokens, self.parents, self.valid, self.depths, self.mask

    @classmethod
    def root_only(cls, root: Tensor) -> "DraftTree":
        """Return the tree of `root` alone, of shape `(batch_size,)`: plain autoregressive decoding."""
        return cls.chain(root[:, None])

    @property
    def num_nodes(self) -> int:
        """Nodes per row, root and padding included."""
        return self.tokens.shape[1]

    @cached_property
    def mask(self) -> Tensor:
        """Tree mask `(batch_size, num_nodes, num_nodes)`, see [`tree_mask`]. It may be an expanded view: read only."""
        return tree_mask(self.parents, self.valid, self.max_depth)

    @cached_property
    def depths(self) -> Tensor:
        """Distance of each node from the root, `(batch_size, num_nodes)`; 0 for padding."""
        return tree_depths(self.mask)

    @cached_property
    def last_node(self) -> Tensor:
        """Index `(batch_size,)` of the last node of each row that is not padding, if padding comes last."""
        return self.valid.sum(1) - 1

    def best_chain(self, row: int = 0) -> Tensor:
        """Return the tokens of the longest path of one batch row, without the root; the first of equally long paths.

        >>> root = torch.tensor([5])
        >>> trie_of(trie_table([[[4], [7, 9], [7, 3]]], root, 6, 2), root, 2).best_chain().tolist()
        [7, 9]
        """
        # argmax returns the first of equal values, hence the first of the deepest nodes
        path = self.mask[row, self.depths[row].argmax()].clone()
        path[0] = False
        return self.tokens[row][path]


def tree_mask(parents: Tensor, valid: Tensor | None = None, max_depth: int | None = None) -> Tensor:
    """Return which nodes each node attends to, itself and its ancestors, `(batch_size, num_nodes, num_nodes)`.

    The prefix is not part of the mask, as all of it is visible to every node. The arguments are those of
    [`DraftTree`]; a smaller `max_depth` saves matrix products.

    >>> tree_mask(torch.tensor([[-1, 0, 1, 0]]))[0].int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]
    """
    nodes = torch.arange(parents.shape[1], device=parents.device)
    edges = parents[..., None] == nodes  # [B, N, N]
    if valid is not None:
        edges = edges & valid[..., None]
    ancestor_mask = edges | (nodes[:, None] == nodes)
    # each squaring doubles the number of steps towards the root that are covered
    for _ in range(_doublings(parents.shape[1] - 1 if max_depth is None else max_depth)):
        steps = ancestor_mask.float()
        ancestor_mask = torch.bmm(steps, steps) > 0
    return ancestor_mask


def tree_depths(mask: Tensor) -> Tensor:
    """Return the depth of each node, `(batch_size, num_nodes)`, from a [`tree_mask`]: 0 for root and padding."""
    return mask.sum(-1) - 1


def trie_table(paths: Sequence[Sequence[Sequence[int]]], root: Tensor, num_nodes: int, max_depth: int) -> Tensor:
    """Merge candidate paths into tries, in which paths with a common beginning share its nodes. Runs on the host.

    `paths` has for each row its candidate continuations, without the root, best first. Those longer than `max_depth`
    are cut, and tokens that do not fit into `num_nodes`, root included, are dropped, later paths first. The result
    `(batch_size, 3, num_nodes)` has tokens (0 for the roots), parents and validity, see [`trie_of`], and reaches the
    device of the roots in one copy.

    >>> trie_table([[[7, 9], [7, 3]]], torch.tensor([5]), num_nodes=5, max_depth=4).tolist()
    [[[0, 7, 9, 3, 0], [-1, 0, 1, 1, 0], [1, 1, 1, 1, 0]]]
    """
    rows = [_build_trie([path[:max_depth] for path in row], num_nodes) for row in paths]
    return on_device(rows, root.device).reshape(-1, 3, num_nodes)


def trie_of(table: Tensor, root: Tensor, max_depth: int) -> DraftTree:
    """Return the tree of the given [`trie_table`] and roots. It may be part of a graph."""
    tokens, parents, valid = table.unbind(1)
    tokens = torch.cat([root[:, None], tokens[:, 1:]], dim=1)
    return DraftTree(tokens, parents, valid.bool(), max_depth=max_depth)


def merge_trees(first: DraftTree, second: DraftTree) -> DraftTree:
    """Merge two deterministic trees over the same roots into one trie, on their device and without a host sync.

    Every node keeps its place: node i of the first tree is node i, and the nodes of the second tree follow without
    their root. Nodes that repeat a path become padding.

    >>> root = torch.tensor([5])
    >>> beams = trie_of(trie_table([[[7, 9]]], root, 3, 2), root, 2)
    >>> merged = merge_trees(beams, DraftTree.chain(torch.tensor([[5, 7, 3]])))
    >>> merged.tokens.tolist(), merged.parents.tolist(), merged.valid.int().tolist()
    ([[5, 7, 9, 7, 3]], [[-1, 0, 1, 0, 1]], [[1, 1, 1, 0, 1]])
    """
    if first.q is not None or second.q is not None:
        raise ValueError("a tree has q, expected None. Only deterministic candidates can share a trie.")
    max_depth = max(first.max_depth, second.max_depth)
    below = second.parents[:, 1:]
    parents = torch.cat([first.parents, torch.where(below > 0, below + first.num_nodes - 1, 0)], dim=1)
    pairs = ((first.tokens, second.tokens), (first.valid, second.valid), (first.depths, second.depths))
    tokens, valid, depths = (torch.cat([left, right[:, 1:]], dim=1) for left, right in pairs)
    same = _first_equal_path(tokens, parents, depths, max_depth)
    adopted = same.gather(1, parents.clamp_min(0))
    adopted[:, 0] = -1
    is_new = same == torch.arange(same.shape[1], device=same.device)
    return DraftTree(tokens, adopted, valid & is_new, max_depth=max_depth)


def static_tree(root: Tensor, levels: Sequence[Tensor], branching: Sequence[int]) -> DraftTree:
    """Return the static tree in which every node of a level has equally many children.

    Its structure depends on `branching` alone, the number of children of a node, level by level, and is built once.
    A level `(batch_size, n)` has all its nodes, children of one parent side by side. A level `(batch_size, k)` has the
    k children that all nodes of the level before share. If all levels are of this kind, the paths are all combinations
    of one token per level, as in Medusa (https://huggingface.co/papers/2401.10774, section "Tree Attention").

    >>> tree = static_tree(torch.tensor([5]), [torch.tensor([[7, 8]]), torch.tensor([[1, 2]])], [2, 1])
    >>> tree.tokens.tolist(), tree.parents.tolist()
    ([[5, 7, 8, 1, 2]], [[-1, 0, 0, 1, 2]])
    >>> static_tree(torch.tensor([5]), [torch.tensor([[7, 8]]), torch.tensor([[1]])], [2, 1]).tokens.tolist()
    [[5, 7, 8, 1, 1]]
    """
    tokens, size = [root[:, None]], 1
    for level, children in zip(levels, branching, strict=True):
        size *= children
        tokens.append(level.repeat(1, size // level.shape[1]))
    structure = _static_structure(len(root), tuple(branching), root.device)
    fields = torch.cat(tokens, dim=1), *structure
    return DraftTree.of_fields(fields, len(branching), is_chain=max(branching, default=1) == 1)


def num_static_nodes(branching: Sequence[int]) -> int:
    """Return the number of nodes of a static tree, root included.

    >>> num_static_nodes([1, 3, 3, 3])
    41
    """
    return 1 + sum(prod(branching[: depth + 1]) for depth in range(len(branching)))


@lru_cache(maxsize=64)
def _chain_structure(batch_size: int, num_nodes: int, device: torch.device) -> dict[str, Tensor]:
    """Return the tensors of a chain that do not depend on its tokens, by their names in [`DraftTree`].

    They are contiguous, as a graph copies its inputs in one launch only then.
    """
    with torch.inference_mode(False):  # the cached tensors outlive the call, which may run under inference mode
        depths = torch.arange(num_nodes, device=device).repeat(batch_size, 1)
        return {
            "parents": depths - 1,
            "valid": torch.ones_like(depths, dtype=torch.bool),
            "depths": depths,
            "mask": depths[:, :, None] >= depths[:, None, :],
            "last_node": torch.full((batch_size,), num_nodes - 1, device=device),
        }


@lru_cache(maxsize=64)
def _static_structure(batch_size: int, branching: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
    """Return the [`DraftTree.fields`] of a static tree without the tokens, contiguous."""
    parents, depths, above = [-1], [0], range(1)
    for depth, children in enumerate(branching, start=1):
        level = range(len(parents), len(parents) + children * len(above))
        parents += [parent for parent in above for _ in range(children)]
        depths += [depth] * len(level)
        above = level
    with torch.inference_mode(False):  # the cached tensors outlive the call, which may run under inference mode
        of_rows = on_device([parents, depths], device)
        parents_of_rows, depths_of_rows = (row.repeat(batch_size, 1) for row in of_rows)
        valid = torch.ones_like(parents_of_rows, dtype=torch.bool)
        mask = tree_mask(parents_of_rows, valid, len(branching))
        return parents_of_rows, valid, depths_of_rows, mask


def _build_trie(paths: Sequence[Sequence[int]], num_nodes: int) -> list[list[int]]:
    """Return tokens, parents and validity of the trie of one row's paths, padded; the root gets token 0."""
    tokens, parents = [0], [-1]
    children: dict[tuple[int, int], int] = {}
    for path in paths:
        node = 0
        for token in path:
            if (node, token) not in children:
                if len(tokens) == num_nodes:
                    break  # a later path may still lie inside the trie, but adds nothing
                children[node, token] = len(tokens)
                tokens.append(token)
                parents.append(node)
            node = children[node, token]
    padding = [0] * (num_nodes - len(tokens))
    return [tokens + padding, parents + padding, [1] * len(tokens) + padding]


def _first_equal_path(tokens: Tensor, parents: Tensor, depths: Tensor, max_depth: int) -> Tensor:
    """Return for each node, `[B, N]`, the first node whose path has the same tokens; arbitrary for padding."""
    ancestors = parents.clamp_min(0)  # 2^k steps up, the root being its own parent
    # equal[i, j]: same depth, and the last 2^k tokens on the paths to i and j agree
    equal = (tokens[:, :, None] == tokens[:, None, :]) & (depths[:, :, None] == depths[:, None, :])
    for _ in range(_doublings(max_depth)):
        above = equal.gather(1, ancestors[:, :, None].expand_as(equal))
        equal = equal & above.gather(2, ancestors[:, None, :].expand_as(equal))
        ancestors = ancestors.gather(1, ancestors)
    # argmax returns the first of equal values; padding, at depth 0, equals no node below the root
    return equal.int().argmax(-1)


def _doublings(steps: int) -> int:
    """Return how often 1 must be doubled to reach `steps`."""
    return max(steps - 1, 0).bit_length()


class Beam:
    """Grow a draft tree level by level, each with the continuations whose paths are most probable.

    No node is discarded: a node without a continuation in the next level stays as a leaf. The number of nodes depends
    on the widths alone, and there is no host sync.

    Args:
        root (`torch.LongTensor` of shape `(B,)`): The last emitted tokens.
        most_nodes (`int`): Most nodes that the tree will have, root included.
    """

    def __init__(self, root: Tensor, most_nodes: int):
        self.tokens = root[:, None]  # `(B, n)`, of the newest level
        # `(B, n)`, sum of the draft's log-probabilities along each path
        self.scores = torch.zeros(self.tokens.shape, device=root.device)
        self.levels = [self.tokens]  # of every level, the root's first
        # parents `(B, n)` as indices into the tree, and their places within the level above; likewise
        self.parents = self.parent_places = [torch.full_like(self.tokens, -1)]
        self.num_nodes = 1
        self._scores = [self.scores]
        self._identity = torch.eye(most_nodes, dtype=torch.bool, device=root.device)
        # rows of the tree mask, as wide as it will be
        self._masks = [self._identity[:1].expand(len(root), 1, -1)]

    @property
    def ancestor_mask(self) -> Tensor:
        """Rows `(B, n, N)` of the tree mask: ancestors of the newest level among the N nodes so far, and itself."""
        return self._masks[-1][:, :, : self.num_nodes]

    def paths(self) -> Tensor:
        """Return the drafted tokens `(B, n, depth)` that lead to each node of the newest level, its own token last."""
        node, tokens = torch.arange(self.tokens.shape[1], device=self.tokens.device).expand_as(self.tokens), []
        for depth in range(len(self.levels) - 1, 0, -1):
            tokens.append(self.levels[depth].gather(1, node))
            node = self.parent_places[depth].gather(1, node)
        return torch.stack(tokens[::-1], -1) if tokens else self.tokens[..., None][..., :0]

    def grow(self, logits: Tensor, width: int, token_ids: Tensor | None = None) -> None:
        """Add the best `width` continuations of the newest level as the next level; fewer if there are fewer.

        Args:
            logits (`torch.Tensor` of shape `(B, n, V)`): The draft's after each node of the newest level, or
                log-probabilities up to a constant per node; `(B, 1, V)` if all nodes of the level have the same.
            width (`int`): Number of continuations.
            token_ids (`torch.LongTensor` of shape `(V,)`, *optional*): Tokens of the logits. 0, 1, 2, ... by default.
        """
        count, each = self.tokens.shape[1], min(width, logits.shape[-1])
        best, tokens = logits.topk(each, dim=-1)
        scores = self.scores - log_total(logits, best[..., :1])
        best = best.float()
        scores = best + (scores - best[..., 0])[..., None]
        # after a node whose tokens are all forbidden
        scores = scores.nan_to_num_(-torch.inf, torch.inf, -torch.inf)
        self.scores, places = scores.flatten(1).topk(min(width, count * each), dim=-1)
        parent = places // each
        self.tokens = tokens.expand(-1, count, -1).flatten(1).gather(1, places)
        if token_ids is not None:
            self.tokens = token_ids[self.tokens]
        first, self.num_nodes = self.num_nodes, self.num_nodes + places.shape[1]
        inherited = self._masks[-1].gather(1, parent[..., None].expand(-1, -1, len(self._identity)))
        self._masks.append(inherited | self._identity[first : self.num_nodes])
        self.levels.append(self.tokens)
        self.parents = [*self.parents, parent + (first - count)]
        self.parent_places = [*self.parent_places, parent]
        self._scores.append(self.scores)

    @property
    def shares(self) -> list[float]:
        """Probability of the newest token of a chain after those before it, by row."""
        shares: list[float] = (self._scores[-1] - self._scores[-2])[:, 0].exp().nan_to_num(0.0).tolist()
        return shares

    def cut(self, count: int) -> None:
        """Drop all levels after the first `count`."""
        for kept in (self.levels, self._scores, self._masks):
            del kept[count + 1 :]
        self.parents, self.parent_places = self.parents[: count + 1], self.parent_places[: count + 1]
        self.tokens, self.scores = self.levels[-1], self._scores[-1]
        self.num_nodes = sum(level.shape[1] for level in self.levels)

    def fields(self, num_nodes: int | None = None) -> tuple[Tensor, ...]:
        """Return the [`DraftTree.fields`] of all levels, in level order; of the best `num_nodes` if there are more.

        The best nodes are those with the most probable paths. They form a tree, as no path is more probable than its
        beginning.
        """
        total = self.num_nodes
        tokens, mask = torch.cat(self.levels, 1), torch.cat(self._masks, 1)[..., :total]
        parents, depths = torch.cat(self.parents, 1), tree_depths(mask)
        if num_nodes is not None and num_nodes < total:
            scores = torch.cat(self._scores, 1)[:, None]
            # rounding may rank a node above its parent; of equal scores, the first one belongs to the ancestor
            scores = scores.masked_fill(~mask, torch.inf).amin(-1)
            kept = scores.sort(dim=1, descending=True, stable=True).indices[:, :num_nodes].sort(1).values
            places = torch.zeros_like(tokens).scatter(
                1, kept, torch.arange(num_nodes, device=kept.device).expand_as(kept)
            )
            parents = places.gather(1, parents.gather(1, kept).clamp_min(0))
            parents[:, 0] = -1
            tokens, depths = tokens.gather(1, kept), depths.gather(1, kept)
            mask = mask.gather(1, kept[..., None].expand(-1, -1, total)).gather(
                2, kept[:, None].expand(-1, num_nodes, -1)
            )
        return tokens, parents, torch.ones_like(tokens, dtype=torch.bool), depths, mask


def log_total(logits: Tensor, largest: Tensor) -> Tensor:
    """Return the logarithm of the sum of `exp(logits - largest)` over the last dimension, in float32.

    `largest` `(..., 1)` are the largest logits. There is no float32 copy of bfloat16 logits.

    >>> log_total(torch.zeros(1, 4), torch.zeros(1, 1)).exp().item()
    4.0
    """
    return (logits - largest).exp_().sum(-1, dtype=torch.float32).log_()
