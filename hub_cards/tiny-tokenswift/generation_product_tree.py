# Published with a draft by hf_longspec, Apache-2.0.
"""Trees in which all nodes of a level have equally many children: the same ones, or each its own."""

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import torch

from .generation_draft_tree import DraftTree


def product_tree(root: torch.Tensor, levels: Sequence[torch.Tensor]) -> DraftTree:
    """The tree of all combinations of one token per level.

    Its structure depends on the widths alone and is made once; a step gathers the tokens and nothing else.

    Args:
        root (`torch.LongTensor` of shape `(B,)`): Last emitted tokens.
        levels (sequence of `torch.LongTensor` of shape `(B, k)`): Children of every node of the level before.

    >>> tree = product_tree(torch.tensor([5]), [torch.tensor([[7]]), torch.tensor([[8, 9]])])
    >>> tree.tokens.tolist(), tree.parents.tolist()
    ([[5, 7, 8, 9]], [[-1, 0, 1, 1]])
    """
    branching = tuple(level.shape[1] for level in levels)
    columns = _structure(branching, root.device)[0]
    candidates = torch.cat([root[:, None], *levels], dim=1)
    return _with_tokens(candidates.index_select(1, columns), branching)


def sibling_tree(root: torch.Tensor, levels: Sequence[torch.Tensor], branching: Sequence[int]) -> DraftTree:
    """The tree in which every node of a level has the same number of children, but its own.

    Args:
        root (`torch.LongTensor` of shape `(B,)`): Last emitted tokens.
        levels (sequence of `torch.LongTensor` of shape `(B, n)`): Nodes of each level, those of one parent together.
        branching (sequence of `int`): Children of a node, level by level.

    >>> tree = sibling_tree(torch.tensor([5]), [torch.tensor([[7, 8]]), torch.tensor([[1, 2]])], [2, 1])
    >>> tree.tokens.tolist(), tree.parents.tolist()
    ([[5, 7, 8, 1, 2]], [[-1, 0, 0, 1, 2]])
    """
    return _with_tokens(torch.cat([root[:, None], *levels], dim=1), tuple(branching))


def _with_tokens(tokens: torch.Tensor, branching: tuple[int, ...]) -> DraftTree:
    _, parents, depths, mask, valid = _structure(branching, tokens.device)
    tree = DraftTree(
        tokens,
        parents.expand_as(tokens),
        valid.expand_as(tokens),
        is_chain=max(branching, default=1) == 1,
        max_depth=len(branching),
    )
    # fills the cached properties, so that a step launches nothing for them
    tree.__dict__.update(depths=depths.expand_as(tokens), mask=mask.expand(len(tokens), -1, -1))
    return tree


def num_product_nodes(branching: Sequence[int]) -> int:
    """Nodes of the tree, root included.

    >>> num_product_nodes([1, 3, 3, 3])
    41
    """
    return 1 + sum(prod(branching[: depth + 1]) for depth in range(len(branching)))


@lru_cache(maxsize=64)
def _structure(branching: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, ...]:
    """For each node its column among root and candidates, parent and depth; then mask and validity; batch of 1."""
    columns, parents, depths, level, first = [0], [-1], [0], [0], 1
    for depth, children in enumerate(branching, start=1):
        above, level = level, []
        for parent in above:
            for rank in range(children):
                level.append(len(columns))
                columns.append(first + rank)
                parents.append(parent)
                depths.append(depth)
        first += children
    with torch.inference_mode(False):  # they outlive the call, which may run under inference mode
        places = torch.tensor([columns, parents, depths], device=device)
        valid = torch.ones_like(places[:1], dtype=torch.bool)
        mask = DraftTree(places[:1], places[1:2], valid, max_depth=len(branching)).mask
        return places[0], places[1:2], places[2:], mask, valid
