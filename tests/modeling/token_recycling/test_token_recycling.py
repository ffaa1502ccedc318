"""Token Recycling against a table of dictionaries that is filled node by node."""

from itertools import product
from math import prod

import pytest
import torch

from hf_longspec import TokenRecyclingDraftModel
from hf_longspec.modeling.token_recycling.modeling_token_recycling import CHANCES, likely_tree, successors
from tests.modeling.calls import generate
from tests.tiny_targets import tiny_target

pytestmark = pytest.mark.usefixtures("every_step_speculates")


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
def test_trees_are_read_from_what_the_target_ranked(vocab_size):
    """Every tree of a ragged batch, over all steps of a call: few tokens, which repeat at many nodes, and many."""
    model = tiny_target("qwen3", vocab_size=vocab_size)
    draft = TokenRecyclingDraftModel.from_target(model, num_nodes=14, max_depth=4, num_candidates=5)
    template, make, compared = likely_tree(14, 4, 5), draft.make_drafter, []

    def watched(binding):
        drafter = make(binding)
        start, propose, observe = drafter.start, drafter.propose, drafter.observe
        rows = []

        def started(texts, verification):
            start(texts, verification)
            for row, (text, count) in enumerate(zip(texts, verification.num_nodes.host, strict=True)):
                rows.append(Restated(text.tolist(), 5))
                rows[-1].write(text[len(text) - count :].tolist(), verification.logits[row], list(range(count)))

        def proposed(root):
            tree = propose(root)
            tree.validate()
            for row, restated in enumerate(rows):
                found = [
                    token if valid else None
                    for token, valid in zip(tree.tokens[row].tolist(), tree.valid[row].tolist(), strict=True)
                ]
                assert found == restated.tree(int(root[row]), template)
                compared.append(sum(token is not None for token in found))
            rows[0].last = tree
            return tree

        def observed(verification):
            observe(verification)
            tree = rows[0].last
            for row, restated in enumerate(rows):
                tokens = [
                    token if valid else None
                    for token, valid in zip(tree.tokens[row].tolist(), tree.valid[row].tolist(), strict=True)
                ]
                path = set(verification.path[row].tolist())
                restated.write(tokens, verification.logits[row], path)

        drafter.start, drafter.propose, drafter.observe = started, proposed, observed
        return drafter

    draft.make_drafter = watched
    assert torch.equal(generate(model, draft, max_new_tokens=40), generate(model, None, max_new_tokens=40))
    assert len(compared) > 20 and max(compared) > 10
    assert draft.last_speculation.num_accepted_draft_tokens > 0
