"""The gate's choice among several trees, on a simulated machine with given costs."""

import pytest

from hf_longspec.generation.gate import PLAIN, TRIAL_SHARE
from hf_longspec.generation.tree_tuner import GROWTH
from tests.generation.made_up_machine import Machine, Tree, always, geometric

BIG, SMALL, WIDE = "[4, 4, 4, 3]", "[1, 1]", "[8, 8]"


def trees(*rows):
    """Return trees from rows of `(cost, tokens, depth, nodes, name)`."""
    return [
        Tree(
            cost if callable(cost) else always(cost), tokens if callable(tokens) else always(tokens), depth, name, nodes
        )
        for cost, tokens, depth, nodes, name in rows
    ]


def share(machine, name, last):
    return machine.choices[-last:].count(name) / last


class TestUselessDraft:
    @pytest.mark.parametrize(
        ("cost", "others", "depth"), [(1.02, 2.0, 8), (1.5, 0.5, 4), (3.0, 1.0, 8), (10.0, 0.5, 4)]
    )
    def test_a_thousand_tokens_take_at_most_three_percent_longer_than_plain(self, cost, others, depth):
        """Over a plain step, the other trees cost half as much more, as much more, or twice as much more."""
        over = 1 + (cost - 1) * others
        nodes = 1 + int(15 * others)
        useless = trees((cost, 1, depth, 16, BIG), (over, 1, depth, nodes, SMALL), (over, 1, depth, nodes, WIDE))
        machine = Machine(trees=useless).run(1000)
        assert machine.now <= 1.03 * machine.emitted
        assert machine.choices.count(BIG) >= 3
        assert {decision.choice for decision in machine.decisions} <= {PLAIN}

    def test_repeated_trials_of_every_tree_cost_a_bounded_share(self):
        useless = trees((4.0, 1, 4, 16, BIG), (1.7, 1, 2, 3, SMALL), (8.0, 1, 2, 17, WIDE))
        machine = Machine(trees=useless).run(20_000)
        assert all(machine.choices.count(name) >= 3 for name in (BIG, SMALL, WIDE))
        assert machine.now <= (1 + 2 * TRIAL_SHARE) * machine.emitted


class TestGoodDraft:
    @pytest.mark.parametrize(
        ("cost", "tokens", "others", "accepted"),
        [(1.2, 2, 2.0, 1), (1.5, 5, 1.0, 1), (1.5, 5, 1.0, 0.5), (1.2, 2, 1.1, 1.0), (1.5, 5, 4.0, 1.2)],
    )
    def test_a_thousand_tokens_lose_at_most_two_percent(self, cost, tokens, others, accepted):
        """Other trees cost `others` times as much and emit `accepted` times as many tokens, but at least 1."""
        much = max(1, round(tokens * accepted))
        worse = [(cost * others, min(much, 5), 4, int(16 * others), name) for name in (SMALL, WIDE)]
        machine = Machine(trees=trees((cost, tokens, 4, 16, BIG), *worse)).run(1000)
        assert machine.now <= 1.02 * machine.emitted * cost / tokens
        assert machine.decisions[0].choice == BIG and len(machine.decisions) == 1

    def test_noise_does_not_replace_the_best_tree(self):
        """Trees that emit fewer tokens at the same cost are not taken, in 8 texts."""
        for seed in range(8):
            worse = trees((1.6, geometric(0.6), 4, 16, BIG), (1.6, geometric(0.45), 4, 16, SMALL))
            machine = Machine(trees=worse, noise=0.3, seed=seed).run(5000)
            assert [decision.choice for decision in machine.decisions] == [BIG]
            assert machine.choices.count(SMALL) < 0.1 * len(machine.choices)


class TestBetterTree:
    def test_it_is_found_if_the_configured_tree_does_not_pay(self):
        """Sixteen nodes cost too much and three do not, as on a CPU."""
        machine = Machine(trees=trees((4.0, 2, 4, 16, BIG), (1.4, 1.8, 2, 3, SMALL))).run(400)
        assert [decision.choice for decision in machine.decisions] == [SMALL]
        assert machine.decisions[0].tau == pytest.approx(1.8)
        assert machine.decisions[0].draft_tokens_per_second == pytest.approx(1.8 / 1.4)
        assert share(machine, SMALL, 100) >= 0.99
        assert machine.choices.index(SMALL) < 30

    def test_it_is_found_if_the_configured_tree_pays(self):
        machine = Machine(trees=trees((1.5, 2, 4, 16, BIG), (1.5, 2.6, 4, 16, WIDE))).run(2000)
        assert [decision.choice for decision in machine.decisions] == [BIG, WIDE]
        assert share(machine, WIDE, 200) > 0.9
        assert machine.now < 0.9 * machine.emitted * 1.5 / 2

    def test_noise_does_not_hide_it(self):
        found = 0
        for seed in range(8):
            better = trees((1.6, geometric(0.45), 4, 16, BIG), (1.6, geometric(0.7), 4, 16, WIDE))
            machine = Machine(trees=better, noise=0.3, seed=seed).run(5000)
            found += share(machine, WIDE, 300) > 0.4
        assert found == 8

    def test_the_best_of_three_trees_is_found(self):
        three = trees((1.6, 2, 4, 16, BIG), (1.3, 1.8, 2, 3, SMALL), (1.7, 3, 2, 17, WIDE))
        machine = Machine(trees=three).run(4000)
        assert machine.decisions[-1].choice == WIDE and share(machine, WIDE, 300) > 0.9


class TestCostsThatChange:
    def test_the_best_tree_changes_with_the_length(self):
        """A wide tree becomes cheap at one length and expensive again at a longer one."""
        wide = lambda emitted: 3.0 if not 3000 < emitted < 9000 else 1.6  # noqa: E731
        machine = Machine(trees=trees((1.4, 2, 4, 16, BIG), (wide, 3.2, 4, 20, WIDE)), prompt=1000).run(16_000)
        assert [decision.choice for decision in machine.decisions] == [BIG, WIDE, BIG]
        lengths = [decision.length for decision in machine.decisions]
        assert 4000 < lengths[1] <= 4000 * GROWTH + 400
        assert 10_000 < lengths[2] <= 10_000 * GROWTH + 400

    def test_a_draft_that_begins_to_pay_with_one_tree_is_found(self):
        plain = lambda emitted: 1.0 if emitted < 1000 else 3.0  # noqa: E731
        machine = Machine(trees=trees((9.0, 2, 4, 16, BIG), (2.0, 1.5, 2, 3, SMALL)), plain=plain).run(8000)
        assert [decision.choice for decision in machine.decisions] == [PLAIN, SMALL]
        assert share(machine, SMALL, 300) > 0.9


def test_equal_trees_do_not_alternate():
    for noise in (0.0, 0.3):
        same = trees((1.5, geometric(0.6), 4, 16, BIG), (1.5, geometric(0.6), 4, 16, WIDE))
        machine = Machine(trees=same, noise=noise).run(20_000)
        assert len(machine.decisions) <= 4
        assert PLAIN not in {decision.choice for decision in machine.decisions}


def test_a_slow_first_step_of_a_tree_does_not_count():
    """The first step takes a minute, as when it compiles."""
    seen = set()

    def cost(_):
        first = not seen
        seen.add(WIDE)
        return 60.0 if first else 1.5

    machine = Machine(trees=trees((1.5, 2, 4, 16, BIG), (cost, 3, 4, 16, WIDE))).run(2000)
    assert [decision.choice for decision in machine.decisions] == [BIG, WIDE]
    assert machine.decisions[1].draft_tokens_per_second == pytest.approx(2.0)
