"""Simulated time for tests of the gate: a machine with given costs, and a clock for real calls."""

import random

from hf_longspec.generation.special_cases.gate import DRAFT, PLAIN, SpeculationGate, gate_of

PROMPT = 1024


class Machine:
    """Run steps of simulated time and simulated numbers of tokens."""

    def __init__(
        self, cost, accepted, depth=4, plain=lambda _: 1.0, noise=0.0, rows=1, prompt=PROMPT, seed=0, speedup_bound=None
    ):
        self.now = 0.0
        self.cost, self.plain = cost, plain  # seconds of a step, given the number of tokens emitted so far
        self.accepted = accepted  # tokens that a speculative step emits per row, given the machine
        self.noise = noise  # times are multiplied by 1 to 1 + noise; if it is not 0, one in 20 is ten times as long
        self.rows, self.length = rows, prompt
        self.random = random.Random(seed)
        bound = {} if speedup_bound is None else {"speedup_bound": lambda: speedup_bound(self)}
        self.gate = SpeculationGate(depth + 1, clock=lambda: self.now, **bound)  # depth of the tree
        self.emitted = 0
        self.resting = False
        self.choices, self.decisions = [], []

    def step(self):
        """Run one step as the loop does: speculation begins with a plain step that brings the drafter up to date."""
        speculates = self.gate.speculates()
        proposes = speculates and not self.resting
        self.resting = not speculates
        tokens = [self.accepted(self) if proposes else 1 for _ in range(self.rows)]
        seconds = self.cost(self.emitted) if proposes else self.plain(self.emitted)
        if self.noise:
            seconds *= 1 + self.noise * self.random.random()
            seconds *= 10 if self.random.random() < 0.05 else 1
        self.now += seconds
        self.emitted += max(tokens)
        self.length += max(tokens)
        self.choices.append(DRAFT if proposes else PLAIN)
        if decision := self.gate.record(sum(tokens), self.rows, self.length):
            self.decisions.append(decision)
        return seconds

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
    """Give all gates a [`StepClock`]; return pairs of a gate and the earlier one, which it continues under `keep`."""
    made = []

    def make(drafter, ranks, known=None):
        gate = gate_of(drafter, ranks, known if keep else None)
        if isinstance(gate, SpeculationGate):
            gate.clock = StepClock(gate, seconds)
        made.append((gate, known))
        return gate

    monkeypatch.setattr("hf_longspec.generation.special_cases.gate.gate_of", make)
    return made
