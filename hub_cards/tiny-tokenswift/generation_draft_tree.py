# Published with a draft by hf_longspec, Apache-2.0.
"""The draft tree: which tokens a drafter proposes, and after which of the others each one comes.

Node 0 is the root, the last emitted token. Every other node has one parent with a smaller index, so a node's path is
found by following parents, and the tree is two integer tensors of a fixed size. Rows with fewer candidates are padded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from .generation_trie import blank_repeats, build_trie, doublings, first_equal_path, join_below_root, keep_first


@dataclass(frozen=True, eq=False)
class DraftTree:
    """
    Candidate continuations of every batch row, as one tree per row.

    Nothing is checked on construction, since a tree is built in every iteration; see [`DraftTree.validate`].

    Args:
        tokens (`torch.LongTensor` of shape `(batch_size, num_nodes)`):
            Token of each node. Node 0, the root, holds the last emitted token.
        parents (`torch.LongTensor` of shape `(batch_size, num_nodes)`):
            Index of each node's parent, smaller than the node's own; -1 for the root. Any node for padding.
        valid (`torch.BoolTensor` of shape `(batch_size, num_nodes)`):
            False marks padding, which attends to itself only and is never accepted.
        q (`torch.Tensor` of shape `(batch_size, num_nodes, vocab_size)`, *optional*):
            Row i is the law from which the token of node i was really drawn; row 0 is unused. `None` if the
            candidates are not random.
        is_chain (`bool`, *optional*, defaults to `False`):
            Whether node i has parent i - 1 in every row, so that accepted nodes already lie side by side.
        max_depth (`int`, *optional*, defaults to `num_nodes - 1`):
            Bound on the depth of any node, known without reading the tensors. Nodes below it are never accepted.

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
        """A tree without branches: `tokens` of shape `(batch_size, num_nodes)` one after another, root first.

        Shapes and views of `valid` and `q` are those of the class. In a row of `valid`, padding comes last.
        """
        batch_size, num_nodes = tokens.shape
        parents, depths, mask, all_valid = _chain_structure(num_nodes, tokens.device)
        everywhere = all_valid.expand(batch_size, -1)
        tree = cls(tokens, parents.expand(batch_size, -1), everywhere if valid is None else valid, q, is_chain=True)
        if valid is None:  # fills the cached properties, so that a step launches nothing for them
            tree.__dict__.update(depths=depths.expand(batch_size, -1), mask=mask.expand(batch_size, -1, -1))
        return tree

    @classmethod
    def root_only(cls, root: Tensor) -> "DraftTree":
        """The tree that proposes nothing after `root`, of shape `(batch_size,)`: plain autoregressive decoding."""
        return cls.chain(root[:, None])

    @property
    def num_nodes(self) -> int:
        """Nodes per row, root and padding included."""
        return self.tokens.shape[1]

    @cached_property
    def mask(self) -> Tensor:
        """`(batch_size, num_nodes, num_nodes)`, see [`tree_mask`]. Possibly an expanded view: do not write to it."""
        return tree_mask(self.parents, self.valid, self.max_depth)

    @cached_property
    def depths(self) -> Tensor:
        """`(batch_size, num_nodes)`: distance of each node from the root, 0 for padding."""
        return tree_depths(self.mask)

    def best_chain(self, row: int = 0) -> Tensor:
        """Tokens of the longest path of one batch row, root excluded; of equally long ones, that listed first.

        >>> merge_paths([[[4], [7, 9], [7, 3]]], root=torch.tensor([5]), num_nodes=6).best_chain().tolist()
        [7, 9]
        """
        # argmax returns the first of equal values, hence the first of the deepest nodes
        path = self.mask[row, self.depths[row].argmax()].clone()
        path[0] = False
        return self.tokens[row][path]

    def validate(self) -> None:
        """Check everything the fast path takes for granted; for tests and new drafters. Reads the tensors.

        Raises:
            ValueError: Names the first entry that breaks a rule.
        """
        self._validate_shapes()
        nodes = torch.arange(self.num_nodes, device=self.tokens.device)
        parents, valid, drafted = self.parents, self.valid, self.valid & (nodes > 0)
        _refuse_any(~valid[:, :1], valid, "valid", "True, since the root is never padding")
        _refuse_any(parents[:, :1] != -1, parents, "parents", "-1. Node 0 is the root and has no parent")
        late = drafted & ((parents < 0) | (parents >= nodes))
        _refuse_any(late, parents, "parents", "an earlier node. List every parent before its children")
        orphans = drafted & ~valid.gather(1, parents.clamp(0, self.num_nodes - 1))
        _refuse_any(orphans, parents, "parents", "a valid node. Mark the descendants of padding as padding too")
        depths = tree_depths(tree_mask(parents, valid))
        _refuse_any(depths > self.max_depth, depths, "depths", f"at most {self.max_depth}. Raise max_depth")
        if self.is_chain:
            broken = drafted & (parents != nodes - 1)
            _refuse_any(broken, parents, "parents", "the previous node in a chain. Pass is_chain=False for a tree")
        if self.q is not None:
            total = self.q.double().sum(-1)
            wrong = drafted & (((total - 1).abs() > Q_SUM_TOLERANCE) | (self.q < 0).any(-1))
            _refuse_any(wrong, total, "the sum of q", "1, of terms >= 0. Pass probabilities, not scores")

    def _validate_shapes(self) -> None:
        shape, valid, q = tuple(self.tokens.shape), self.valid, self.q
        if len(shape) != 2 or shape[1] < 1:
            raise ValueError(f"tokens has shape {shape}, expected (batch_size, num_nodes >= 1). Include the root.")
        for name, found in (("parents", tuple(self.parents.shape)), ("valid", tuple(valid.shape))):
            if found != shape:
                raise ValueError(f"{name} has shape {found}, expected {shape} as tokens. Pad rows to one length.")
        if q is not None and (q.dim() != 3 or tuple(q.shape[:2]) != shape):
            raise ValueError(f"q has shape {tuple(q.shape)}, expected {(*shape, 'vocab_size')}. Keep a row 0.")
        if valid.dtype != torch.bool:
            raise ValueError(f"valid has dtype {valid.dtype}, expected torch.bool. Convert it with .bool().")


# float16 laws over a vocabulary of 150,000 sum to 1 within this
Q_SUM_TOLERANCE = 1e-2


def tree_mask(parents: Tensor, valid: Tensor | None = None, max_depth: int | None = None) -> Tensor:
    """Which nodes of a draft tree each node attends to: itself and its ancestors.

    The prefix is left out, as all of it is visible to every node.

    Args:
        parents (`torch.LongTensor` of shape `(batch_size, num_nodes)`):
            Index of each node's parent, -1 for the root.
        valid (`torch.BoolTensor` of shape `(batch_size, num_nodes)`, *optional*):
            False marks padding, which sees only itself.
        max_depth (`int`, *optional*, defaults to `num_nodes - 1`):
            Bound on the depth of any node; a small one saves work.

    Returns:
        `torch.BoolTensor` of shape `(batch_size, num_nodes, num_nodes)`, query node first.

    >>> tree_mask(torch.tensor([[-1, 0, 1, 0]]))[0].int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]
    """
    nodes = torch.arange(parents.shape[1], device=parents.device)
    edges = parents[..., None] == nodes  # [B, N, N]
    if valid is not None:
        edges = edges & valid[..., None]
    reach = edges | (nodes[:, None] == nodes)
    # each squaring doubles the number of steps towards the root that are covered
    for _ in range(doublings(parents.shape[1] - 1 if max_depth is None else max_depth)):
        steps = reach.float()
        reach = torch.bmm(steps, steps) > 0
    return reach


def tree_depths(mask: Tensor) -> Tensor:
    """Depth of each node, `(batch_size, num_nodes)`, from the mask of [`tree_mask`]: 0 for root and padding."""
    return mask.sum(-1) - 1


def merge_paths(
    paths: Sequence[Sequence[Sequence[int]]], root: Tensor, num_nodes: int, max_depth: int | None = None
) -> DraftTree:
    """Trie of candidate paths: a prefix shared by several paths becomes one node. Runs on the host.

    Args:
        paths (`list[list[list[int]]]`):
            For each batch row its candidate continuations, root excluded, best first.
        root (`torch.LongTensor` of shape `(batch_size,)`):
            Last emitted tokens; also decides the device of the tree.
        num_nodes (`int`): Size of the tree, root included. When it is full, what is left of later paths is dropped.
        max_depth (`int`, *optional*, defaults to `num_nodes - 1`):
            Longer paths are cut to this length.

    Raises:
        ValueError: If `num_nodes` is below 1, or the number of rows differs from that of `root`.

    >>> tree = merge_paths([[[7, 9], [7, 3]]], root=torch.tensor([5]), num_nodes=5)
    >>> tree.tokens.tolist(), tree.parents.tolist(), tree.valid.sum().item()
    ([[5, 7, 9, 3, 0]], [[-1, 0, 1, 1, 0]], 4)
    """
    if num_nodes < 1:
        raise ValueError(f"num_nodes is {num_nodes}, expected at least 1. The root needs a node.")
    if len(paths) != root.shape[0]:
        raise ValueError(f"paths has {len(paths)} rows, expected {root.shape[0]} as root. Pass [] for an empty row.")
    max_depth = num_nodes - 1 if max_depth is None else max_depth
    rows = [build_trie([path[:max_depth] for path in row], num_nodes) for row in paths]
    tokens, parents, valid = torch.tensor(rows, device=root.device).reshape(-1, 3, num_nodes).unbind(1)
    tokens = torch.cat([root[:, None], tokens[:, 1:]], dim=1)
    return DraftTree(tokens, parents, valid.bool(), max_depth=max_depth)


def merge_trees(trees: Sequence[DraftTree], num_nodes: int | None = None) -> DraftTree:
    """One trie out of several deterministic trees over the same roots, on their device and without reading it.

    Nodes keep their order, earlier trees first; what does not fit into `num_nodes` is dropped. By default each node
    keeps its place, node i of the first tree being node i, and repeated paths become padding.

    Raises:
        ValueError: If there is no tree, `num_nodes` is below 1, or a tree carries draft laws `q`.

    >>> beams = merge_paths([[[7, 9]]], root=torch.tensor([5]), num_nodes=3)
    >>> merge_trees([beams, DraftTree.chain(torch.tensor([[5, 7, 3]]))], num_nodes=4).tokens.tolist()
    [[5, 7, 9, 3]]
    """
    if not trees or (num_nodes is not None and num_nodes < 1):
        raise ValueError(f"cannot merge {len(trees)} trees into {num_nodes} nodes, expected at least 1 of each.")
    if any(tree.q is not None for tree in trees):
        raise ValueError("a tree has q, expected None. Only deterministic candidates can share a trie.")
    max_depth = max(tree.max_depth for tree in trees)
    fields = join_below_root([(tree.tokens, tree.parents, tree.valid) for tree in trees])
    depths = torch.cat([trees[0].depths[:, :1], *(tree.depths[:, 1:] for tree in trees)], dim=1)
    first = first_equal_path(fields[0], fields[1], depths, max_depth)
    if num_nodes is None:
        return DraftTree(*blank_repeats(*fields, first), max_depth=max_depth)
    return DraftTree(*keep_first(*fields, first, num_nodes), max_depth=min(max_depth, num_nodes - 1))


@lru_cache(maxsize=64)
def _chain_structure(num_nodes: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Parents, depths, mask and validity of a chain, each with a batch dimension of 1 to expand."""
    with torch.inference_mode(False):  # they outlive the call, which may run under inference mode
        depths = torch.arange(num_nodes, device=device)[None]
        mask = depths[:, :, None] >= depths[:, None, :]
        return depths - 1, depths, mask, torch.ones_like(depths, dtype=torch.bool)


def _refuse_any(bad: Tensor, values: Tensor, name: str, rule: str) -> None:
    places = bad.nonzero().tolist()
    if places:
        value = values[tuple(places[0])].item()
        raise ValueError(f"{name}{places[0]} is {value}, expected {rule}.")
