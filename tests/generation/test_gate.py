"""Decisions of the gate on a simulated machine with given costs and a simulated clock."""

import random
from collections import Counter
from statistics import mean
from types import SimpleNamespace

import pytest
import torch

from hf_longspec.generation.drafter import Drafter, drafted_tokens
from hf_longspec.generation.sequences import SpeculationStats
from hf_longspec.generation.special_cases.costs import Chances, Costs
from hf_longspec.generation.special_cases.gate import (
    GatedDrafter,
    SpeculationGate,
    choices,
    gate_of,
    has_levels,
)
from tests.generation.made_up_machine import BINDING, Levels, Machine, always

CHAIN, TREE, LONG = (1,) * 4, (4, 4, 4, 3), (1,) * 16
COSTS = {
    "flat": lambda nodes: 1 + 0.002 * nodes,  # a GPU at batch one
    "linear": lambda nodes: 0.3 + 0.7 * nodes,  # a large batch
    "cpu": lambda nodes: 1 + 0.09 * (nodes - 1),
}
SEEDS = range(6)


def per_draft(levels):
    return 0.1 * levels


class TestFixedChoices:
    """A thousand tokens, against the best fixed choice in hindsight: the same tree in every step, or none."""

    @pytest.mark.parametrize("largest", [CHAIN, TREE, LONG], ids=["chain", "tree", "long chain"])
    @pytest.mark.parametrize("rate", [0.3, 0.6, 0.9])
    @pytest.mark.parametrize("costs", COSTS)
    def test_it_is_as_fast_as_the_best_one(self, costs, rate, largest):
        """On average over seeds, as single texts are luckier than their mean."""
        machines = [Machine(COSTS[costs], per_draft, always(rate), largest, seed=seed).run(1000) for seed in SEEDS]
        assert mean(machine.now / (machine.best() * machine.emitted) for machine in machines) <= 1.06

    @pytest.mark.parametrize("rate", [0.3, 0.6, 0.9])
    def test_with_captured_sizes(self, rate):
        """Verification takes one of three times, and there are two trees."""
        stepped = lambda nodes: 1.0 if nodes <= 8 else 1.5 if nodes <= 16 else 2.5  # noqa: E731
        machines = [Machine(stepped, per_draft, always(rate), TREE, seed=seed, sizes=2) for seed in SEEDS]
        for machine in machines:
            machine.run(1000)
            assert {*machine.steps} <= {(), CHAIN, TREE}
        assert mean(machine.now / (machine.best() * machine.emitted) for machine in machines) <= 1.06

    @pytest.mark.parametrize("rate", [0.1, 0.6, 0.9])
    @pytest.mark.parametrize("costs", COSTS)
    def test_beside_other_programs(self, costs, rate):
        """Each step takes one to five times as long; the work that was done counts."""
        load = lambda source: source.uniform(1, 5)  # noqa: E731
        machines = [Machine(COSTS[costs], per_draft, always(rate), CHAIN, load, seed).run(1000) for seed in SEEDS]
        assert mean(machine.now / (machine.best() * machine.emitted) for machine in machines) <= 1.1

    def test_a_tree_is_drafted_where_it_is_free_and_a_chain_where_nodes_cost(self):
        for costs, expected in (("flat", TREE), ("cpu", CHAIN)):
            machine = Machine(COSTS[costs], per_draft, always(0.7), TREE).run(2000)
            usual = max(set(machine.steps), key=machine.steps.count)
            assert sum(usual) >= 8 if expected is TREE else max(usual) <= 2


class TestWhatTheDraftSays:
    @pytest.mark.parametrize("largest", [CHAIN, LONG], ids=["chain", "long chain"])
    @pytest.mark.parametrize("rate", [0.4, 0.6, 0.8])
    def test_chains_are_as_long_as_it_is_sure(self, rate, largest):
        """Tokens are easier or harder at random, and the same on average."""
        seconds = []
        for tells in (False, True):
            machines = [
                Machine(COSTS["cpu"], per_draft, always(rate), largest, seed=seed, tells=tells) for seed in SEEDS
            ]
            seconds.append(mean(machine.run(2000).now / machine.emitted for machine in machines))
        assert seconds[1] < seconds[0]

    def test_chains_end_where_the_draft_is_unsure(self):
        machine = Machine(COSTS["cpu"], per_draft, always(0.6), LONG, tells=True).run(500)
        gate = machine.gate

        def levels(shares):
            gate.speculates()
            gate.widths = LONG
            gate._begin_chain()
            next(depth for depth, share in enumerate(shares) if not gate.goes_on([share]))
            return len(gate._said), gate.kept()

        sure, unsure = levels([0.99] * 16), levels([0.99, 0.1] + [0.99] * 14)
        assert sure[0] > 3 and sure[0] == sure[1]
        assert unsure == (2, 1)  # the second token was drafted, and is not worth its verification
        assert levels([0.05] * 16)[1] == 1

    def test_drawn_tokens_are_verified_whatever_they_are(self):
        gate = Machine(COSTS["cpu"], per_draft, always(0.6), LONG, tells=True).run(500).gate
        gate.speculates()
        gate.widths = LONG
        gate._begin_chain()
        assert [gate.goes_on([share]) for share in (0.99, 0.01)] == [True, False]
        assert gate.kept(may_cut=False) == 2

    @pytest.mark.parametrize("with_q", [False, True])
    def test_a_chain_is_cut_unless_its_tokens_were_drawn(self, with_q):
        class Asked:
            shares = ()

            def goes_on(self, shares):
                self.shares = (*self.shares, shares)
                return len(self.shares) < 3

            def kept(self, may_cut=True):
                return 1 if may_cut else 3

        gate, scores = Asked(), torch.tensor([[0.1, 0.7, 0.2], [0.6, 0.3, 0.1]]).log()
        noise = torch.ones(8, 2, 3) if with_q else None
        tokens, q = drafted_tokens(None, torch.tensor([2, 2]), 8, lambda *_: scores, noise, with_q, gate)
        assert tokens.tolist() == ([[2, 1, 1, 1], [2, 0, 0, 0]] if with_q else [[2, 1], [2, 0]])
        assert (q is None) != with_q
        assert gate.shares == (pytest.approx([0.7, 0.6]),) * 3

    def test_rows_decide_together(self):
        gate = Machine(COSTS["cpu"], per_draft, always(0.6), LONG, tells=True).run(500).gate
        for shares, goes_on in (([0.99, 0.99], True), ([0.99, 0.01], None), ([0.01, 0.01], False)):
            gate.speculates()
            gate.widths = LONG
            gate._begin_chain()
            found = gate.goes_on(shares)
            assert gate._gains[0] == mean(gate._reached) and (goes_on is None or found == goes_on)


class TestLoss:
    @pytest.mark.parametrize("tells", [False, True])
    @pytest.mark.parametrize("drafting", [0.02, 0.1, 0.3])
    @pytest.mark.parametrize("largest", [CHAIN, TREE])
    @pytest.mark.parametrize("costs", ["cpu", "linear"])
    def test_a_useless_draft_loses_three_plain_steps_in_a_short_text(self, costs, largest, drafting, tells):
        """And then one per cent."""
        for seed in SEEDS:
            how = {"seed": seed, "tells": tells}
            machine = Machine(COSTS[costs], lambda levels: drafting * levels, always(0.0), largest, **how).run(64)
            assert machine.now - machine.emitted <= 3.6  # a step may be dearer than it was expected to be
            assert machine.run(1000).now <= 1.02 * machine.emitted

    def test_first_steps_that_take_longer_do_not_end_a_useful_draft(self):
        """The first verification of each size takes twice as long as later ones, and the first draft four times."""
        machines = []
        for seed in range(24):
            seen = set()

            def first(size, factor, seen=seen):
                return 1 if size in seen else seen.add(size) or factor

            machine = Machine(
                lambda nodes, first=first: COSTS["cpu"](nodes) * first(nodes, 2 if nodes > 1 else 1),
                lambda levels, first=first: 0.1 * levels * (first("draft", 4) if levels else 1),
                always(0.7),
                TREE,
                seed=seed,
            )
            machines.append(machine.run(1000))
        assert mean(machine.now / machine.emitted for machine in machines) <= 1.15 * machines[0].best()

    def test_first_plain_steps_that_take_longer_are_measured_again(self):
        """So that a draft does not seem to pay in many calls."""
        steps = iter(range(100))
        load = lambda _: 1.8 if next(steps) < 2 else 1.0  # noqa: E731
        machine = Machine(COSTS["cpu"], lambda levels: 0.9 * levels, always(0.95), load=load).run(60)
        assert machine.gate.costs(1) == pytest.approx(1.0, rel=0.05)

    def test_the_first_drafting_alone_tells_no_cost(self):
        gate = SpeculationGate(Levels(CHAIN), lambda power, earlier: Costs())
        for nodes, seconds, expected in ((1, 0.0, 0.4), (5, 3.0, 0.4), (5, 0.8, 0.8)):  # in plain steps
            verified = SimpleNamespace(tokens=[[0]], nodes=[[0]], tree=SimpleNamespace(num_nodes=nodes))
            gate.record(verified, seconds, 1.0, is_draft=nodes > 1)
            assert gate.drafting(4) == pytest.approx(expected)

    def test_it_is_tried_again_and_noticed_when_it_becomes_useful(self):
        machine = Machine(COSTS["cpu"], per_draft, lambda emitted: 0.0 if emitted < 500 else 0.9).run(500)
        assert machine.steps[-50:].count(()) >= 48
        machine.run(2000)
        assert machine.steps[-50:].count(()) <= 2

    def test_it_is_noticed_when_it_becomes_useless(self):
        machine = Machine(COSTS["cpu"], per_draft, lambda emitted: 0.9 if emitted < 500 else 0.0).run(500)
        assert machine.steps[-20:].count(()) <= 2
        spent = machine.run(600).now
        assert machine.run(2000).now - spent <= 1.03 * 1400

    def test_later_calls_begin_with_what_is_known(self):
        """Against the better of two ways, plain or the best tree, from the third call on."""
        for rate, most in ((0.02, 1.02), (0.85, 1.05)):
            machine = Machine(COSTS["cpu"], per_draft, always(rate))
            calls = [machine.call(100) for _ in range(50)]
            seconds, tokens = (sum(values) for values in zip(*calls[2:], strict=True))
            assert seconds / tokens <= most * machine.best()

    @pytest.mark.parametrize("rate", [0.15, 0.45, 0.75])
    @pytest.mark.parametrize("factor", [0.6, 1.6])
    def test_the_machine_and_the_text_may_be_others_in_later_calls(self, factor, rate):
        """Against the better of two ways, as above. A level takes a fifth of a plain step."""
        speed, right = 1.0, 0.9
        costs, drafting = COSTS["cpu"], lambda levels: 0.2 * levels
        machines = [Machine(costs, drafting, lambda _: right, load=lambda _: speed, seed=seed) for seed in range(12)]
        for machine in machines:
            machine.run(300)
        speed, right = factor, rate
        calls = [machine.call(100) for machine in machines for _ in range(3)]
        seconds, tokens = (sum(values) for values in zip(*calls, strict=True))
        assert seconds / tokens <= 1.08 * machines[0].best()

    def test_the_machine_and_the_text_may_change_in_a_long_call(self):
        seconds = tokens = 0.0
        for seed in SEEDS:
            speed, right = 1.0, 0.9
            how = {"load": lambda _: speed, "seed": seed}  # noqa: B023
            machine = Machine(COSTS["cpu"], lambda levels: 0.2 * levels, lambda _: right, **how).run(4000)  # noqa: B023
            speed, right = 0.6, 0.45
            spent, emitted = machine.now, machine.emitted
            machine.run(4600)
            seconds, tokens = seconds + machine.now - spent, tokens + machine.emitted - emitted
        assert seconds / tokens <= 1.12 * machine.best()


class TestCosts:
    def test_one_slow_step_decides_nothing(self):
        costs = Costs()
        for size, seconds in ((1, 1.0), (1, 1.0), (5, 9.0), (5, 1.4), (5, 1.4)):
            costs.add(size, seconds)
        assert costs(5) == 1.4

    def test_larger_trees_cost_no_less(self):
        costs = Costs()
        for size, seconds in ((1, 1.0), (4, 2.0), (8, 1.5)):
            for _ in range(3):
                costs.add(size, seconds)
        assert costs(1) == 1.0 and costs(4) == costs(6) == costs(8) == pytest.approx(1.75)

    def test_longer_texts_begin_with_the_costs_of_shorter_ones_in_proportion(self):
        costs = Costs()
        for size, seconds in ((1, 1.0), (9, 1.5)):
            for _ in range(3):
                costs.add(size, seconds)
        longer = Costs(costs, is_other_length=True)
        assert longer(1) == 1.0 and longer(9) == 1.5 and costs.is_certain(1) and not longer.is_certain(1)
        longer.add(1, 2.0)
        assert longer(1) == 2.0 and longer(9) == 3.0 and longer.is_certain(1)
        for _ in range(4):
            longer.add(9, 4.0)
        assert longer(1) == 2.0 and longer(9) == 4.0

    def test_other_lengths_begin_with_the_cost_of_plain_steps_in_proportion(self):
        """N-grams may be verified before any plain step."""
        costs = Costs()
        for size, seconds in ((1, 1.0), (9, 3.0)):
            for _ in range(3):
                costs.add(size, seconds)
        longer = Costs(costs, is_other_length=True)
        longer.add(9, 6.0)
        assert longer(1) == 2.0 and longer(9) == 6.0 and not longer.is_certain(1)

    def test_steps_of_one_size_tell_the_costs_of_others_in_a_later_call(self):
        costs = Costs()
        for size, seconds in ((1, 1.0), (9, 1.5)):
            for _ in range(16):
                costs.add(size, seconds)
        later = Costs(costs)
        for seconds in (1.0, 3.0, 3.0):  # the first one beside something else
            later.add(9, seconds)
        assert later(1) == 2.0 and later(9) == 3.0
        for _ in range(9):
            later.add(1, 1.8)
        assert later(1) == pytest.approx(1.8)


class TestNgrams:
    @pytest.fixture
    def gate(self):
        drafter = Levels(())
        drafter.num_nodes, drafter.max_depth, drafter.chooses_nodes = 17, 8, True
        costs = Costs()
        for size in (1, 5, 9, 17):
            for _ in range(3):
                costs.add(size, COSTS["cpu"](size))
        gate = SpeculationGate(drafter, lambda power, earlier: costs)
        gate.reach(100)
        return gate

    def test_a_long_match_is_verified_further_than_a_short_one(self, gate):
        path, sizes = tuple(range(8)), []
        for _ in range(30):
            gate.chances.add_match([(path, 8)], path)  # long matches have been right, short ones wrong
            gate.chances.add_match([(path, 1)], [99])
        for length in (1, 8):
            paths, count = gate.cut([[(path, length)]], nodes=1, most=16)
            sizes.append((len(paths[0][0]) if paths[0] else 0, count))
        assert sizes == [(0, 0), (8, 8)]

    def test_nothing_is_measured_first(self):
        """Without a draft to run, the first step may verify what was found."""
        drafter, path = Levels(()), tuple(range(8))
        drafter.num_nodes, drafter.max_depth, drafter.chooses_nodes = 17, 8, True
        gate = SpeculationGate(drafter, lambda power, earlier: Costs(earlier))
        gate.reach(100)
        assert gate.speculates() and 0 < gate.cut([[(path, 8)]], nodes=1, most=16)[1] < 8

    def test_rows_decide_together(self, gate):
        """A row without a match is padded to the nodes of the other one."""
        path = tuple(range(8))
        for _ in range(30):
            gate.chances.add_match([(path, 8)], path)
        alone = gate.cut([[(path, 8)]], nodes=1, most=16)[1]
        paths, beside = gate.cut([[(path, 8)], [], [], []], nodes=1, most=16)
        assert 0 < beside <= alone and paths[1:] == [[], [], []]

    def test_all_ranks_verify_what_the_first_one_chose(self, gate):
        path = tuple(range(8))
        for _ in range(30):
            gate.chances.add_match([(path, 8)], path)
        rows = [[(path, 8), ((0, 9, 9), 1)], [], [(path[:3], 2)]]
        expected, sent = gate.cut(rows, nodes=1, most=16), []
        gate.ranks = SimpleNamespace(rank=0, first=lambda numbers: sent.append(numbers) or numbers)
        assert gate.cut(rows, nodes=1, most=16) == expected and 0 < expected[1] < 16
        other = SpeculationGate(gate._drafter, None, SimpleNamespace(rank=1, first=lambda numbers: sent[0]))
        assert other.cut(rows, nodes=1, most=16) == expected

    def test_what_was_not_verified_is_learned_from_too(self, gate):
        """Plain steps show whether the n-grams that they did not verify were right."""
        path = tuple(range(8))
        for _ in range(8):
            gate.chances.add_match([(path, 1)], [99])
        assert gate.cut([[(path, 1)]], nodes=1, most=16)[1] == 0
        for _ in range(30):
            gate.cut([[(path, 1)]], nodes=1, most=16)
            tree = SimpleNamespace(num_nodes=1)
            gate.record(SimpleNamespace(tokens=[[0]], nodes=[[0]], tree=tree), 0.0, 1.0, is_draft=True)
        assert gate.cut([[(path, 1)]], nodes=1, most=16)[1] > 0

    def test_tokens_that_paths_share_are_counted_once(self):
        chances = Chances(0.6)
        paths = [((1, 2, 3), 4), ((1, 2, 7), 2)]
        gains = chances.gains(paths)
        assert [index for _, index in gains].count(0) == 3 and [index for _, index in gains].count(1) == 1


class JoinedLevels(Levels):
    """Trees of levels, and up to 16 nodes of n-grams."""

    def __init__(self, largest):
        super().__init__(largest)
        self.first_ngram_node, self.num_nodes = self.num_nodes, self.num_nodes + 16


class TestNgramsBesideADraft:
    """N-grams that join a draft, whose first candidates are right with the chance `rate`."""

    def steps(self, rate, match, is_right, found_in=0.7, drafting=0.1, count=300):
        """Return the kinds of the last 100 steps, and the seconds per token of all.

        An n-gram of eight tokens after a match of so many tokens is found in most steps, and all or none is right.
        """
        source, costs, path = random.Random(0), Costs(), tuple(range(8))
        gate = SpeculationGate(JoinedLevels(CHAIN), lambda power, earlier: costs)
        gate.reach(1024)
        kinds, seconds, tokens = [], 0.0, 0
        for _ in range(count):
            drafts = gate.speculates()
            levels = len(gate.widths) if drafts else 0
            rights = next((n for n in range(levels) if source.random() >= rate), levels)
            nodes, ngrams = 1 + levels, 0
            if drafts or gate.only_ngrams:
                _, ngrams = gate.cut([[(path, match)] * (source.random() < found_in)], nodes, 16)
            emitted = 1 + max(rights, ngrams if is_right else 0)
            kept = [*range(1, 1 + rights), *range(nodes + rights, nodes + emitted - 1)]  # equal nodes are the draft's
            new = [*path[: emitted - 1], 99] if is_right else [99] * emitted
            tree = SimpleNamespace(num_nodes=nodes + ngrams)
            spent = drafting * levels, COSTS["cpu"](nodes + ngrams)
            gate.record(SimpleNamespace(tokens=[new], nodes=[[0, *kept]], tree=tree), *spent, is_draft=drafts)
            kinds.append("draft" if drafts else "n-grams" if gate.only_ngrams else "plain")
            seconds, tokens = seconds + sum(spent), tokens + emitted
        return Counter(kinds[-100:]), seconds / tokens

    def test_trees_are_told_apart_as_without_them(self):
        assert choices(JoinedLevels((4, 2))) == choices(Levels((4, 2))) and has_levels(JoinedLevels((4, 2)))

    def test_they_are_verified_without_a_draft_that_does_not_pay(self):
        kinds, seconds = self.steps(rate=0.05, match=8, is_right=True)
        assert kinds["n-grams"] >= 95 and seconds < 0.35

    def test_they_are_verified_without_a_draft_that_adds_too_little(self):
        """It would pay on its own."""
        kinds, _ = self.steps(rate=0.6, match=8, is_right=True)
        assert kinds["n-grams"] >= 90
        kinds, _ = self.steps(rate=0.6, match=8, is_right=False, found_in=0.0)
        assert kinds["draft"] >= 95

    def test_they_are_verified_beside_a_draft_that_pays(self):
        kinds, _ = self.steps(rate=0.6, match=2, is_right=False)
        assert kinds["draft"] >= 95

    def test_a_useless_draft_with_useless_ngrams_loses_little(self):
        _, seconds = self.steps(rate=0.05, match=2, is_right=False, count=1000)
        assert seconds <= 1.02

    def test_tokens_that_the_tree_has_are_no_gain(self):
        chances, path = Chances(0.6), [((1, 2, 3), 4)]
        alone, beside = chances.gains(path), chances.gains(path, reached=[0.5, 0.25])
        assert [gain for gain, _ in beside] == sorted(
            (gain * left for (gain, _), left in zip(alone, (0.5, 0.75, 1.0), strict=True)), reverse=True
        )

    def test_paths_are_verified_from_their_beginnings_on(self):
        """Also where later tokens gain more, as the tree beside them seldom reaches these."""
        gains = Chances(0.6).gains([((1, 2, 3), 8)], reached=[0.9, 0.1])
        assert [gain for gain, _ in gains] == pytest.approx([0.65 * 0.1, 0.65**2 * 0.9, 0.65**3])

    def test_a_step_in_which_the_draft_is_awaited_is_none_of_ngrams(self):
        """It brings the draft up to date, with the root alone."""
        drafter = JoinedLevels(CHAIN)
        drafter.ngrams = drafter
        drafter.binding = SimpleNamespace(
            target=SimpleNamespace(clock=lambda: 0.0),
            cache=SimpleNamespace(lengths=SimpleNamespace(host=[9])),
        )
        gate = SpeculationGate(drafter, lambda *_: Costs())
        gated = GatedDrafter(drafter, gate, SpeculationStats(), lambda: None)
        gated._is_open, gated.is_awaited = False, True
        assert gated.propose(torch.tensor([5])).num_nodes == 1 and not gate.only_ngrams

    def test_a_compiled_target_has_no_more_sizes(self):
        """A further size takes minutes to compile."""
        gates = [SpeculationGate(JoinedLevels(CHAIN), lambda *_: Costs(), sizes=sizes) for sizes in (0, 1, 2)]
        for gate in gates:
            gate.reach(9)
            gate.speculates()
        assert [gate.only_ngrams for gate in gates] == [True, False, True]


def test_trees_that_a_drafter_may_draft():
    assert [widths for widths, _ in choices(Levels((1, 1, 1)))] == [(1,), (1, 1), (1, 1, 1)]
    found = choices(Levels((4, 2)))
    assert found == [((1,), 2), ((1, 1), 3), ((2,), 3), ((2, 2), 5), ((4,), 5), ((4, 2), 7)]
    assert choices(Levels((4, 2)), 2) == [((1, 1), 3), ((4, 2), 7)]
    assert choices(Levels((4, 2)), 1) == [((4, 2), 7)]


def test_a_drafter_of_the_root_alone_has_no_gate():
    gate = gate_of(Levels(CHAIN), lambda power, earlier: Costs())
    assert type(gate) is SpeculationGate and gate.widths == CHAIN
    assert gate_of(Drafter(BINDING), None) is None
    sharded = SimpleNamespace(is_everyone=False)
    assert gate_of(Levels(CHAIN), None, sharded) is None


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_rank_measures(rank):
    gate = SpeculationGate(Levels(CHAIN), lambda power, earlier: Costs(), SimpleNamespace(rank=rank, first=list))
    gate.reach(9)
    for _ in range(5):
        gate.speculates()
        tree = SimpleNamespace(num_nodes=1)
        gate.record(SimpleNamespace(tokens=[[0]], nodes=[[0]], tree=tree), 0.0, 1.0, is_draft=False)
    assert gate.speculates() == (rank == 0)
