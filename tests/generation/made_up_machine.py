"""Simulated time for tests of the gate: a machine with given costs, and a clock for real calls."""

import random
from dataclasses import dataclass
from typing import Any

import torch

from hf_longspec.generation.draft_tree import DraftTree
from hf_longspec.generation.drafter import TreeShape
from hf_longspec.generation.gate import DRAFT, PLAIN, ShadowDraft, SpeculationGate, gate_of

PROMPT = 1024


@dataclass
class Tree:
    """
    A draft tree with simulated cost and acceptance.

    Args:
        cost (`Callable`): Seconds of a step, given the number of tokens emitted so far.
        accepted (`Callable`): Tokens that a step emits per row, given the machine.
        depth (`int`): Depth of the tree, one less than the most tokens of a step.
    """

    cost: Any
    accepted: Any
    depth: int = 4
    name: str = DRAFT
    nodes: int | None = None

    @property
    def shape(self):
        return TreeShape(self.name, self.nodes or self.depth + 1, self.depth)


class Machine:
    """Run steps of simulated time and simulated numbers of tokens.

    Args:
        cost, accepted, depth: Fields of the only tree, unless there are `trees`.
        plain (`Callable`): Seconds of a plain step, given the number of tokens emitted so far.
        noise (`float`): Times are multiplied by a factor from 1 to 1 + `noise`. If it is not 0, one time in 20 is ten
            times as long.
        proposal (`float`, *optional*): Seconds of a shadow draft beside a plain step. By default there are none.
    """

    def __init__(
        self,
        cost=None,
        accepted=None,
        depth=4,
        plain=lambda tokens: 1.0,
        noise=0.0,
        rows=1,
        prompt=PROMPT,
        seed=0,
        trees=(),
        speedup_bound=None,
        proposal=None,
    ):
        self.now = 0.0
        self.trees = list(trees) or [Tree(cost, accepted, depth)]
        self.plain = plain
        self.noise, self.rows, self.length = noise, rows, prompt
        self.random = random.Random(seed)
        bound = {} if speedup_bound is None else {"speedup_bound": lambda: speedup_bound(self)}
        self.proposal = proposal
        self.gate = SpeculationGate(
            [tree.shape for tree in self.trees],
            shadow=None if proposal is None else ShadowDraft(),
            clock=lambda: self.now,
            **bound,
        )
        self.proposals = 0
        self.emitted = 0
        self.resting = False
        self.choices, self.decisions = [], []

    def step(self):
        """Run one step as the loop does: speculation begins with a plain step that brings the drafter up to date."""
        speculates = self.gate.speculates()
        proposes = speculates and not self.resting
        self.resting = not speculates
        tree = self.trees[self.gate.tree]
        tokens = [tree.accepted(self) if proposes else 1 for _ in range(self.rows)]
        seconds = tree.cost(self.emitted) if proposes else self.plain(self.emitted)
        if self.noise:
            seconds *= 1 + self.noise * self.random.random()
            seconds *= 10 if self.random.random() < 0.05 else 1
        self.now += seconds
        self.emitted += max(tokens)
        self.length += max(tokens)
        self.choices.append(tree.name if proposes else PLAIN)
        if not speculates:
            self.gate.follow([[1]] * self.rows, lambda: self.propose(tree))
        if decision := self.gate.record(sum(tokens), self.rows, self.length):
            self.decisions.append(decision)
        return seconds

    def propose(self, tree):
        """Propose chains with as many right tokens as speculation would accept now. Every text is 1, 1, 1, ..."""
        self.now += self.proposal
        self.proposals += 1
        right = [tree.accepted(self) - 1 for _ in range(self.rows)]
        return DraftTree.chain(torch.tensor([[0] + [1] * most + [2] * (tree.depth - most) for most in right]))

    def run(self, tokens):
        while self.emitted < tokens:
            self.step()
        return self


def always(value):
    return lambda _: value


def geometric(rate, depth=4):
    """Return the acceptance of a draft whose tokens are right with probability `rate` each."""

    def draw(machine):
        tokens = 1
        while tokens <= depth and machine.random.random() < rate:
            tokens += 1
        return tokens

    return draw


class StepClock:
    """A clock that a gate reads before and after each step, which takes `seconds(gate, number of the step)`."""

    def __init__(self, gate, seconds):
        self.gate, self.seconds, self.now, self.calls = gate, seconds, 0.0, 0

    def __call__(self):
        self.calls += 1
        if self.calls % 2 == 0:
            self.now += self.seconds(self.gate, self.calls // 2)
        return self.now


def gates_on_a_clock(monkeypatch, seconds, keep=False):
    """Give the gates of all calls a [`StepClock`] and no shadow drafts, and return a list of `(gate, known)`.

    `known` is the gate of an earlier call of the same kind, which the gate continues if `keep` is set.
    """
    made = []

    def make(wanted, drafter, ranks, known=None):
        gate = gate_of(wanted, drafter, ranks, known if keep else None)
        if isinstance(gate, SpeculationGate):
            gate.clock, gate.shadow = StepClock(gate, seconds), None
        made.append((gate, known))
        return gate

    monkeypatch.setattr("hf_longspec.generation.gate.gate_of", make)
    return made
