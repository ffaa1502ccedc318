"""Trees of all combinations against `itertools.product`."""

from itertools import product
from math import prod

import pytest
import torch

from hf_longspec.generation.draft_tree import merge_trees, tree_depths, tree_mask
from hf_longspec.generation.product_tree import num_product_nodes, product_tree, sibling_tree

WIDTHS = [(1, 3, 3, 3), (3, 3, 3), (2, 1, 4), (5,), (1, 1, 1), (1,), (7, 2)]


def levels_of(widths, batch=2):
    """Different tokens everywhere."""
    numbers = iter(range(10, 1000))
    return [torch.tensor([[next(numbers) for _ in range(width)] for _ in range(batch)]) for width in widths]


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_paths_are_all_combinations_the_best_first(widths):
    levels, root = levels_of(widths), torch.tensor([5, 6])
    tree = product_tree(root, levels)
    tree.validate()
    assert tree.num_nodes == num_product_nodes(widths)
    assert tree.is_chain == (max(widths) == 1)
    assert tree.max_depth == len(widths)
    for row in range(2):
        expected = [[int(root[row])]]
        for depth in range(1, len(widths) + 1):
            tokens = [level[row].tolist() for level in levels[:depth]]
            expected += [[int(root[row]), *path] for path in product(*tokens)]
        assert [tree.tokens[row][seen].tolist() for seen in tree.mask[row]] == expected
        assert tree.best_chain(row).tolist() == [int(level[row, 0]) for level in levels]


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_siblings_lie_together_behind_their_own_parent(widths):
    levels = levels_of([prod(widths[: depth + 1]) for depth in range(len(widths))])
    tree = sibling_tree(torch.tensor([5, 6]), levels, widths)
    tree.validate()
    assert tree.num_nodes == num_product_nodes(widths) and tree.is_chain == (max(widths) == 1)
    for row in range(2):
        above, parents = [row + 5], {row + 5: -1}
        for level, width in zip(levels, widths, strict=True):
            tokens = level[row].tolist()
            parents |= {token: above[place // width] for place, token in enumerate(tokens)}
            above = tokens
        nodes = tree.tokens[row].tolist()
        assert nodes == list(parents)
        assert [-1 if parent < 0 else nodes[parent] for parent in tree.parents[row]] == list(parents.values())


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_mask_and_depths_are_those_of_the_parents(widths):
    tree = product_tree(torch.tensor([5, 6]), levels_of(widths))
    mask = tree_mask(tree.parents, tree.valid)
    assert torch.equal(tree.mask, mask)
    assert torch.equal(tree.depths, tree_depths(mask))


def test_the_structure_is_made_once_and_outlives_inference_mode():
    with torch.inference_mode():
        first = product_tree(torch.tensor([5, 6]), levels_of((3, 1, 2)))
    second = product_tree(torch.tensor([7, 8]), levels_of((3, 1, 2)))
    assert first.parents.data_ptr() == second.parents.data_ptr()
    assert first.mask.data_ptr() == second.mask.data_ptr()
    assert not second.mask.is_inference()


def test_a_level_with_the_same_candidates_again_is_no_duplicate_path():
    """Merged with a chain that spells one of its paths, the tree keeps its nodes and gets none."""
    tree = product_tree(torch.tensor([5]), [torch.tensor([[7, 8]]), torch.tensor([[7, 8]])])
    chain = product_tree(torch.tensor([5]), [torch.tensor([[8]]), torch.tensor([[7]])])
    merged = merge_trees([tree, chain], num_nodes=9)
    assert merged.valid.sum() == 7
    assert torch.equal(merged.tokens[:, :7], tree.tokens)
