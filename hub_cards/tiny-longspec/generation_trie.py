# Published with a draft by hf_longspec, Apache-2.0.
"""Merging candidates so that a path spelled twice becomes one node: once on the host for token lists, once on the
device for trees. Behind `merge_paths` and `merge_trees` of draft_tree.py, which explain the tensors.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def build_trie(paths: Sequence[Sequence[int]], num_nodes: int) -> list[list[int]]:
    """Tokens, parents and validity of a trie of one row's paths, padded; the token of the root is left at 0.

    >>> build_trie([[7, 9], [7, 3]], num_nodes=5)
    [[0, 7, 9, 3, 0], [-1, 0, 1, 1, 0], [1, 1, 1, 1, 0]]
    """
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


def join_below_root(trees: Sequence[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Hang the nodes of all trees, given as tokens, parents and valid, below the root of the first."""
    tokens, parents, valid = ([field] for field in trees[0])
    for more_tokens, more_parents, more_valid in trees[1:]:
        shift = sum(field.shape[1] for field in tokens) - 1
        below = more_parents[:, 1:]
        tokens.append(more_tokens[:, 1:])
        parents.append(torch.where(below > 0, below + shift, 0))
        valid.append(more_valid[:, 1:])
    return torch.cat(tokens, dim=1), torch.cat(parents, dim=1), torch.cat(valid, dim=1)


def first_equal_path(tokens: Tensor, parents: Tensor, depths: Tensor, max_depth: int) -> Tensor:
    """For each node, `[B, N]`, the first node whose path spells the same tokens; arbitrary for padding."""
    ancestors = parents.clamp_min(0)  # 2^k steps up, the root being its own parent
    # equal[i, j]: same depth, and the last 2^k tokens on the paths to i and j agree
    equal = (tokens[:, :, None] == tokens[:, None, :]) & (depths[:, :, None] == depths[:, None, :])
    for _ in range(doublings(max_depth)):
        above = equal.gather(1, ancestors[:, :, None].expand_as(equal))
        equal = equal & above.gather(2, ancestors[:, None, :].expand_as(equal))
        ancestors = ancestors.gather(1, ancestors)
    # argmax returns the first of equal values; padding, at depth 0, equals no node below the root
    return equal.int().argmax(-1)


def keep_first(
    tokens: Tensor, parents: Tensor, valid: Tensor, first: Tensor, num_nodes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Drop the nodes that another one stands for, `first` saying which, and fit the rest into `num_nodes` in order."""
    keep = valid & (first == torch.arange(first.shape[1], device=first.device))
    order = (~keep).long().argsort(dim=1, stable=True)
    place = order.argsort(dim=1)
    kept_parents = place.gather(1, first.gather(1, parents.clamp_min(0))).gather(1, order)
    kept_parents[:, 0] = -1
    kept = tokens.gather(1, order), kept_parents, keep.gather(1, order)
    tokens, parents, valid = (_fit_length(field, num_nodes) for field in kept)
    return tokens, parents, valid


def blank_repeats(tokens: Tensor, parents: Tensor, valid: Tensor, first: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Turn the nodes that another one stands for, `first` saying which, into padding; every node keeps its place."""
    adopted = first.gather(1, parents.clamp_min(0))
    adopted[:, 0] = -1
    return tokens, adopted, valid & (first == torch.arange(first.shape[1], device=first.device))


def _fit_length(field: Tensor, num_nodes: int) -> Tensor:
    """Pad with 0 or cut to `num_nodes`; a cut is harmless, as it takes descendants before their ancestors."""
    missing = num_nodes - field.shape[1]
    return torch.nn.functional.pad(field, (0, missing)) if missing > 0 else field[:, :num_nodes]


def doublings(steps: int) -> int:
    """How often 1 must be doubled to reach `steps`."""
    return max(steps - 1, 0).bit_length()
