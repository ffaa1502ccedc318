"""Decisions of the gate on a simulated machine with given costs and a simulated clock, and calls that have a gate."""

import time
from types import SimpleNamespace

import pytest

from hf_longspec.generation.drafter import Drafter
from hf_longspec.generation.special_cases.gate import DRAFT, PLAIN, TRIAL_SHARE, SpeculationGate, gate_of
from tests.generation.made_up_machine import PROMPT, Machine, always, geometric


def longest_run(choices, choice):
    longest = run = 0
    for found in choices:
        run = run + 1 if found == choice else 0
        longest = max(longest, run)
    return longest


class TestUselessDraft:
    @pytest.mark.parametrize(("cost", "depth", "most"), [(3.0, 4, 4), (1.5, 4, 16), (6.0, 8, 4)])
    def test_off_within_a_bounded_number_of_steps(self, cost, depth, most):
        """Nothing is accepted: the optimistic prior of OPTIMISM x depth tokens is used up at cost - 1 per step."""
        machine = Machine(always(cost), always(1), depth).run(200)
        assert longest_run(machine.choices, DRAFT) <= most
        assert machine.choices[-100:] == [PLAIN] * 100
        first = machine.decisions[0]
        assert first.choice == PLAIN and first.tau == 1.0
        assert first.plain_tokens_per_second == pytest.approx(1.0)
        assert first.draft_tokens_per_second == pytest.approx(1 / cost)
        assert PROMPT < first.length <= PROMPT + 40


class TestGoodDraft:
    @pytest.mark.parametrize(("cost", "tokens", "prompt"), [(1.5, 3, 16), (1.2, 2, 1024), (1.1, 4, 16), (1.5, 5, 1024)])
    def test_a_thousand_tokens_lose_at_most_two_percent(self, cost, tokens, prompt):
        machine = Machine(always(cost), always(tokens), prompt=prompt).run(1000)
        assert machine.now <= 1.02 * machine.emitted * cost / tokens
        assert machine.decisions[0].choice == DRAFT and len(machine.decisions) == 1
        assert PLAIN in machine.choices

    def test_noise_does_not_shut_the_gate(self):
        """Speculation is 1.3 times as fast as plain steps, with outliers, in 8 texts."""
        for seed in range(8):
            machine = Machine(always(1.6), geometric(0.6), noise=0.3, seed=seed).run(3000)
            assert [decision.choice for decision in machine.decisions] == [DRAFT]
            assert machine.choices.count(PLAIN) < 0.03 * len(machine.choices)


def later(first, other, from_token=1000):
    """A cost that is another one from a token on."""
    return lambda tokens: first if tokens < from_token else other


def growing(base):
    return lambda tokens: base * (1 + tokens / 500)


@pytest.mark.parametrize(
    ("cost", "plain", "tokens"),
    [(later(1.5, 7.5), later(1.0, 5.0), 3), (growing(1.5), growing(1.0), 2)],
    ids=["a machine that becomes slower", "costs that grow together"],
)
def test_costs_that_change_alike_do_not_shut_the_gate(cost, plain, tokens):
    """Speculating steps then take longer than the last measured plain one."""
    machine = Machine(cost, always(tokens), plain=plain).run(6000)
    assert [decision.choice for decision in machine.decisions] == [DRAFT]
    assert machine.choices[-500:].count(PLAIN) < 25


def test_the_gate_shuts_when_a_draft_stops_being_accepted():
    machine = Machine(always(2.0), lambda machine: later(4, 1, 2000)(machine.emitted)).run(6000)
    assert [decision.choice for decision in machine.decisions] == [DRAFT, PLAIN]
    assert machine.choices[-500:].count(DRAFT) < 25


class TestBound:
    """The gate uses an upper bound on the speed-up of speculation."""

    def test_speculation_that_cannot_pay_is_not_tried(self):
        machine = Machine(always(1.0), always(5), speedup_bound=always(1 + TRIAL_SHARE)).run(5000)
        assert set(machine.choices) == {PLAIN} and machine.now == machine.emitted
        (decision,) = machine.decisions
        assert (decision.choice, decision.tau, decision.plain_tokens_per_second) == (PLAIN, 0.0, 1.0)
        assert decision.draft_tokens_per_second == 1 + TRIAL_SHARE

    def test_speculation_is_tried_once_it_can_pay(self):
        growing = lambda machine: 1.0 if machine.length < PROMPT + 300 else 1.02  # noqa: E731
        machine = Machine(always(1.0), always(2), speedup_bound=growing).run(2000)
        assert machine.choices[:299] == [PLAIN] * 299
        assert machine.choices[-500:].count(DRAFT) >= 490
        assert [decision.choice for decision in machine.decisions] == [PLAIN, DRAFT]


def test_time_between_steps_does_not_count():
    """Calls that take turns, as in benchmarks/gate.py, do not bring the next trial nearer."""

    def run(pause):
        machine = Machine(always(2.0), geometric(0.2), noise=0.3)
        while machine.emitted < 5000:
            machine.step()
            machine.now += pause
        return machine.choices

    assert run(50.0) == run(0.0)


class Chain(Drafter):
    num_nodes, max_depth = 5, 4


BINDING = SimpleNamespace(target=SimpleNamespace(clock=time.perf_counter))


def test_a_drafter_of_the_root_alone_has_no_gate():
    gate = gate_of(Chain(BINDING), None)
    assert type(gate) is SpeculationGate and gate.most_tokens == 5
    assert gate_of(Drafter(BINDING), None) is None


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_rank_measures(rank):
    gate = SpeculationGate(5)
    gate.ranks = SimpleNamespace(rank=rank, first=list)
    for _ in range(30):
        gate.speculates()
        gate.record(1, 1, 9)
    assert (gate.choice == DRAFT) == (rank == 0)
