"""Shadow drafts: how accepted tokens are counted, when a trial is suggested, and their use in the gate and in calls."""

import pytest
import torch

from hf_longspec import NgramDraftModel
from hf_longspec.generation.gate import (
    DRAFT,
    MOST_PATIENCE,
    PATIENCE,
    PLAIN,
    SHADOW_FEWEST,
    SHADOW_MARGIN,
    SHADOW_RECENT,
    SHADOW_SHARE,
    ShadowDraft,
    gate_of,
)
from tests.distributions import trie
from tests.generation.made_up_machine import Machine, always, geometric

PROPOSAL = 0.06  # in plain steps: n-grams of a text of 16K tokens beside a step of 8 ms
LATE = 16384  # length of a prompt so long that the growth of the text causes no new trial


def accepted_by_hand(paths, text):
    """Return the tokens that a step would emit: the longest prefix that the text shares with a path, plus one."""
    longest = 0
    for path in paths:
        same = 0
        while same < min(len(path), len(text)) and path[same] == text[same]:
            same += 1
        longest = max(longest, same)
    return longest + 1


class TestCounting:
    @pytest.mark.parametrize("text", [[4, 7, 9, 1], [4, 7, 3, 3], [4, 8, 1, 1], [5, 5, 5, 5], [6, 4, 4, 4]])
    def test_counts_match_a_verification(self, text):
        paths = [[4, 7, 9], [4, 7, 3], [5, 5]]
        shadow = ShadowDraft()
        shadow.begin(trie([paths], root=torch.tensor([2]), num_nodes=9), 0.0)
        for token in text:
            shadow.follow([[token]])
        assert list(shadow.recent) == [accepted_by_hand(paths, text)]

    def test_the_mean_over_rows_is_taken_when_all_have_left_their_trees(self):
        paths, texts = [[[1, 2, 3]], [[1, 2, 3]], [[9]]], [[1, 2, 8, 8], [7, 7, 7, 7], [9, 9, 9, 9]]
        shadow = ShadowDraft()
        shadow.begin(trie(paths, root=torch.tensor([5, 5, 5]), num_nodes=5), 0.0)
        for step in range(3):
            assert not shadow.is_due(100.0) and not shadow.recent
            shadow.follow([[text[step]] for text in texts])
        assert list(shadow.recent) == [(3 + 1 + 2) / 3] and shadow.is_due(100.0)

    def test_rows_that_end_early_do_not_count(self):
        shadow = ShadowDraft()
        shadow.begin(trie([[[1, 2]]] * 2, root=torch.tensor([5, 5]), num_nodes=3), 0.0)
        shadow.follow([[1], [1]])
        shadow.follow([[], [2]])
        shadow.follow([[], [3]])
        assert list(shadow.recent) == [3]
        shadow.begin(trie([[[1, 2]]] * 2, root=torch.tensor([5, 5]), num_nodes=3), 0.0)
        shadow.follow([[], []])
        assert list(shadow.recent) == [3] and shadow.is_due(100.0)

    def test_proposals_take_a_bounded_share_of_the_time(self):
        shadow = ShadowDraft()
        assert shadow.is_due(0.0)
        shadow.begin(trie([[[1]]], root=torch.tensor([5]), num_nodes=2), 2.0)
        shadow.follow([[7]])
        assert not shadow.is_due(1.99 / SHADOW_SHARE) and shadow.is_due(2.01 / SHADOW_SHARE)


class TestSuggestion:
    @staticmethod
    def made_of(results):
        shadow = ShadowDraft()
        for tokens in results:
            shadow.count(tokens)
        return shadow

    @staticmethod
    def fails_and_waits(shadow):
        """Return the time until the next suggestion after a suggested trial that failed at time 0 and cost 1 second."""
        shadow.begin_trial()
        shadow.fail(lost=1.0, now=0.0)
        assert not shadow.recent
        for _ in range(SHADOW_RECENT):
            shadow.count(5)
        return next(time for time in range(2 * MOST_PATIENCE) if shadow.suggests(1.0, time))

    def test_too_few_results_suggest_nothing(self):
        assert not self.made_of([5] * (SHADOW_FEWEST - 1)).suggests(1.0, 0.0)
        assert self.made_of([5] * SHADOW_FEWEST).suggests(1.0, 0.0)

    def test_only_a_clear_gain_is_suggested(self):
        assert self.made_of([3] * SHADOW_RECENT).suggests(0.99 * 3 / SHADOW_MARGIN, 0.0)
        assert not self.made_of([3] * SHADOW_RECENT).suggests(1.01 * 3 / SHADOW_MARGIN, 0.0)
        assert not self.made_of([1, 5] * (SHADOW_RECENT // 2)).suggests(0.99 * 3 / SHADOW_MARGIN, 0.0)

    def test_old_results_are_dropped(self):
        assert self.made_of([1] * 100 + [5] * SHADOW_RECENT).suggests(4.0, 0.0)

    def test_failed_suggestions_delay_the_next_one(self):
        shadow = self.made_of([])
        for times in range(8):
            assert self.fails_and_waits(shadow) == min(MOST_PATIENCE, PATIENCE * 2**times)
        shadow.confirm()
        assert self.fails_and_waits(shadow) == PATIENCE

    def test_a_failed_regular_trial_delays_no_suggestion(self):
        shadow = self.made_of([])
        shadow.fail(lost=50.0, now=10.0)
        for _ in range(SHADOW_RECENT):
            shadow.count(5)
        assert shadow.suggests(1.0, 10.0)


class TestGate:
    @pytest.mark.parametrize(("late", "cost"), [(100, 3.3), (300, 1.5), (600, 3.3)])
    def test_a_draft_that_becomes_good_late_is_found_at_once(self, cost, late):
        """Takes at most 1.12 times as long as an ideal gate; without shadow drafts it is 1.14 to 2.5 times."""
        accepted = lambda machine: 5 if machine.emitted >= late else 1  # noqa: E731
        ideal = late + (1000 - late) * cost / 5
        machine, without = (
            Machine(always(cost), accepted, proposal=proposal, prompt=LATE).run(1000) for proposal in (PROPOSAL, None)
        )
        assert machine.now <= 1.12 * ideal < without.now
        assert [decision.choice for decision in machine.decisions] == [PLAIN, DRAFT]
        assert machine.decisions[1].length <= LATE + late + 180

    @pytest.mark.parametrize("cost", [1.1, 3.0])
    def test_a_useless_draft_still_costs_at_most_three_percent(self, cost):
        machine = Machine(always(cost), always(1), proposal=PROPOSAL).run(1000)
        assert machine.now <= 1.03 * machine.emitted
        assert machine.proposals > 50

    @pytest.mark.parametrize(("period", "cost"), [(30, 2.0), (60, 3.3), (200, 3.3)])
    def test_a_draft_that_alternates_between_good_and_bad_costs_little(self, cost, period):
        """Suggestions fail again and again. The worst of these cases loses seven per cent."""
        accepted = lambda machine: 5 if machine.emitted // period % 2 else 1  # noqa: E731
        machine = Machine(always(cost), accepted, proposal=PROPOSAL, prompt=LATE).run(4000)
        assert machine.now <= 1.08 * machine.emitted

    @pytest.mark.parametrize(("rate", "cost"), [(0.3, 2.0), (0.5, 2.0), (0.7, 3.0)])
    def test_a_draft_that_is_never_quite_good_enough(self, rate, cost):
        machine = Machine(always(cost), geometric(rate), proposal=PROPOSAL, prompt=LATE).run(4000)
        assert machine.now <= 1.05 * machine.emitted

    def test_nothing_is_proposed_while_speculation_is_on(self):
        machine = Machine(always(1.2), always(4), proposal=PROPOSAL).run(1000)
        assert machine.proposals == 0


class TestCalls:
    """Calls on a clock on which verifying a draft takes ten plain steps, and proposing takes no time."""

    @pytest.fixture
    def shadows(self, monkeypatch):
        """Return the shadow drafts of all calls of a test."""
        made = []

        def make(wanted, drafter, ranks, known=None):
            gate = gate_of(wanted, drafter, ranks)
            slow_drafts(gate)
            if gate.shadow is not None:
                gate.shadow = Recorded(drafter)
            made.append(gate.shadow)
            return gate

        monkeypatch.setattr("hf_longspec.generation.gate.gate_of", make)
        return made

    def test_counts_match_the_text(self, plain_run, shadows):
        run = plain_run("llama", (23,), max_new_tokens=250, eos_token_id=None)
        draft = NgramDraftModel.from_target(run.model)
        out = run.again(draft, return_dict_in_generate=True)
        assert out.sequences.tolist() == run.sequences.tolist()
        (shadow,), (text,) = shadows, run.generated
        assert len(shadow.recorded) > 10 and max(found for *_, found in shadow.recorded) > 1
        at = 0
        for tree, known, found in shadow.recorded:
            paths = [tree.tokens[0][line].tolist()[1:] for line in tree.mask[0]]
            # the drafter had read up to the root, and the counted tokens end before the next tree begins
            begin = known - run.prompt_length
            assert begin >= at and text[begin - 1] == tree.tokens[0, 0]
            assert accepted_by_hand(paths, text[begin:]) == found
            at = begin + found

    def test_only_drafts_without_a_forward_are_followed(self, plain_run, shadows):
        run = plain_run("llama", (23,), max_new_tokens=20, eos_token_id=None)
        for draft in (run.draft("tree"), run.draft("specattn"), NgramDraftModel.from_target(run.model)):
            assert run.again(draft).tolist() == run.sequences.tolist()
        assert [shadow is not None for shadow in shadows] == [False, False, True]


class Recorded(ShadowDraft):
    """Record every tree that was counted, the number of tokens that its drafter had read, and the counted tokens."""

    def __init__(self, drafter):
        super().__init__()
        self.recorded, self.drafter = [], drafter

    def begin(self, tree, seconds):
        super().begin(tree, seconds)
        self.followed = tree, len(self.drafter.indexes[0].text)

    def count(self, tokens):
        super().count(tokens)
        self.recorded.append((*self.followed, tokens))


def slow_drafts(gate):
    """Let a step that drafts take ten seconds and a plain one, one; proposals take none."""
    now, record = 0.0, gate.record

    def timed(*args):
        nonlocal now
        now += 10.0 if gate.choice == DRAFT else 1.0
        return record(*args)

    gate.clock, gate.record = lambda: now, timed
