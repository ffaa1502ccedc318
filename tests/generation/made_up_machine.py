"""Simulated time for tests of the gate: steps with given costs, and drafts with given chances."""

import random
from types import SimpleNamespace

from hf_longspec.generation.drafter import Drafter
from hf_longspec.generation.special_cases.costs import Costs
from hf_longspec.generation.special_cases.gate import SpeculationGate, choices

BINDING = SimpleNamespace(target=SimpleNamespace(clock=None))


class Levels(Drafter):
    """A drafter of trees with so many candidates in each level."""

    def __init__(self, largest):
        super().__init__(BINDING)
        self.largest, self.num_nodes, self.max_depth = largest, 1 + sum(largest), len(largest)


class Machine:
    """Run steps of simulated time under a gate.

    Args:
        verifying: Seconds of a verification, given the number of nodes.
        drafting: Seconds of drafting, given the number of levels.
        rate: Chance that the best candidate of a level is right, given the number of tokens so far. The next ones are
            right with the chance `further`, by default the same, where all better ones are wrong.
        largest: Number of candidates of each level.
        load: Factor of the time of a step, given a source of random numbers.
        tells: Whether tokens are easier or harder at random, and the draft says so.
    """

    def __init__(self, verifying, drafting, rate, largest=(1,) * 4, load=lambda _: 1.0, seed=0, sizes=0, tells=False):
        self.verifying, self.drafting, self.rate, self.load = verifying, drafting, rate, load
        self.random = random.Random(seed)
        self.further = None
        self.drafter = Levels(largest)
        self.drafter.tells = tells
        self.costs = {}
        self.gate = SpeculationGate(self.drafter, self.costs_of, sizes=sizes)
        self.now, self.emitted, self.was_open, self.steps = 0.0, 0, True, []

    def costs_of(self, power, earlier):
        self.costs[power] = Costs(self.costs.get(power, earlier), is_other_length=power not in self.costs)
        return self.costs[power]

    def step(self):
        """Run one step as the loop does: drafting begins with a plain step that brings the drafter up to date."""
        self.gate.reach(1024)
        is_open = self.gate.speculates()
        drafts, self.was_open = is_open and self.was_open, is_open
        widths = self.gate.widths if drafts else ()
        path, rate = [0], self.rate(self.emitted)
        rates = [rate] * len(widths)
        if self.gate.answers and widths:
            rates = [rate + self.random.choice((-0.5, 0.5)) * min(rate, 1 - rate) for _ in widths]
            for depth in range(len(widths)):
                if not self.gate.goes_on([rates[depth]]):
                    break
            levels = depth + 1
            self.gate.kept()
            widths = self.gate.widths
        for depth, width in enumerate(widths):
            rate = rates[depth]
            further = rate if self.further is None else self.further
            rank = next((rank for rank in range(width) if self.random.random() < (further if rank else rate)), None)
            if rank is None:
                break
            path.append(1 + sum(widths[:depth]) + rank)
        nodes, load = 1 + sum(widths), self.load(self.random)
        levels = levels if widths and self.gate.answers else len(widths)
        drafting, verifying = load * self.drafting(levels), load * self.verifying(nodes)
        verified = SimpleNamespace(tokens=[path], nodes=[path], tree=SimpleNamespace(num_nodes=nodes))
        self.now += (drafting + verifying) / load
        self.emitted += len(path)
        self.steps.append(widths)
        self.gate.record(verified, drafting, verifying, drafts)

    def run(self, tokens):
        """Run until so many tokens are emitted."""
        while self.emitted < tokens:
            self.step()
        return self

    def call(self, tokens):
        """Run a further call, and return its seconds and tokens."""
        started, self.emitted, self.was_open = self.now, 0, True
        self.gate.release()
        self.gate.resume(self.drafter, self.costs_of)
        self.run(tokens)
        return self.now - started, self.emitted

    def best(self):
        """Return the seconds per token of the best fixed tree or of plain steps, without load."""
        rate, seconds = self.rate(0), [self.verifying(1)]
        further = rate if self.further is None else self.further
        for widths, nodes in choices(self.drafter, self.gate.sizes):
            reached, tokens = 1.0, 1.0
            for width in widths:
                reached *= 1 - (1 - rate) * (1 - further) ** (width - 1)
                tokens += reached
            seconds.append((self.verifying(nodes) + self.drafting(len(widths))) / tokens)
        return min(seconds)


def always(value):
    return lambda _: value
