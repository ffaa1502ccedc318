"""Acceptance rules: walks against a walk over dictionaries, and edge cases."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_longspec.generation.draft_tree import DraftTree
from hf_longspec.generation.verification import (
    accept_rejection,
    accept_sampled,
    draw_noise,
    drawn,
    gumbel_max_sample,
    walk,
)
from tests.distributions import random_tree

V = 6


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def dictionary_walk(tree: DraftTree, choice: torch.Tensor, row: int) -> tuple[list[int], list[int]]:
    """Return path and tokens of one row by a walk over a dictionary; the first of siblings with one token is taken."""
    children: dict[tuple[int, int], int] = {}
    for node in range(1, tree.num_nodes):
        if tree.valid[row, node]:
            children.setdefault((int(tree.parents[row, node]), int(tree.tokens[row, node])), node)
    path, tokens = [0], []
    while True:
        tokens.append(int(choice[row, path[-1]]))
        if (path[-1], tokens[-1]) not in children:
            return path, tokens
        path.append(children[path[-1], tokens[-1]])


def assert_is(acceptance, row, path, tokens):
    """Check that a row has this path and these tokens, padded as documented in [`Acceptance`]."""
    missing = acceptance.path.shape[1] - len(path)
    assert acceptance.num_nodes[row] == len(path) == len(tokens)
    assert acceptance.path[row].tolist() == path + path[-1:] * missing
    assert acceptance.tokens[row].tolist() == tokens + [0] * missing
    assert acceptance.next_root[row] == tokens[-1]


@given(
    seed=st.integers(0, 2**32),
    batch_size=st.integers(1, 4),
    num_nodes=st.sampled_from([1, 2, 3, 7, 17, 33]),
    vocab_size=st.integers(1, 5),
)
def test_walk_matches_a_walk_over_dictionaries(seed, batch_size, num_nodes, vocab_size):
    tree = random_tree(seed, batch_size, num_nodes, vocab_size)
    choice = torch.randint(vocab_size, tree.tokens.shape, generator=seeded(seed))
    acceptance = walk(tree, choice)
    assert acceptance.path.shape == acceptance.tokens.shape == (batch_size, num_nodes)
    for row in range(batch_size):
        assert_is(acceptance, row, *dictionary_walk(tree, choice, row))


@given(seed=st.integers(0, 2**32), num_nodes=st.sampled_from([1, 2, 5, 16]))
def test_walk_of_a_chain_matches_a_walk_over_dictionaries(seed, num_nodes):
    """Chains take a shortcut. It must stop at padding, even at padding that carries the target's choice."""
    tokens = torch.randint(2, (8, num_nodes), generator=seeded(seed))
    lengths = torch.randint(1, num_nodes + 1, (8, 1), generator=seeded(seed + 1))
    chain = DraftTree.chain(tokens, valid=torch.arange(num_nodes) < lengths)
    choice = tokens.roll(-1, 1) ^ (torch.rand(8, num_nodes, generator=seeded(seed)) < 0.1).long()
    scores = torch.nn.functional.one_hot(choice, 2).double().log()
    by_choice, drawn = walk(chain, choice), accept_sampled(chain, scores, torch.ones(8, num_nodes, 2))
    for row in range(8):
        assert_is(by_choice, row, *dictionary_walk(chain, choice, row))
        assert_is(drawn, row, *dictionary_walk(chain, choice, row))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_race_never_draws_tokens_of_probability_zero(dtype):
    scores = torch.tensor([-torch.inf, 2.0, -torch.inf, -60.0], dtype=dtype).expand(1000, -1)
    noise = draw_noise(1000, 4, generator=seeded())
    noise[:500, 0] = 0.0
    noise[250:, 1] = 50.0
    assert set(gumbel_max_sample(scores, noise).tolist()) <= {1, 3}


BAD = {"all -inf": torch.full((V,), -torch.inf), "nan": torch.tensor([1.0, torch.nan, 0.0, 0.0, 0.0, 0.0])}
BAD |= {"inf": torch.tensor([1.0, torch.inf, 0.0, 0.0, 0.0, 0.0])}


@pytest.mark.parametrize("name", BAD)
def test_scores_are_drawn_from_where_torch_multinomial_draws(name):
    good = torch.tensor([-torch.inf, 3e38, -3e38, 0.0, 1.0, -torch.inf])
    noise = draw_noise(2, V, generator=seeded())
    assert drawn(torch.stack([BAD[name], good]), noise).tolist() == [-1, 1]
    assert torch.multinomial(good.softmax(-1), 1).item() == 1
    with pytest.raises(RuntimeError, match="probability tensor contains either"):
        torch.multinomial(BAD[name].softmax(-1), 1)


@pytest.mark.parametrize(("kind", "name"), [("chain", "nan"), ("tree", "all -inf"), ("q", "inf"), ("q", "nan")])
def test_a_walk_ends_where_no_token_can_be_drawn(kind, name):
    """The first row reaches the bad scores after one accepted token, the others do not reach them."""
    chain = DraftTree.chain(torch.tensor([[0, 1, 2]]).repeat(3, 1))
    favoured = torch.tensor([[1, 2, 3], [3, 2, 4], [1, 2, 5]])
    scores = torch.full((3, 3, V), -torch.inf).scatter(2, favoured[..., None], 0.0)
    scores[:2, 1], scores[2, 2] = BAD[name], BAD[name]
    noise = torch.ones(3, 3, V)
    if kind == "q":
        tree = DraftTree.chain(chain.tokens, q=torch.full((3, 3, V), 1 / V))
        acceptance = accept_rejection(tree, scores, torch.zeros(3, 2), noise[:, 0])
    else:
        tree = chain if kind == "chain" else DraftTree(chain.tokens, chain.parents, chain.valid)
        acceptance = accept_sampled(tree, scores, noise)
    assert acceptance.num_nodes.tolist() == [2, 1, 3]
    assert acceptance.tokens.tolist() == [[1, -1, 0], [3, 0, 0], [1, 2, -1]]
    assert acceptance.next_root.tolist() == [0, 3, 0]


def chain_with_q(batch_size=4, num_nodes=4, seed=0):
    q = torch.randn(batch_size, num_nodes, V, generator=seeded(seed)).softmax(-1)
    tokens = gumbel_max_sample(q.log(), draw_noise(batch_size, num_nodes, V, generator=seeded(seed + 1)))
    return DraftTree.chain(tokens, q=q)


def test_equal_distributions_accept_every_token():
    tree = chain_with_q(batch_size=500)
    scores = torch.cat([tree.q[:, 1:].log(), torch.zeros(500, 1, V)], dim=1)  # p after node i - 1 is q of node i
    uniforms = torch.rand(500, 3, generator=seeded(3)) * (1 - 1e-5)  # rounding in softmax
    acceptance = accept_rejection(tree, scores, uniforms, draw_noise(500, V, generator=seeded(4)))
    assert (acceptance.num_nodes == 4).all() and torch.equal(acceptance.tokens[:, :3], tree.tokens[:, 1:])


def test_equal_distributions_that_refuse_by_rounding_fall_back_to_p():
    """A uniform draw above 1 imitates rounding against the draft. (p - q)+ is zero everywhere then."""
    q = torch.tensor([0.0, 0.5, 0.5, 0.0, 0.0, 0.0]).expand(64, 2, V)  # halves, which softmax returns exactly
    tree = DraftTree.chain(torch.tensor([[0, 1]]).repeat(64, 1), q=q)
    noise = draw_noise(64, V, generator=seeded())
    acceptance = accept_rejection(tree, q.log(), torch.full((64, 1), 1.5), noise)
    assert (acceptance.num_nodes == 1).all() and torch.equal(
        acceptance.tokens[:, 0], gumbel_max_sample(q[:, 0].log(), noise)
    )


def test_zero_probabilities_at_the_drafted_token():
    """p = 0 refuses even u = 0. A drawn token with q = 0, by rounding, is accepted if p > 0."""
    p = torch.tensor([[0.5, 0.5, 0.0, 0.0, 0.0, 0.0]])
    q = torch.tensor([[0.0, 0.0, 0.5, 0.5, 0.0, 0.0]])
    tree = DraftTree.chain(torch.tensor([[0, 2], [0, 0]]), q=torch.stack([q, q], dim=1).expand(2, -1, -1))
    scores = p.log().expand(2, 2, V)
    acceptance = accept_rejection(tree, scores, torch.zeros(2, 1), torch.ones(2, V))
    assert acceptance.num_nodes.tolist() == [1, 2] and acceptance.tokens.tolist() == [[0, 0], [0, 0]]


def test_rejection_takes_ragged_chains():
    """Padding is not a refusal: the bonus token before it comes from p."""
    tree, lengths = chain_with_q(batch_size=60), [1, 2, 4] * 20
    tree = DraftTree.chain(tree.tokens, valid=torch.arange(4) < torch.tensor(lengths)[:, None], q=tree.q)
    scores = torch.randn(60, 4, V, generator=seeded(7))
    noise = draw_noise(60, V, generator=seeded(8))
    acceptance = accept_rejection(tree, scores, torch.zeros(60, 3), noise)
    for row, length in enumerate(lengths):
        bonus = int(gumbel_max_sample(scores[row, length - 1], noise[row]))
        assert_is(acceptance, row, list(range(length)), [*tree.tokens[row, 1:length].tolist(), bonus])
