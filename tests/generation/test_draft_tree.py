"""Draft trees against double loops over parents, sets of paths and `itertools.product`."""

from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_longspec.generation.draft_tree import (
    Beam,
    DraftTree,
    merge_trees,
    num_static_nodes,
    static_tree,
    tree_depths,
    tree_mask,
)
from tests.distributions import random_tree, trie
from tests.valid_tree import check_tree

trees = st.builds(
    random_tree,
    seed=st.integers(0, 2**32),
    batch_size=st.integers(1, 3),
    num_nodes=st.sampled_from([1, 2, 3, 5, 9, 17, 33]),
    vocab_size=st.integers(1, 9),
)
candidates = st.lists(st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=6), min_size=1, max_size=3)


def ancestors(tree: DraftTree, row: int, node: int) -> set[int]:
    """Return the node and its ancestors, found by following parents."""
    found = {node}
    while tree.valid[row, node] and node > 0:
        node = int(tree.parents[row, node])
        found.add(node)
    return found


def spelled_paths(tree: DraftTree, row: int) -> list[tuple[int, ...]]:
    """Return for every valid node except the root the tokens that lead to it."""
    spelled = []
    for node in range(1, tree.num_nodes):
        if tree.valid[row, node]:
            path = sorted(ancestors(tree, row, node) - {0})
            spelled.append(tuple(int(tree.tokens[row, step]) for step in path))
    return spelled


def prefixes(paths, max_depth: int) -> set[tuple[int, ...]]:
    return {tuple(path[:length]) for path in paths for length in range(1, min(len(path), max_depth) + 1)}


@given(tree=trees)
def test_mask_and_depths_match_a_double_loop(tree):
    for row in range(tree.tokens.shape[0]):
        for query in range(tree.num_nodes):
            seen = ancestors(tree, row, query)
            assert tree.mask[row, query].nonzero().flatten().tolist() == sorted(seen)
            assert tree.depths[row, query] == len(seen) - 1
    check_tree(tree)
    # a bound on the depth that is the true depth hides nothing
    assert torch.equal(tree_mask(tree.parents, tree.valid, max_depth=int(tree.depths.max())), tree.mask)


@pytest.mark.parametrize(("num_nodes", "ragged"), list(product((1, 5, 64), (False, True))))
def test_chain_matches_a_tree_with_the_same_parents(num_nodes, ragged):
    tokens = torch.randint(9, (3, num_nodes))
    valid = torch.arange(num_nodes) < torch.tensor([[1], [num_nodes], [max(1, num_nodes // 2)]]) if ragged else None
    chain = DraftTree.chain(tokens, valid=valid)
    check_tree(chain)
    parents = torch.arange(-1, num_nodes - 1).repeat(3, 1)
    tree = DraftTree(tokens, parents, torch.ones_like(tokens, dtype=torch.bool) if valid is None else valid)
    assert chain.is_chain and chain.max_depth == num_nodes - 1
    assert torch.equal(chain.mask, tree.mask) and torch.equal(chain.depths, tree.depths)
    assert torch.equal(chain.parents, tree.parents) and torch.equal(chain.valid, tree.valid)


@given(tree=trees)
def test_best_chain_is_the_longest_path_listed_first(tree):
    for row in range(tree.tokens.shape[0]):
        spelled = spelled_paths(tree, row)
        assert tuple(tree.best_chain(row).tolist()) == max(spelled, key=len, default=())


@given(rows=candidates, num_nodes=st.integers(1, 20), max_depth=st.none() | st.integers(0, 4))
def test_a_trie_is_the_set_of_prefixes(rows, num_nodes, max_depth):
    root = torch.arange(50, 50 + len(rows))
    tree = trie(rows, root, num_nodes, max_depth)
    check_tree(tree)
    assert tree.tokens.shape == (len(rows), num_nodes) and tree.tokens[:, 0].tolist() == root.tolist()
    for row, paths in enumerate(rows):
        spelled, wanted = spelled_paths(tree, row), prefixes(paths, tree.max_depth)
        assert len(spelled) == len(set(spelled)) == min(len(wanted), num_nodes - 1)
        # earlier paths come first, so the kept nodes are the first ones in the order of first appearance
        order = dict.fromkeys(p for path in paths for p in sorted(prefixes([path], tree.max_depth), key=len))
        assert spelled == list(order)[: num_nodes - 1]


@given(first=trees, second=trees)
def test_merge_trees_in_place(first, second):
    """Every node keeps its place, and only the first of equal paths is valid."""
    rows = min(first.tokens.shape[0], second.tokens.shape[0])
    parts = [DraftTree(*(field[:rows] for field in (t.tokens, t.parents, t.valid))) for t in (first, second)]
    parts[1].tokens[:, 0] = parts[0].tokens[:, 0]
    merged = merge_trees(*parts)
    check_tree(merged)
    assert torch.equal(merged.tokens, torch.cat([parts[0].tokens, parts[1].tokens[:, 1:]], 1))
    for row in range(rows):
        both = [path for part in parts for path in spelled_paths(part, row)]
        assert spelled_paths(merged, row) == list(dict.fromkeys(both))


WIDTHS = [(1, 3, 3, 3), (2, 1, 4), (5,), (1, 1, 1), (1,)]


def levels_of(widths, batch=2):
    """Return levels of these widths in which every token is different."""
    numbers = iter(range(10, 1000))
    return [torch.tensor([[next(numbers) for _ in range(width)] for _ in range(batch)]) for width in widths]


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_static_tree_paths_are_all_combinations_best_first(widths):
    levels, root = levels_of(widths), torch.tensor([5, 6])
    tree = static_tree(root, levels, widths)
    check_tree(tree)
    assert tree.num_nodes == num_static_nodes(widths)
    assert tree.is_chain == (max(widths) == 1)
    assert tree.max_depth == len(widths)
    mask = tree_mask(tree.parents, tree.valid)
    assert torch.equal(tree.mask, mask) and torch.equal(tree.depths, tree_depths(mask))
    for row in range(2):
        expected = [[int(root[row])]]
        for depth in range(1, len(widths) + 1):
            tokens = [level[row].tolist() for level in levels[:depth]]
            expected += [[int(root[row]), *path] for path in product(*tokens)]
        assert [tree.tokens[row][seen].tolist() for seen in tree.mask[row]] == expected
        assert tree.best_chain(row).tolist() == [int(level[row, 0]) for level in levels]


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_sibling_tree_gives_each_node_its_own_children(widths):
    levels = levels_of([prod(widths[: depth + 1]) for depth in range(len(widths))])
    tree = static_tree(torch.tensor([5, 6]), levels, widths)
    check_tree(tree)
    assert tree.num_nodes == num_static_nodes(widths) and tree.is_chain == (max(widths) == 1)
    for row in range(2):
        above, parents = [row + 5], {row + 5: -1}
        for level, width in zip(levels, widths, strict=True):
            tokens = level[row].tolist()
            parents |= {token: above[place // width] for place, token in enumerate(tokens)}
            above = tokens
        nodes = tree.tokens[row].tolist()
        assert nodes == list(parents)
        assert [-1 if parent < 0 else nodes[parent] for parent in tree.parents[row]] == list(parents.values())


VOCAB = 11


def random_logits(batch, nodes, seed, vocab=VOCAB):
    return torch.randn(batch, nodes, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def looped_beam(root, tables, widths):
    """Return tokens and parents of one row in float64; `tables[level]` holds the logits of the nodes of that level."""
    tokens, parents, newest, scores = [root], [-1], [0], {0: 0.0}
    for table, width in zip(tables, widths, strict=True):
        candidates = []
        for place, node in enumerate(newest):
            log_probs = table[place].double().log_softmax(-1)
            candidates += [(scores[node] + float(log_probs[token]), node, token) for token in range(len(log_probs))]
        candidates.sort(key=lambda candidate: -candidate[0])
        newest = []
        for score, node, token in candidates[:width]:
            newest.append(len(tokens))
            scores[len(tokens)] = score
            tokens.append(token)
            parents.append(node)
    return tokens, parents


@pytest.mark.parametrize("widths", [[1], [1, 1, 1], [4, 4, 4, 3], [3, 7, 2], [4, 16, 16, 16, 16]])
def test_against_the_double_loop(widths):
    beam = Beam(torch.tensor([5, 6, 7]), 1 + sum(widths))
    tables = []
    for level, width in enumerate(widths):
        tables.append(random_logits(3, beam.tokens.shape[1], level))
        beam.grow(tables[-1], width)
    tree = DraftTree.of_fields(beam.fields(), len(beam.levels) - 1)
    check_tree(tree)
    assert tree.num_nodes == 1 + sum(widths) and tree.max_depth == len(widths)
    for row in range(3):
        expected = looped_beam(5 + row, [table[row] for table in tables], widths)
        assert (tree.tokens[row].tolist(), tree.parents[row].tolist()) == expected
    # the beam maintains mask and depths while it grows; a fresh tree computes them from the parents
    fresh = DraftTree(tree.tokens, tree.parents, tree.valid)
    assert torch.equal(tree.mask, fresh.mask) and torch.equal(tree.depths, fresh.depths)


def test_a_node_without_allowed_continuations_is_the_last_choice():
    """Its scores are all -inf, so its cumulative scores are NaN."""
    beam = Beam(torch.tensor([1]), 8)
    beam.grow(random_logits(1, 1, 0), 2)
    logits = random_logits(1, 2, 1)
    logits[:, 0] = -torch.inf
    beam.grow(logits, 3)
    assert (beam.parent_places[-1] == 1).all() and beam.scores.isfinite().all()
    beam.grow(torch.full((1, 3, VOCAB), -torch.inf), 2)  # a level without any allowed token keeps its size
    check_tree(DraftTree.of_fields(beam.fields(), len(beam.levels) - 1))
