"""The comparison of sampled frequencies with a distribution, and random trees."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_longspec.generation.draft_tree import DraftTree, trie_of, trie_table

# Counts that Pearson's test needs of every outcome, by the usual rule of thumb.
FEWEST_OF_PEARSON = 5


def p_value(samples: Tensor, distribution: Tensor) -> float:
    """Probability that samples of the distribution deviate as much: Pearson's test over all outcomes at once.

    `samples` of independent rows are `(rows,)` tokens, or `(rows, k)` for k tokens in order, and `distribution`
    has k dimensions. It is 0 if an impossible outcome occurred. The rarest outcomes are pooled.

    >>> p_value(torch.tensor([0, 1]).repeat_interleave(100), torch.tensor([0.5, 0.5, 0.0]))
    1.0
    >>> round(p_value(torch.tensor([0] * 120 + [1] * 80), torch.tensor([0.5, 0.5, 0.0])), 4)
    0.0047
    """
    counts, p = _counts(samples, distribution)
    if counts[p == 0].any():
        return 0.0
    counts, p = _pool_rare(counts[p > 0], p[p > 0])
    counts, expected = counts[p > 0], len(samples) * p[p > 0]
    deviation = ((counts - expected).square() / expected).sum()
    freedom = torch.tensor(len(counts) - 1, dtype=torch.double)
    return float(torch.special.gammaincc(freedom / 2, deviation / 2))


def _counts(samples: Tensor, distribution: Tensor) -> tuple[Tensor, Tensor]:
    """Count of every outcome and its probability, the rarest first."""
    samples = samples if samples.dim() == 2 else samples[:, None]
    if distribution.dim() != samples.shape[1] or abs(distribution.double().sum().item() - 1) > 1e-5:
        raise ValueError(
            f"distribution has {distribution.dim()} dimensions and sum {distribution.sum().item():.6f}, expected "
            f"{samples.shape[1]} and 1. Pass the joint distribution of the sampled tokens, normalised."
        )
    outcome = torch.zeros_like(samples[:, 0])
    for column, size in zip(samples.unbind(1), distribution.shape, strict=True):
        outcome = outcome * size + column
    counts = torch.bincount(outcome, minlength=distribution.numel()).double()
    p, order = distribution.double().flatten().cpu().sort()
    counts = counts.cpu()[order]
    return counts, p


def _pool_rare(counts: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the smallest outcomes, sorted by probability, until enough counts are expected of the sum."""
    expected = p * counts.sum()
    rare = (expected < FEWEST_OF_PEARSON) | (expected.cumsum(0) - expected < FEWEST_OF_PEARSON)
    counts, p = ((torch.cat([x[~rare], x[rare].sum()[None]])) for x in (counts, p))
    return counts, p


def trie(
    paths: Sequence[Sequence[Sequence[int]]], root: Tensor, num_nodes: int, max_depth: int | None = None
) -> DraftTree:
    """Tree of `num_nodes` nodes that merges the paths of each row, none longer than `max_depth`."""
    max_depth = num_nodes - 1 if max_depth is None else max_depth
    return trie_of(trie_table(paths, root, num_nodes, max_depth), root, max_depth)


def random_tree(seed: int, batch_size: int, num_nodes: int, vocab_size: int, padding: float = 0.2) -> DraftTree:
    """Trees of any shape, with duplicated siblings when `vocab_size` is small, and padding among the nodes."""
    rng = random.Random(seed)
    tokens = [[rng.randrange(vocab_size) for _ in range(num_nodes)] for _ in range(batch_size)]
    parents = [[-1, *(rng.randrange(node) for node in range(1, num_nodes))] for _ in range(batch_size)]
    valid = [[True] for _ in range(batch_size)]
    for row in range(batch_size):
        for node in range(1, num_nodes):
            valid[row].append(valid[row][parents[row][node]] and rng.random() >= padding)
    return DraftTree(torch.tensor(tokens), torch.tensor(parents), torch.tensor(valid))
