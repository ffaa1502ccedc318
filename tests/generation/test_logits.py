"""Logits processors along the accepted path: every node with its own prefix, each row with its own length."""

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)
from transformers.generation.stopping_criteria import StoppingCriteriaList

from hf_longspec import ContextualPenaltyLogitsProcessor
from hf_longspec.generation.draft_tree import DraftTree
from hf_longspec.generation.sampling import HISTORY_FREE, TokenRule
from hf_longspec.generation.sequences import Sequences
from tests.distributions import random_tree

pytestmark = pytest.mark.usefixtures("every_step_speculates")

RAGGED = (33, 3, 13)
VOCAB = 11


class Digest(LogitsProcessor):
    """Bans and favours tokens by a sum over the whole row, padding and order included. Counts calls and rows."""

    def __init__(self):
        self.calls, self.rows = 0, 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        self.rows += input_ids.shape[0]
        weights = torch.arange(1, input_ids.shape[1] + 1)
        digest = (input_ids * weights).sum(1)
        tokens = torch.arange(scores.shape[1])
        scores = scores.masked_fill((tokens + digest[:, None]) % 3 == 0, -torch.inf)
        return scores + 2.0 * ((tokens - digest[:, None]) % 5 == 0)


def test_a_processor_that_says_it_has_no_history_runs_once_per_step(plain_run):
    class Shift(Digest):
        history_free = True

        def __call__(self, input_ids, scores):
            self.calls += 1
            return scores + torch.arange(scores.shape[1]) % 3

    processor = Shift()
    run = plain_run("llama", RAGGED, max_new_tokens=10, logits_processor=LogitsProcessorList([processor]))
    processor.calls = 0
    draft = run.draft("tree")
    assert run.again(draft).tolist() == run.sequences.tolist()
    assert processor.calls == draft.last_speculation.num_forwards + 1  # and once for the prompt


def test_the_listed_processors_exist_in_this_version():
    from transformers.generation import logits_process

    assert not {name for name in HISTORY_FREE if not hasattr(logits_process, name)} - {"TopHLogitsWarper"}


def make_rule(processors, emitted, prompt=(4, 5, 4)):
    """A rule over rows with one prompt that have emitted different tokens."""
    input_ids = torch.tensor([prompt] * len(emitted))
    sequences = Sequences(input_ids, StoppingCriteriaList(), pad_token_id=0, max_length=40)
    sequences.append(emitted)
    return TokenRule(LogitsProcessorList(processors), do_sample=False, sequences=sequences, noise=None)


def literal_walk(processors, prefix, tree, logits, row):
    """The path of one row by a loop: process the node's logits with its own prefix, move to the child or stop."""
    node, path, emitted, scores = 0, [0], [], []
    while True:
        ids = torch.tensor([[*prefix, *emitted]])
        processed = logits[row, node][None].clone()
        for processor in processors:
            processed = processor(ids, processed)
        scores.append(processed[0])
        token = int(processed.argmax())
        emitted.append(token)
        children = [
            child
            for child in range(1, tree.num_nodes)
            if tree.valid[row, child] and tree.parents[row, child] == node and tree.tokens[row, child] == token
        ]
        if not children:
            return path, emitted, torch.stack(scores)
        node = children[0]
        path.append(node)


@pytest.mark.parametrize("shape", ["tree", "chain"])
@pytest.mark.parametrize(
    "processors",
    [
        [],
        [TemperatureLogitsWarper(0.5), TopKLogitsWarper(2)],
        [RepetitionPenaltyLogitsProcessor(1.8), NoRepeatNGramLogitsProcessor(2)],
        [Digest()],
        [ContextualPenaltyLogitsProcessor(2.5, 2), TopKLogitsWarper(4)],
        [ContextualPenaltyLogitsProcessor(2.5, 4)],  # as long as the shortest row
        [ContextualPenaltyLogitsProcessor(2.5, 5)],  # longer
    ],
    ids=["none", "warpers", "history", "digest", "window", "all", "short"],
)
def test_acceptance_equals_a_walk_by_hand(shape, processors):
    """Rows have emitted 1, 4, 4 and 2 tokens, so that no two groups of rows share a length."""
    emitted = [[7], [1, 2, 3, 4], [4, 4, 9, 1], [5, 3]]
    generator = torch.Generator().manual_seed(0)
    tree = random_tree(0, batch_size=4, num_nodes=17, vocab_size=3)
    if shape == "chain":
        tree = DraftTree.chain(tree.tokens[:, :6])
    logits = torch.randn(4, tree.num_nodes, VOCAB, generator=generator)
    for row, parents in enumerate(tree.parents.tolist()):  # what the tree holds is likely, so that walks are long
        for node in range(1, tree.num_nodes):
            logits[row, parents[node], tree.tokens[row, node]] += 3.0
    rule, before = make_rule(processors, emitted), logits.clone()
    acceptance, scores = rule.accept(tree, logits, with_scores=True)
    for row, generated in enumerate(emitted):
        path, tokens, expected = literal_walk(processors, [4, 5, 4, *generated], tree, logits, row)
        count = len(path)
        assert acceptance.num_nodes[row] == count
        assert acceptance.path[row, :count].tolist() == path and acceptance.tokens[row, :count].tolist() == tokens
        torch.testing.assert_close(scores[row, :count], expected)
    assert acceptance.num_nodes.max() > 1
    assert rule.accept(tree, logits)[1] is None
    assert torch.equal(logits, before)
