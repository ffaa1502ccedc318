"""Ctrl-C in every phase of a call, and criteria that end it: the text so far is kept, and nothing is broken."""

import copy
import os
import sys
from functools import cache
from itertools import cycle
from pathlib import Path

import pytest
import torch

import hf_longspec
from hf_longspec import SpeculativeCache
from hf_longspec.generation.cache import CACHE_NAME
from tests.pairwise import soaked
from tests.robustness.test_faults import state_of
from tests.tiny_targets import random_longspec_draft
from tests.user_objects import Answer, Bomb, Recorder

pytestmark = pytest.mark.usefixtures("every_step_speculates")

ONE, RAGGED = (21,), (33, 3, 13)
NEVER = 1  # an end token that no greedy text of these targets holds
NEW = 16
LINES = int(os.environ.get("HF_LONGSPEC_LINES", 8))  # to interrupt a call at
NONE = -1  # of calls: a bomb that never goes off


class Recording(Recorder):
    """Keeps its input after the prompt, and may raise before or after it has kept it."""

    def __init__(self, before=None, after=None):
        super().__init__()
        self.before, self.after = before or Bomb(NONE), after or Bomb(NONE)
        self.saw_prompt = False

    def put(self, value):
        if self.saw_prompt:
            self.before()
            super().put(value)
            self.after()
        self.saw_prompt = True


# Interrupted calls of the user's objects; tests/robustness/test_faults.py interrupts the phases of the loop.
PHASES = {
    "processor": lambda bomb: {"logits_processor": [bomb.processor()]},
    "criterion": lambda bomb: {"stopping_criteria": [bomb.criterion()]},
    "before a token is streamed": lambda bomb: {"streamer": Recording(before=bomb)},
    "after a token was streamed": lambda bomb: {"streamer": Recording(after=bomb)},
}


def drafted(run, kind):
    if kind == "longspec":
        return random_longspec_draft(run.model, window=8, tree_widths=[40, 39])
    return run.draft(kind, **({"sparse_ratio": 0.8} if kind == "specattn" else {"num_nodes": 9, "luck": 0.6}))


def emitted(draft):
    """The tokens that the running call has emitted after the first ones."""
    return draft.last_speculation.num_emitted_tokens if draft.last_speculation else 0


@pytest.fixture(scope="module")
def plain(plain_run):
    """`plain(lengths)`: the uninterrupted text, made once."""
    options = {"max_new_tokens": NEW, "eos_token_id": NEVER, "pad_token_id": NEVER}
    return cache(lambda lengths: plain_run("llama", lengths, **options))


def cut(sequences, run):
    """Generated tokens of each row without the padding that fills up short rows."""
    return [[token for token in row if token != NEVER] for row in sequences[:, run.prompt_length :].tolist()]


def check_text(out, run, streamer):
    """A proper prefix of the uninterrupted text in every row; the streamer got all of it, unless it broke off."""
    rows = cut(out, run)
    for row, whole in zip(rows, run.generated, strict=True):
        assert row == whole[: len(row)]
    assert 0 < max(map(len, rows)) < NEW
    columns = [list(column) for column in zip(*out[:, run.prompt_length :].tolist(), strict=True)]
    broke_off = streamer.before.calls == 0 or streamer.after.calls == 0
    assert streamer.puts == (columns[: len(streamer.puts)] if broke_off else columns)
    assert len(streamer.puts) >= 3 and streamer.ends == 1
    return rows


def interrupted(run, draft, **options):
    """The text so far, of a call that Ctrl-C ends."""
    with pytest.raises(KeyboardInterrupt):
        run.again(draft, **options)
    assert draft.last_speculation.interrupted
    return draft.last_speculation.partial_sequences


@pytest.mark.parametrize(
    ("phase", "lengths", "kind"), [*zip(PHASES, cycle((ONE, RAGGED)), cycle(("longspec", "tree")))]
)
def test_the_text_so_far_is_kept(plain, lengths, kind, phase):
    run = plain(lengths)
    state, draft, streamer = state_of(run.model), drafted(run, kind), Recording()
    cache = SpeculativeCache(run.model.config, len(lengths), 64)
    bomb = Bomb(armed=lambda: emitted(draft) >= 3 * len(lengths))
    options = {"streamer": streamer} | PHASES[phase](bomb)
    out = interrupted(run, draft, **{CACHE_NAME: cache}, **options)
    assert state_of(run.model) == state
    rows = check_text(out, run, options["streamer"])
    stats = draft.last_speculation
    counted = sum(map(len, rows)) - sum(map(bool, rows))
    if phase == "criterion" and lengths != ONE:  # rows that were ahead end at the column that it was shown
        assert len(set(map(len, rows))) == 1
    else:  # a step that a criterion or the streamer broke off is not counted; some of its tokens were emitted
        assert stats.num_emitted_tokens < counted if phase != "processor" else stats.num_emitted_tokens == counted
    if lengths == ONE:
        assert cache.get_seq_length() >= run.prompt_length
        continues(run, out, cache, draft)
    else:  # as if nothing had happened
        assert run.again(draft).tolist() == run.sequences.tolist()
    assert not draft.last_speculation.interrupted


def continues(run, out, cache, *drafts):
    """The user's cache holds a part of what was returned, and the same draft, or none, can go on from there."""
    assert cache.get_seq_length() < out.shape[1]
    options = {"do_sample": False, "eos_token_id": NEVER, "pad_token_id": NEVER, "max_length": run.sequences.shape[1]}
    for assistant in (None, *drafts):
        held = copy.deepcopy(cache)
        again = run.model.generate(out, **{CACHE_NAME: held}, assistant_model=assistant, **options)
        assert again.tolist() == run.sequences.tolist()


@pytest.mark.parametrize(("kind", "lengths"), [("tree", RAGGED), ("specattn", ONE)])
def test_a_criterion_ends_the_call_by_stop_iteration(plain, kind, lengths):
    """Exact to the token in the row that it was asked about; the other rows keep what they have."""
    run = plain(lengths)
    length = run.prompt_length + 7

    def enough(input_ids, scores):
        if input_ids.shape[1] == length:
            raise StopIteration
        return torch.zeros(1, dtype=torch.bool)

    state, draft, streamer = state_of(run.model), drafted(run, kind), Recording()
    out = run.again(draft, stopping_criteria=[Answer(enough)], streamer=streamer)
    assert draft.last_speculation.partial_sequences is None
    assert state_of(run.model) == state
    rows = check_text(out, run, streamer)
    assert max(map(len, rows)) == 7 and draft.last_speculation.interrupted
    assert run.again(draft).tolist() == run.sequences.tolist()


class Tracer:
    """Raises KeyboardInterrupt at the n-th line that runs in the package's loop, as a signal may."""

    ROOM = str(Path(hf_longspec.__file__).parent / "generation")
    CLEANING_UP = {"close", "keep_partial", "forget", "attention", "__exit__"}
    # what reads the whole target: few lines would be left for the loop
    CLEANING_UP |= {"structure_of", "foreign_methods", "has_hooks", "_rare", "why_not_in_training"}

    def __init__(self, line=None):
        self.line, self.lines, self.raised = line, 0, False

    def __enter__(self):
        sys.settrace(self._enter)
        return self

    def __exit__(self, *error):
        sys.settrace(None)

    def _enter(self, frame, event, argument):
        names = set()
        caller = frame
        while caller is not None:
            if caller.f_code.co_filename.startswith(self.ROOM):
                names.add(caller.f_code.co_name)
            caller = caller.f_back
        inside = frame.f_code.co_filename.startswith(self.ROOM) and "decode" in names
        return self._count if inside and not names & self.CLEANING_UP else None

    def _count(self, frame, event, argument):
        if event == "line" and frame.f_code.co_name != "decode":
            self.lines += 1
            if self.lines == self.line:
                self.raised = True
                raise KeyboardInterrupt
        return self._count


@pytest.mark.parametrize("kind", ["tree", *soaked(["specattn", "longspec"])])
def test_an_interruption_at_any_line(plain_run, kind):
    """Lines spread over the whole call; those that clean up are left out."""
    run = plain_run("llama", ONE, max_new_tokens=16, eos_token_id=NEVER)
    state, draft = state_of(run.model), drafted(run, kind)
    run.again(draft)  # the first call on a target examines it
    with Tracer() as tracer:
        run.again(draft)
    returned = 0
    for line in range(3, tracer.lines, max(1, tracer.lines // LINES)):
        cache, streamer = SpeculativeCache(run.model.config, 1, 64), Recording()
        try:
            with Tracer(line):
                run.again(draft, **{CACHE_NAME: cache}, streamer=streamer)
            break  # what is cached since the first call takes fewer lines
        except KeyboardInterrupt:
            out = draft.last_speculation.partial_sequences
        finally:
            assert state_of(run.model) == state
        if out is None:
            assert not streamer.puts and cache.get_seq_length() == 0
            continue
        returned += 1
        assert out[0].tolist() == run.sequences[0, : out.shape[1]].tolist()
        text = [[token] for token in out[0, run.prompt_length :].tolist()]
        assert streamer.puts == text[: len(streamer.puts)]  # all of it, unless the streamer was interrupted
        if out.shape != run.sequences.shape:
            continues(run, out, cache)
    assert returned >= LINES // 2
