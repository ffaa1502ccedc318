"""Beam search over draft trees against a double loop over all continuations."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_longspec.generation.beam import Beam, log_normaliser
from hf_longspec.generation.draft_tree import DraftTree

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
    beam = Beam(torch.tensor([5, 6, 7]))
    tables = []
    for level, width in enumerate(widths):
        tables.append(random_logits(3, beam.tokens.shape[1], level))
        beam.grow(tables[-1], width)
    tree = DraftTree.of_fields(beam.fields(), len(beam.levels) - 1)
    tree.validate()
    assert tree.num_nodes == 1 + sum(widths) and tree.max_depth == len(widths)
    for row in range(3):
        expected = looped_beam(5 + row, [table[row] for table in tables], widths)
        assert (tree.tokens[row].tolist(), tree.parents[row].tolist()) == expected
    # the beam maintains mask and depths while it grows; a fresh tree computes them from the parents
    fresh = DraftTree(tree.tokens, tree.parents, tree.valid)
    assert torch.equal(tree.mask, fresh.mask) and torch.equal(tree.depths, fresh.depths)


def test_a_node_without_allowed_continuations_is_the_last_choice():
    """Its scores are all -inf, so its cumulative scores are NaN."""
    beam = Beam(torch.tensor([1]))
    beam.grow(random_logits(1, 1, 0), 2)
    logits = random_logits(1, 2, 1)
    logits[:, 0] = -torch.inf
    beam.grow(logits, 3)
    assert (beam.parents[-1] == 2).all() and beam.scores.isfinite().all()
    beam.grow(torch.full((1, 3, VOCAB), -torch.inf), 2)  # a level without any allowed token keeps its size
    DraftTree.of_fields(beam.fields(), len(beam.levels) - 1).validate()


def test_a_level_has_no_more_nodes_than_continuations():
    beam = Beam(torch.tensor([1]))
    beam.grow(random_logits(1, 1, 0, vocab=3), 8)
    beam.grow(random_logits(1, 3, 1, vocab=3), 8)
    assert [level.shape[1] for level in beam.levels] == [1, 3, 8]
    DraftTree.of_fields(beam.fields(), len(beam.levels) - 1).validate()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_log_normaliser(dtype, tolerance):
    """In bfloat16 each of 5,001 terms is rounded by up to 0.4 %; the mean of the errors is far smaller."""
    logits = (torch.randn(3, 5001, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    expected = logits.double().logsumexp(-1)
    assert (log_normaliser(logits).double() - expected).abs().max() < tolerance
    assert log_normaliser(logits).dtype == torch.float32


class LargeFloat32(TorchDispatchMode):
    """Record every operation that returns a float32 tensor of at least `size` numbers."""

    def __init__(self, size):
        super().__init__()
        self.size, self.found = size, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32 and tensor.numel() >= self.size:
                self.found.append(str(function))
        return out


def test_bfloat16_logits_are_never_copied_to_float32():
    vocab, width = 5001, 7
    beam = Beam(torch.tensor([3, 4]))
    logits = [random_logits(2, nodes, nodes, vocab).bfloat16() for nodes in (1, width)]
    with LargeFloat32(vocab) as recorded:
        beam.grow(logits[0], width)
        beam.grow(logits[1], width)
    assert recorded.found == []
    with LargeFloat32(vocab) as recorded:
        logits[1].log_softmax(-1, dtype=torch.float32)
    assert recorded.found != []  # the recorder finds a copy if there is one
