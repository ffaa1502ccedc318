"""Grammars of the generated text: masks for all nodes of a tree, and tokens that a grammar forces as free drafts.

A grammar is a logits processor with `is_grammar`, such as `hf_longspec.StructuredOutput`. Its masks of a tree are
computed on the host, while the verification runs on the device. Candidates of a draft are ranked after the masks.
"""

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from transformers.generation.logits_process import LogitsProcessorList

from ...attention_backends.lengths import on_device
from ..call import GRAMMAR, Call
from ..draft_tree import DraftTree
from ..drafter import Drafter, DrafterAround
from ..sampling import TokenRule, declared, is_history_free, warped
from ..special_case import SpecialCase
from ..verification import Acceptance, along_path

# Tokens, parents and validity of a tree on the host, `[3][batch][nodes]`.
HostTree = list[list[list[int]]]


class GrammarRule(TokenRule):
    """A rule whose processors depend on the scores alone, but for one grammar."""

    def __init__(self, grammar: Any, *arguments: Any):
        super().__init__(*arguments)
        self.grammar = grammar
        # the last tree of the drafter, as it was read
        self.host_tree: tuple[DraftTree | None, HostTree] = None, []

    def accept(
        self, tree: DraftTree, logits: torch.Tensor, with_scores: bool = False
    ) -> tuple[Acceptance, torch.Tensor | None]:
        """Accept nodes; see [`TokenRule.accept`]."""
        scores = self._masked(logits, self._masks(tree))
        acceptance = self.accept_scored(tree, scores, *self.draws_for(tree))
        return acceptance, along_path(scores, acceptance.path) if with_scores else None

    def scores_of_level(self, logits: torch.Tensor, paths: torch.Tensor, is_asked: torch.Tensor) -> torch.Tensor:
        """Return processed scores `(B, n, V)` after drafted tokens; see [`TokenRule.scores_of_level`]."""
        started, (batch_size, count) = time.perf_counter(), paths.shape[:2]
        bits, asked = self.grammar.bits(batch_size * count), is_asked.tolist()
        for row, of_row in enumerate(paths.tolist()):
            for place, path in enumerate(of_row):
                if asked[row][place] and (position := self.grammar.after(row, self.sequences.generated[row], path)):
                    position.fill(bits[row * count + place])
        self._count(started, batch_size * count)
        return self._masked(logits, bits)

    def _masks(self, tree: DraftTree) -> torch.Tensor:
        """Return masks `(batch * N, words)` of the nodes; all tokens are allowed after those that are not reached."""
        known, host = self.host_tree
        if known is not tree:
            host = read(tree)
        started, bits = time.perf_counter(), self.grammar.bits(tree.tokens.numel())
        for row, fields in enumerate(zip(*host, strict=True)):
            for node, position in reached(self.grammar, self.sequences, row, *fields):
                position.fill(bits[row * tree.num_nodes + node])
        self._count(started, tree.tokens.numel())
        return bits

    def _masked(self, logits: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
        masks = partial(self.grammar.masked, bits)
        return warped([masks if one is self.grammar else one for one in self.processors], logits)

    def _count(self, started: float, nodes: int) -> None:
        self.processor_seconds += time.perf_counter() - started
        self.num_processed_nodes += nodes


def read(tree: DraftTree) -> HostTree:
    """Return a tree on the host."""
    if tree.num_nodes == 1:  # nothing has to be read
        return [[[value] for _ in tree.tokens] for value in (0, -1, 1)]
    host: HostTree = torch.stack([tree.tokens, tree.parents, tree.valid.long()]).tolist()
    return host


def reached(
    grammar: Any, sequences: Any, row: int, tokens: Sequence[int], parents: Sequence[int], valid: Sequence[int]
) -> Iterator[tuple[int, Any]]:
    """Yield the nodes of a row's tree that the grammar allows, with a parser after each of them."""
    if not sequences.done[row] and (position := grammar.after(row, sequences.generated[row])):
        yield from ((node, position) for node in position.tour(tokens, parents, valid, grammar.ends))


def make_room(drafter: Any, count: int) -> None:
    """Tell a drafter, and those within it, that their paths may contain `count` more nodes."""
    depth = drafter.max_depth + count
    while drafter is not None and count:
        drafter.ngram_depth = max(drafter.ngram_depth, depth)
        drafter = vars(drafter).get("inner")


class ForcedDrafter(DrafterAround):
    """Append the tokens that a grammar forces to the trees of another drafter.

    The nodes of the other drafter keep their places. Trees that carry a distribution `q` stay as they are.

    Args:
        inner ([`Drafter`]): The other drafter.
        rule (`Any`): The rule of the call.
        grammar (`Any`): The grammar, a processor of the rule.
        count (`int`): Largest number of tokens that are appended.
    """

    def __init__(self, inner: Drafter, rule: Any, grammar: Any, count: int):
        super().__init__(inner)
        self._rule, self._grammar, self._count = rule, grammar, count
        self.num_nodes, self.max_depth = inner.num_nodes + count, inner.max_depth + count
        make_room(inner, count)

    def grammar_of(self, row: int) -> tuple[Any, Any, int] | None:
        """Return the rule and the grammar of a row, and the number of the row there; `None` if it has none."""
        return self._rule, self._grammar, row

    def propose(self, root: torch.Tensor) -> DraftTree:
        """Return the other drafter's tree after `root` `(batch,)`, and forced tokens after its nodes."""
        tree = self.inner.propose(root)
        if not any(self.grammar_of(row) for row in range(len(root))):
            return tree
        host = read(tree)
        joined = tree if tree.q is not None or not self._count else self._joined(tree, host)
        self._proposed = joined, tree
        self._rule.host_tree = joined, host
        return joined

    def _joined(self, tree: DraftTree, host: HostTree) -> DraftTree:
        """Return a tree with forced tokens, which are added to `host` too."""
        size = depth = 0
        for row, fields in enumerate(zip(*host, strict=True)):
            new, deepest = self._forced(row, *fields)
            for field, values in zip(fields, new, strict=True):
                field += values
            size, depth = max(size, len(new[0])), max(depth, deepest)
        if self.binding.target.steps.captures:  # shapes of captured steps do not change
            size, depth = self._count, self._count + tree.max_depth
        if not size:
            return tree
        for fields in zip(*host, strict=True):
            for field in fields:
                field += [0] * (tree.num_nodes + size - len(field))
        more = on_device([[row[tree.num_nodes :] for row in field] for field in host], tree.tokens.device)
        pairs = zip((tree.tokens, tree.parents, tree.valid), more, strict=True)
        tokens, parents, valid = (torch.cat([own, new.to(own.dtype)], 1) for own, new in pairs)
        return DraftTree(tokens, parents, valid, max_depth=max(depth, tree.max_depth))

    def _forced(self, row: int, tokens: list[int], parents: list[int], valid: list[int]) -> tuple[list[list[int]], int]:
        """Return tokens, parents and validity of the forced nodes of a row, and the depth of the deepest of them."""
        if (found := self.grammar_of(row)) is None:
            return [[], [], []], 0
        (rule, grammar, place), started = found, time.perf_counter()
        runs = [
            (node, forced)
            for node, position in reached(grammar, rule.sequences, place, tokens, parents, valid)
            if (forced := position.forced())
        ]
        rule.processor_seconds += time.perf_counter() - started
        places = {(parents[node], tokens[node]): node for node in range(len(tokens) - 1, 0, -1) if valid[node]}
        depths = [0]
        for node in range(1, len(tokens)):
            depths.append(depths[parents[node]] + 1)
        new: list[list[int]] = [[], [], []]
        deepest = 0
        for node, forced in sorted(runs):  # shallow nodes and likely ones come first
            for token in forced:
                if (node, token) not in places:
                    if len(new[0]) == self._count or token in grammar.ends:
                        break
                    places[node, token] = len(depths)
                    depths.append(depths[node] + 1)
                    deepest = max(deepest, depths[-1])
                    for values, value in zip(new, (token, node, 1), strict=True):
                        values.append(value)
                node = places[node, token]
        return new, deepest


class Grammars(SpecialCase):
    """Logits processors that are grammars."""

    case = GRAMMAR

    def change(self, call: Call) -> None:
        """Tell grammars where the text begins, make room for forced tokens, and choose the rule."""
        start = call.tokens.shape[1]
        bound = (one.bound(start) if is_grammar(one) else one for one in call.logits_processor)
        call.logits_processor = LogitsProcessorList(bound)
        call.more_nodes = call.draft.setting("forced_tokens")
        others = [one for one in call.logits_processor if not is_history_free(one)]
        if len(others) == 1:  # the grammar
            call.rule_class = partial(GrammarRule, others[0])

    def drafter(self, inner: Drafter, session: Any) -> Any:
        """Return a drafter with the forced tokens of the first grammar."""
        grammar = next(filter(is_grammar, session.rule.processors))
        return ForcedDrafter(inner, session.rule, grammar, session.call.more_nodes)


def is_grammar(processor: Any) -> bool:
    """Return whether a processor is a grammar, with the methods of `hf_longspec.StructuredOutput`."""
    return declared(processor, "is_grammar") is True
