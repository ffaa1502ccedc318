"""Drafts compared with plain steps: what is counted, when it counts, and what a call does with it."""

import pytest
import torch

from hf_longspec import NgramDraftModel
from hf_longspec.generation import decoding
from hf_longspec.generation.draft_tree import merge_paths
from hf_longspec.generation.gating import gate_of
from hf_longspec.generation.rehearsal import FEWEST, MARGIN, MOST_PATIENCE, PATIENCE, RECENT, SHARE, Rehearsal
from hf_longspec.generation.speculation_gate import DRAFT, PLAIN
from tests.generation.made_up_machine import Machine, always, geometric

PROPOSAL = 0.06  # of a plain step: n-grams of a text of 16K tokens beside a step of 8 ms
LATE = 16384  # prompt: nothing is tried anew because the text has grown


def accepted_by_hand(paths, text):
    """Tokens that a step would emit: the longest beginning of the text that is a path's too, and one more."""
    longest = 0
    for path in paths:
        same = 0
        while same < min(len(path), len(text)) and path[same] == text[same]:
            same += 1
        longest = max(longest, same)
    return longest + 1


def heard(rehearsal):
    return list(rehearsal._recent)


class TestCounting:
    @pytest.mark.parametrize("text", [[4, 7, 9, 1], [4, 7, 3, 3], [4, 8, 1, 1], [5, 5, 5, 5], [6, 4, 4, 4]])
    def test_as_the_verification_of_the_tree_would(self, text):
        paths = [[4, 7, 9], [4, 7, 3], [5, 5]]
        rehearsal = Rehearsal()
        rehearsal.begin(merge_paths([paths], root=torch.tensor([2]), num_nodes=9), 0.0)
        for token in text:
            rehearsal.follow([[token]])
        assert heard(rehearsal) == [accepted_by_hand(paths, text)]

    def test_rows_are_averaged_when_the_last_one_has_left_its_tree(self):
        paths, texts = [[[1, 2, 3]], [[1, 2, 3]], [[9]]], [[1, 2, 8, 8], [7, 7, 7, 7], [9, 9, 9, 9]]
        rehearsal = Rehearsal()
        rehearsal.begin(merge_paths(paths, root=torch.tensor([5, 5, 5]), num_nodes=5), 0.0)
        for step in range(3):
            assert not rehearsal.is_due(100.0) and not heard(rehearsal)
            rehearsal.follow([[text[step]] for text in texts])
        assert heard(rehearsal) == [(3 + 1 + 2) / 3] and rehearsal.is_due(100.0)

    def test_rows_that_end_on_the_way_do_not_count(self):
        rehearsal = Rehearsal()
        rehearsal.begin(merge_paths([[[1, 2]]] * 2, root=torch.tensor([5, 5]), num_nodes=3), 0.0)
        rehearsal.follow([[1], [1]])
        rehearsal.follow([[], [2]])
        rehearsal.follow([[], [3]])
        assert heard(rehearsal) == [3]
        rehearsal.begin(merge_paths([[[1, 2]]] * 2, root=torch.tensor([5, 5]), num_nodes=3), 0.0)
        rehearsal.follow([[], []])
        assert heard(rehearsal) == [3] and rehearsal.is_due(100.0)

    def test_proposals_take_their_share_of_the_time(self):
        rehearsal = Rehearsal()
        assert rehearsal.is_due(0.0)
        rehearsal.begin(merge_paths([[[1]]], root=torch.tensor([5]), num_nodes=2), 2.0)
        rehearsal.follow([[7]])
        assert not rehearsal.is_due(1.99 / SHARE) and rehearsal.is_due(2.01 / SHARE)


class TestPromise:
    @staticmethod
    def made_of(results):
        rehearsal = Rehearsal()
        rehearsal._recent.extend(results)
        return rehearsal

    def test_few_say_nothing(self):
        assert not self.made_of([5] * (FEWEST - 1)).promises(1.0, 0.0)
        assert self.made_of([5] * FEWEST).promises(1.0, 0.0)

    def test_a_clear_gain_is_asked_for(self):
        assert self.made_of([3] * RECENT).promises(0.99 * 3 / MARGIN, 0.0)
        assert not self.made_of([3] * RECENT).promises(1.01 * 3 / MARGIN, 0.0)
        assert not self.made_of([1, 5] * (RECENT // 2)).promises(0.99 * 3 / MARGIN, 0.0)  # the error counts

    def test_the_old_is_forgotten(self):
        assert self.made_of([1] * 100 + [5] * RECENT).promises(4.0, 0.0)

    def test_what_is_not_kept_makes_the_next_one_wait(self):
        rehearsal, waits = self.made_of([]), []
        for _ in range(8):
            rehearsal._recent.extend([5] * RECENT)
            rehearsal.heed()
            rehearsal.fail(lost=1.0, now=0.0)
            assert not heard(rehearsal)
            waits.append(rehearsal._deaf_until)
        assert waits == [min(MOST_PATIENCE, PATIENCE * 2**times) for times in range(8)]
        rehearsal._recent.extend([5] * RECENT)
        assert not rehearsal.promises(1.0, MOST_PATIENCE - 1) and rehearsal.promises(1.0, MOST_PATIENCE)
        rehearsal.keep()
        rehearsal.heed()
        rehearsal.fail(1.0, 0.0)
        assert rehearsal._deaf_until == PATIENCE

    def test_a_regular_attempt_that_fails_is_no_broken_promise(self):
        rehearsal = self.made_of([])
        rehearsal.fail(lost=50.0, now=10.0)
        rehearsal._recent.extend([5] * RECENT)
        assert rehearsal.promises(1.0, 10.0)


class TestGate:
    @pytest.mark.parametrize("cost", [1.5, 3.3])
    @pytest.mark.parametrize("late", [100, 300, 600])
    def test_a_draft_that_becomes_good_late_is_found_at_once(self, cost, late):
        """Against an ideal that knows where; without rehearsals it is 1.14 to 2.5 times as long."""
        accepted = lambda machine: 5 if machine.emitted >= late else 1  # noqa: E731
        ideal = late + (1000 - late) * cost / 5
        machine, without = (
            Machine(always(cost), accepted, proposal=proposal, prompt=LATE).run(1000) for proposal in (PROPOSAL, None)
        )
        assert machine.now <= 1.12 * ideal < without.now
        assert [decision.choice for decision in machine.decisions] == [PLAIN, DRAFT]
        assert machine.decisions[1].length <= LATE + late + 180

    @pytest.mark.parametrize("cost", [1.1, 1.5, 3.0, 6.0])
    def test_a_useless_draft_still_costs_at_most_three_percent(self, cost):
        machine = Machine(always(cost), always(1), proposal=PROPOSAL).run(1000)
        assert machine.now <= 1.03 * machine.emitted
        assert machine.proposals > 50

    @pytest.mark.parametrize("cost", [2.0, 3.3])
    @pytest.mark.parametrize("period", [30, 60, 100, 200])
    def test_a_draft_that_is_good_by_turns_costs_little(self, cost, period):
        """Promises that are broken again and again: seven per cent is the worst of these."""
        accepted = lambda machine: 5 if machine.emitted // period % 2 else 1  # noqa: E731
        machine = Machine(always(cost), accepted, proposal=PROPOSAL, prompt=LATE).run(4000)
        assert machine.now <= 1.08 * machine.emitted

    @pytest.mark.parametrize(("rate", "cost"), [(0.3, 2.0), (0.5, 2.0), (0.7, 3.0)])
    def test_a_draft_that_is_never_quite_good_enough(self, rate, cost):
        for seed in range(5):
            machine = Machine(always(cost), geometric(rate), proposal=PROPOSAL, prompt=LATE, seed=seed).run(4000)
            assert machine.now <= 1.05 * machine.emitted

    def test_nothing_is_proposed_while_speculation_is_on(self):
        machine = Machine(always(1.2), always(4), proposal=PROPOSAL).run(1000)
        assert machine.proposals == 0


class TestCalls:
    """A clock by which verifying a draft takes ten plain steps, and proposing nothing."""

    @pytest.fixture
    def rehearsals(self, monkeypatch):
        """Made by the calls of a test."""
        made = []

        def make(wanted, drafter, ranks):
            gate = gate_of(wanted, drafter, ranks)
            slow_drafts(gate)
            if gate._rehearsal is not None:
                gate._rehearsal = Noted(drafter)
            made.append(gate._rehearsal)
            return gate

        monkeypatch.setattr(decoding, "gate_of", make)
        return made

    def test_what_is_counted_is_what_the_text_says(self, plain_run, rehearsals):
        run = plain_run("llama", (23,), max_new_tokens=250, eos_token_id=None)
        draft = NgramDraftModel.from_target(run.model)
        out = run.again(draft, return_dict_in_generate=True)
        assert out.sequences.tolist() == run.sequences.tolist()
        (rehearsal,), (text,) = rehearsals, run.generated
        assert len(rehearsal.noted) > 10 and max(found for *_, found in rehearsal.noted) > 1
        at = 0
        for tree, known, found in rehearsal.noted:
            paths = [tree.tokens[0][line].tolist()[1:] for line in tree.mask[0]]
            # the drafter had read up to the root, and what was counted ends before the next one begins
            begin = known - run.prompt_length
            assert begin >= at and text[begin - 1] == tree.tokens[0, 0]
            assert accepted_by_hand(paths, text[begin:]) == found
            at = begin + found

    def test_rows_of_a_batch(self, plain_run, rehearsals):
        run = plain_run("llama", (9, 31, 4), max_new_tokens=120, eos_token_id=None)
        draft = NgramDraftModel.from_target(run.model)
        assert run.again(draft).tolist() == run.sequences.tolist()
        (rehearsal,) = rehearsals
        assert len(rehearsal.noted) > 3

    def test_only_drafts_without_a_forward_are_rehearsed(self, plain_run, rehearsals):
        run = plain_run("llama", (23,), max_new_tokens=20, eos_token_id=None)
        for draft in (run.draft("tree"), run.draft("specattn"), NgramDraftModel.from_target(run.model)):
            assert run.again(draft).tolist() == run.sequences.tolist()
        assert [rehearsal is not None for rehearsal in rehearsals] == [False, False, True]


class Noted(Rehearsal):
    """Notes every tree, how many tokens its drafter had read, and what was counted of it."""

    def __init__(self, drafter):
        super().__init__()
        self.noted = []
        self._drafter = drafter

    def begin(self, tree, seconds):
        super().begin(tree, seconds)
        self._tree, self._known = tree, len(self._drafter.indexes[0].text)

    def follow(self, emitted):
        ran = any(self._rows)
        super().follow(emitted)
        if ran and not any(self._rows):
            self.noted.append((self._tree, self._known, *self._results))


def slow_drafts(gate):
    """Let a step that drafts take ten seconds and a plain one, one; proposals take none."""
    now, record = 0.0, gate.record

    def timed(*args):
        nonlocal now
        now += 10.0 if gate._choice == DRAFT else 1.0
        return record(*args)

    gate._clock, gate.record = lambda: now, timed
