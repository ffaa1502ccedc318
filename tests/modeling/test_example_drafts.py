"""Quest against loops over single keys, and Token Recycling against a table of dictionaries that is filled by node."""

from functools import partial
from math import ceil

import pytest
import torch

from tests import example_drafts as examples
from tests.modeling import calls
from tests.tiny_targets import tiny_target
from tests.watching import after

LENGTHS = (57, 3, 39)
GAMMA, SINKS = 4, 4
PAGES = {"sparse_ratio": 0.3, "sparse_min_tokens": 7, "page_size": 3, "num_dense_layers": 0}

generate = partial(calls.generate, lengths=LENGTHS, max_new_tokens=22)


def bound_by_loops(queries, page):
    """The largest sum of channels that a page `(S, D)` could have for any of the queries that share its keys."""
    return max(sum(max(x * k[channel] for k in page) for channel, x in enumerate(query)) for query in queries)


def slots_by_loops(queries, keys, prefix, length):
    """The slots that a step reads, for the queries `(G, D)` of a head and its keys `(S, D)`."""
    size, least = PAGES["page_size"], PAGES["sparse_min_tokens"]
    allowed, full = min(prefix, max(least, ceil(PAGES["sparse_ratio"] * prefix))), prefix // size
    count = min(full, max(ceil(SINKS / size), allowed // size))
    first = [page for page in range(full) if page * size < SINKS]
    bounds = {page: bound_by_loops(queries, keys[page * size : (page + 1) * size]) for page in range(full)}
    others = sorted(set(range(full)) - set(first), key=lambda page: -bounds[page])
    chosen = (first + others)[:count]
    return {page * size + entry for page in chosen for entry in range(size)} | set(range(full * size, length))


def test_every_step_of_quest_reads_the_pages_that_fit_its_own_query(monkeypatch):
    """In every step and layer, loops over the cache choose the same entries, which change with the query."""
    model, choices = tiny_target("llama"), {}
    draft = examples.QuestDraftModel.from_target(model, num_assistant_tokens=GAMMA, **PAGES)

    def check(found, cache, index, query, ends):
        slots, counts = found
        keys, groups = cache.cache.layers[index].keys.tolist(), query.shape[1] // slots.shape[1]
        for row, prefix in enumerate(cache.cache.lengths.host):
            for head, used in enumerate(slots[row, :, : counts[row]].tolist()):
                queries = query[row, head * groups : (head + 1) * groups, 0].tolist()
                expected = slots_by_loops(queries, keys[row][head], prefix, ends[row])
                assert len(used) == len(set(used)) and set(used) == expected
                read = {slot for slot in used if slot < prefix}
                choices.setdefault((row, prefix), {}).setdefault((index, head), []).append(read)

    after(monkeypatch, examples.PagedCache, "slots", check)
    assert torch.equal(generate(model, draft), generate(model, None))
    stats = draft.last_speculation
    assert 0 < stats.num_accepted_draft_tokens < stats.num_draft_tokens
    long = [of_heads for (row, _), of_heads in choices.items() if LENGTHS[row] > 30]
    assert any(steps[0] != steps[-1] for of_heads in long for steps in of_heads.values())
    assert any(of_heads[0, 0] != of_heads[0, 1] for of_heads in long)  # heads of a layer choose for themselves


class Restated:
    """The table of one row: token to candidates, in plain Python."""

    def __init__(self, text, count):
        self.count, self.table = count, {}
        for token, candidates in examples.successors(text, count).items():
            self.table[token] = [candidate for candidate in candidates if candidate >= 0]

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
def test_trees_of_token_recycling_are_read_from_what_the_target_ranked(vocab_size, monkeypatch):
    """Every tree of a ragged batch, over all steps of a call: few tokens, which repeat at many nodes, and many."""
    model = tiny_target("qwen3", vocab_size=vocab_size)
    draft = examples.TokenRecyclingDraftModel.from_target(model, num_nodes=14, max_depth=4, num_candidates=5)
    template, compared, rows, trees = examples.likely_tree(14, 4, 5), [], [], []

    def start(_, drafter, texts, verification):
        for row, (text, count) in enumerate(zip(texts, verification.num_nodes.host, strict=True)):
            rows.append(Restated(text.tolist(), 5))
            rows[-1].write(text[len(text) - count :].tolist(), verification.logits[row], list(range(count)))
        trees.clear()

    def propose(tree, drafter, root):
        tree.validate()
        fields = zip(tree.tokens.tolist(), tree.valid.tolist(), strict=True)
        trees[:] = [[token if valid else None for token, valid in zip(*row, strict=True)] for row in fields]
        for restated, found, token in zip(rows, trees, root.tolist(), strict=True):
            assert found == restated.tree(token, template)
            compared.append(sum(token is not None for token in found))

    def observe(_, drafter, verification):
        for row, tokens in enumerate(trees):  # none at the start
            rows[row].write(tokens, verification.logits[row], set(verification.path[row].tolist()))

    for name, look in {"start": start, "propose": propose, "observe": observe}.items():
        after(monkeypatch, examples.TokenRecyclingDrafter, name, look)
    assert torch.equal(generate(model, draft, max_new_tokens=40), generate(model, None, max_new_tokens=40))
    assert len(compared) > 20 and max(compared) > 10
    assert draft.last_speculation.num_accepted_draft_tokens > 0
