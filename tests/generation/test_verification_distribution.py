"""Distribution of sampled text: the target's for every rule; `pytest -m soak` draws ten times as many rows."""

from itertools import cycle

import pytest
import torch
from transformers import (
    EtaLogitsWarper,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_longspec import ContextualPenaltyLogitsProcessor
from hf_longspec.generation.draft_tree import DraftTree
from hf_longspec.generation.verification import accept_rejection, accept_sampled, draw_noise, gumbel_max_sample
from tests.distributions import LONG_ROWS, SHORT_ROWS, MarkovTarget, p_value

V = 7
PREFIX = torch.tensor([2, 5, 5, 0, 3])  # repeats a token and misses others, so that a repetition penalty shows
BRANCHING = torch.tensor([-1, 0, 0, 1, 1, 2, 4])
BRANCHING_PATHS = [[0], [1], [2], [1, 3], [1, 4], [2, 5], [1, 4, 6]]
LEFTMOST = [0, 1, 4, 6]
DEPTH = 3  # of BRANCHING, and of chains
RIGHT = 1e-4  # A right sampler is below it once in 10,000 comparisons, of fixed seeds.
PROCESSORS = {
    "plain": [],
    "temperature": [TemperatureLogitsWarper(0.6)],
    "top_k": [TopKLogitsWarper(4)],
    "top_p": [TopPLogitsWarper(0.8)],
    "min_p": [TemperatureLogitsWarper(0.7), MinPLogitsWarper(0.2)],
    "eta": [TemperatureLogitsWarper(0.7), EtaLogitsWarper(0.08)],
    "contextual": [ContextualPenaltyLogitsProcessor(4.0, 2), TemperatureLogitsWarper(0.8)],
    "repetition": [RepetitionPenaltyLogitsProcessor(1.8)],
    "all": [RepetitionPenaltyLogitsProcessor(1.8), TemperatureLogitsWarper(1.4), TopKLogitsWarper(5)],
}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Speculation:
    """Emit the first two tokens after PREFIX in many rows at once, in one or two iterations of one scheme."""

    def __init__(self, processors="plain", rows=SHORT_ROWS, depth=DEPTH):
        self.target = MarkovTarget(V, seeded(1), PROCESSORS[processors])
        self.draft = MarkovTarget(V, seeded(2), PROCESSORS[processors])
        self.draft.table = (self.target.table + self.draft.table) / 2
        self.depth = depth
        self.noise = draw_noise(rows, depth + 2, V, generator=seeded(3))
        self.generator = seeded(4)
        self.lengths: list[float] = []  # mean n of each iteration

    def fresh(self, *shape):
        return draw_noise(*shape, generator=self.generator)

    def draft_chain(self, ids, noise):
        """Return a chain drawn from the draft, with the distribution of every token."""
        q, length = [torch.zeros(len(ids), V)], ids.shape[1]
        for depth in range(self.depth):
            scores = self.draft.scores(ids)
            q.append(scores.softmax(-1))
            ids = torch.cat([ids, gumbel_max_sample(scores, noise[:, depth])[:, None]], dim=1)
        return DraftTree.chain(ids[:, length - 1 :], q=torch.stack(q, dim=1))

    def tree(self, ids, noise):
        """Verify a tree of the draft's likeliest tokens, random branches with duplicates, and padding."""
        shape = (len(ids), len(BRANCHING))
        tokens = torch.randint(V, shape, generator=self.generator)
        tokens[:, LEFTMOST] = self.draft_chain(ids, torch.ones(len(ids), self.depth, V)).tokens
        kept = torch.rand(shape, generator=self.generator) < 0.9
        valid = torch.stack([kept[:, path].all(1) | (node == 0) for node, path in enumerate(BRANCHING_PATHS)], dim=1)
        tree = DraftTree(tokens, BRANCHING.expand(shape), valid, max_depth=self.depth)
        return accept_sampled(tree, self.target.node_scores(ids, tree), noise)

    def rejection(self, ids, noise):
        """Verify a chain drawn from q with its own noise, accepted with probability min(1, p / q)."""
        tree = self.draft_chain(ids, self.fresh(len(ids), self.depth, V))
        uniforms = torch.rand(len(ids), self.depth, generator=self.generator)
        scores = self.target.node_scores(ids, tree)
        return accept_rejection(tree, scores, uniforms, self.fresh(len(ids), V))

    def coupled(self, ids, noise):
        """Verify a chain drawn by exponential races over the same noise as the target's draws."""
        tree = self.draft_chain(ids, noise)
        return accept_sampled(tree, self.target.node_scores(ids, tree), noise)

    def step(self, scheme, ids, place):
        acceptance = scheme(ids, self.noise[:, place : place + self.depth + 1])
        self.lengths.append(acceptance.num_nodes.double().mean().item())
        return acceptance

    def sample(self, scheme):
        """Return two tokens per row, `(rows, 2)`, the second from the next iteration if the first emits only one."""
        ids = PREFIX.expand(len(self.noise), -1)
        first = self.step(scheme, ids, place=0)
        second = self.step(scheme, torch.cat([ids, first.tokens[:, :1]], dim=1), place=1)
        later = torch.where(first.num_nodes > 1, first.tokens[:, 1], second.tokens[:, 0])
        return torch.stack([first.tokens[:, 0], later], dim=1)

    def p_value(self, scheme):
        return p_value(self.sample(scheme), self.target.pair_distribution(PREFIX))


@pytest.mark.parametrize("rows", [SHORT_ROWS, pytest.param(LONG_ROWS, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    ("processors", "scheme", "depth"),
    [
        *((processors, scheme, 3) for processors, scheme in zip(PROCESSORS, cycle(("tree", "rejection")))),
        ("all", "rejection", 3),
        ("all", "coupled", 3),
        ("plain", "rejection", 1),
    ],
)
def test_sampled_text_follows_the_target_distribution(scheme, depth, processors, rows):
    """The joint distribution of the first two tokens; in chains of depth 1 the second is often the bonus token."""
    run = Speculation(processors, rows, depth)
    assert run.p_value(getattr(run, scheme)) > RIGHT
    assert 1.1 < min(run.lengths) and max(run.lengths) < depth + 0.9  # drafted tokens are both accepted and refused


def test_rejection_accepts_with_the_theoretical_rate():
    """The first drafted token is accepted with probability sum(min(p, q)), the maximum for drawn tokens."""
    run = Speculation("all")
    ids = PREFIX.expand(len(run.noise), -1)
    accepted = run.rejection(ids, run.noise).num_nodes > 1
    p, q = (model.scores(PREFIX[None])[0].double().softmax(-1) for model in (run.target, run.draft))
    overlap = torch.minimum(p, q).sum()
    assert p_value(accepted.long(), torch.stack([1 - overlap, overlap])) > RIGHT
