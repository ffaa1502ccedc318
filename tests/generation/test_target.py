"""One tree step against a plain forward of the bare model on every root-to-node path: all targets, all our backends."""

from functools import cache
from itertools import cycle

import pytest
import torch

from hf_longspec import SpeculativeCache
from hf_longspec.generation.draft_tree import DraftTree
from hf_longspec.generation.target import TargetView
from tests.attention_backends import reference  # noqa: F401 - registers its name
from tests.distributions import random_tree
from tests.rounding import share
from tests.tiny_targets import TINY_TARGETS, WINDOW, tiny_prompts, tiny_target

# Largest error of a logit, as a share of the largest logit, of three layers.
TOLERANCE = share(layers=3)

IMPLEMENTATIONS = ("hf_longspec", "hf_longspec_reference", "hf_longspec_torch")
NODES = 9
RAGGED = (33, 3, 20)
# Within 15 tokens no window has passed anything yet, but some nodes are beyond it: layers with and without a window
# must not share what they computed.
BATCHES = {"ragged": RAGGED, "almost a window": (WINDOW - 1,), "two windows": (2 * WINDOW, 2 * WINDOW)}
WINDOWED = ("mistral", "gemma2", "gemma3", "gpt_oss", "cohere2")
# Every target once; those with windows, with every batch and implementation; a latent cache with every implementation.
CASES = [*((name, "ragged", implementation) for name, implementation in zip(TINY_TARGETS, cycle(IMPLEMENTATIONS)))]
CASES += [*((name, batch, IMPLEMENTATIONS[place]) for name in WINDOWED for place, batch in enumerate(BATCHES))]
CASES += [*(("deepseek_v3", "two windows", implementation) for implementation in IMPLEMENTATIONS)]


@cache
def bare_model(name):
    return tiny_target(name, attn_implementation="eager")


def ancestors(tree, row, node):
    """Nodes from the root down to `node`, by following parents."""
    path = [node]
    while path[0] > 0:
        path.insert(0, int(tree.parents[row, path[0]]))
    return path


@torch.no_grad()
def path_logits(model, prefix, tokens):
    """Logits of the bare model for `tokens` after `prefix`: one forward, no cache, no mask, no batch."""
    return model(input_ids=torch.tensor([[*prefix, *tokens]]), use_cache=False).logits[0, -1]


def expected_logits(name, prefixes, tree):
    """Logits of every valid node by its own forward; NaN where the tree is padded."""
    model = bare_model(name)
    expected = torch.full((*tree.tokens.shape, model.config.vocab_size), torch.nan)
    for row, prefix in enumerate(prefixes):
        for node in tree.valid[row].nonzero().flatten().tolist():
            tokens = tree.tokens[row, ancestors(tree, row, node)].tolist()
            expected[row, node] = path_logits(model, prefix, tokens)
    return expected


def error(actual, expected):
    known = ~expected.isnan()
    assert known.any() and torch.isfinite(actual).all()  # padding is junk, but no poison
    return ((actual[known] - expected[known]).abs().max() / expected[known].abs().max()).item()


class TwoSteps:
    """A tree step, a commit of a random path in every row, and a second tree step. The expectation is made once."""

    def __init__(self, name, lengths, seed=0):
        self.name = name
        vocab_size = bare_model(name).config.vocab_size
        ids, mask = tiny_prompts(vocab_size, lengths)
        self.prompts = [row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True)]
        self.trees = [random_tree(seed + step, len(lengths), NODES, vocab_size) for step in range(2)]
        generator = torch.Generator().manual_seed(seed)
        leaves = [
            valid.nonzero().flatten()[torch.randint(int(valid.sum()), (1,), generator=generator)].item()
            for valid in self.trees[0].valid
        ]
        self.paths = [ancestors(self.trees[0], row, leaf) for row, leaf in enumerate(leaves)]
        self.kept = [
            prompt + self.trees[0].tokens[row, path].tolist()
            for row, (prompt, path) in enumerate(zip(self.prompts, self.paths, strict=True))
        ]
        self.expected = [
            expected_logits(name, prefixes, tree)
            for prefixes, tree in zip((self.prompts, self.kept), self.trees, strict=True)
        ]

    def run(self, implementation, chunk_size=None):
        """Errors of both steps."""
        model = tiny_target(self.name, attn_implementation=implementation)
        target, cache = TargetView(model), SpeculativeCache(model.config, len(self.prompts), 96, tree_slots=NODES)
        with torch.no_grad(), target.attention():
            rows = [torch.tensor(prompt) for prompt in self.prompts]
            target.prefill(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), cache, chunk_size)
            cache.set_lengths([len(prompt) for prompt in self.prompts])
            first = target.verify(self.trees[0], cache)
            longest = max(map(len, self.paths))
            path = torch.tensor([path + [path[-1]] * (longest - len(path)) for path in self.paths])
            cache.commit(path, [len(path) for path in self.paths])
            second = target.verify(self.trees[1], cache)
        assert len(first.context.calls) == len(second.context.calls) == model.config.num_hidden_layers
        assert cache.lengths.host == tuple(map(len, self.kept))
        return [error(step.logits, expected) for step, expected in zip((first, second), self.expected, strict=True)]


@cache
def two_steps(name, lengths):
    return TwoSteps(name, lengths)


@pytest.mark.parametrize(("name", "batch", "implementation"), dict.fromkeys(CASES))
def test_tree_steps_equal_a_forward_of_every_path(name, batch, implementation):
    """Two steps with a commit in between. Trees branch, rows are padded, and the committed path is no chain."""
    case = two_steps(name, BATCHES[batch])
    assert any(path != list(range(len(path))) for path in case.paths)
    assert not case.trees[0].valid.all()
    assert max(case.run(implementation)) < TOLERANCE


@pytest.mark.parametrize(("name", "chunk_size"), [("gemma3", 1), ("deepseek_v3", 5), ("gpt_oss", 1000)])
def test_prefill_in_chunks(name, chunk_size):
    implementation = "hf_longspec" if chunk_size != 5 else "eager"
    assert max(two_steps(name, RAGGED).run(implementation, chunk_size)) < TOLERANCE


def test_positions_stay_below_the_limit():
    """Nodes that can never be emitted must not index beyond a table of positions."""
    model = tiny_target("llama", attn_implementation="hf_longspec")
    target, cache, seen = TargetView(model), SpeculativeCache(model.config, 1, 16), []
    assert target.why_not() == []  # a forward of its own
    handle = model.model.rotary_emb.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["position_ids"] if "position_ids" in kwargs else args[1]),
        with_kwargs=True,
    )
    with torch.no_grad():
        target.verify(DraftTree.chain(torch.tensor([[5, 6, 7, 8, 9]])), cache, limit=3)
    handle.remove()
    assert seen[0].tolist() == [[0, 1, 2, 2, 2]]
