"""Token Recycling against a table of dictionaries that is filled node by node."""

from itertools import product
from math import prod

import pytest
import torch

from hf_longspec import TokenRecyclingDraftModel
from hf_longspec.modeling.token_recycling.generation_token_recycling import (
    CHANCES,
    TokenRecyclingDrafter,
    likely_tree,
    successors,
)
from tests.modeling.calls import generate
from tests.tiny_targets import tiny_target
from tests.watching import after


@pytest.mark.parametrize(("nodes", "depth", "candidates"), [(2, 1, 1), (9, 3, 3), (23, 4, 2), (300, 3, 4)])
def test_the_tree_has_the_most_likely_paths(nodes, depth, candidates):
    tree = likely_tree(nodes, depth, candidates)
    paths = {0: ()}
    for place, (parent, rank, level) in enumerate(tree, start=1):
        paths[place] = (*paths[parent], rank)
        assert len(paths[place]) == level and parent < place
    chances = [
        prod(CHANCES[rank] for rank in path)
        for length in range(1, depth + 1)
        for path in product(range(candidates), repeat=length)
    ]
    assert len(set(paths.values())) == len(paths) == min(nodes, 1 + len(chances))
    found = sorted((prod(CHANCES[rank] for rank in path) for path in paths.values() if path), reverse=True)
    assert found == pytest.approx(sorted(chances, reverse=True)[: len(found)])
    assert [level for _, _, level in tree] == sorted(level for _, _, level in tree)


class Restated:
    """The table of one row: token to candidates, in plain Python."""

    def __init__(self, text, count):
        self.count = count
        self.table = {token: [c for c in found if c >= 0] for token, found in successors(text, count).items()}

    def write(self, tokens, logits, path):
        order = [node for node in range(len(tokens)) if node not in path] + sorted(path)
        for node in order:
            if tokens[node] is not None:
                self.table[tokens[node]] = logits[node].topk(self.count).indices.tolist()

    def tree(self, root, template):
        """The token of every node, `None` for padding."""
        tokens = [root]
        for parent, rank, _ in template:
            known = self.table.get(tokens[parent], []) if tokens[parent] is not None else []
            tokens.append(known[rank] if rank < len(known) else None)
        return tokens


@pytest.mark.parametrize("vocab_size", [12, 128])
def test_trees_are_read_from_what_the_target_ranked(vocab_size, monkeypatch):
    """Every tree of a ragged batch, over all steps of a call: few tokens, which repeat at many nodes, and many."""
    model = tiny_target("qwen3", vocab_size=vocab_size)
    draft = TokenRecyclingDraftModel.from_target(model, num_nodes=14, max_depth=4, num_candidates=5)
    template, compared, rows, trees = likely_tree(14, 4, 5), [], [], []

    def start(_, drafter, texts, verification):
        for row, (text, count) in enumerate(zip(texts, verification.num_nodes.host, strict=True)):
            rows.append(Restated(text.tolist(), 5))
            rows[-1].write(text[len(text) - count :].tolist(), verification.logits[row], list(range(count)))

    def propose(tree, drafter, root):
        tree.validate()
        fields = zip(tree.tokens.tolist(), tree.valid.tolist(), strict=True)
        trees[:] = [[token if valid else None for token, valid in zip(*row, strict=True)] for row in fields]
        for restated, found, token in zip(rows, trees, root.tolist(), strict=True):
            assert found == restated.tree(token, template)
            compared.append(sum(token is not None for token in found))

    def observe(_, drafter, verification):
        for row, (restated, tokens) in enumerate(zip(rows, trees, strict=True)):
            restated.write(tokens, verification.logits[row], set(verification.path[row].tolist()))

    for name, look in {"start": start, "propose": propose, "observe": observe}.items():
        after(monkeypatch, TokenRecyclingDrafter, name, look)
    assert torch.equal(generate(model, draft, max_new_tokens=40), generate(model, None, max_new_tokens=40))
    assert len(compared) > 20 and max(compared) > 10
    assert draft.last_speculation.num_accepted_draft_tokens > 0
