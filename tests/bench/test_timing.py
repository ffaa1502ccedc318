import pytest

from hf_longspec.bench.timing import TimeGuard, TokenClock, in_turns, time_in_turns


class Now:
    """A clock that is set by hand."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


def test_clock_ignores_prompt_and_first_token():
    now = Now()
    clock = TokenClock(1, now)
    for seconds in (0.0, 100.0, 101.0, 103.0):  # prompt, first token after a long prefill, two more
        now.seconds = seconds
        clock.put(None)
    assert (clock.num_tokens, clock.decode_seconds) == (2, 3.0)


def test_clock_of_a_run_without_decoding_is_zero():
    clock = TokenClock()
    clock.put("prompt")
    clock.put("first")
    assert (clock.num_tokens, clock.decode_seconds) == (0, 0.0)


def test_turns_hold_every_name_once_and_rotate():
    turns = list(in_turns(["a", "b", "c"], 4))
    for repeat in range(4):
        assert sorted(name for turn, name in turns if turn == repeat) == ["a", "b", "c"]
    assert [turns[3 * repeat][1] for repeat in range(4)] == ["a", "b", "c", "a"]


def test_time_in_turns_collects_one_value_per_repeat():
    seconds = time_in_turns({"a": iter([1.0, 2.0]).__next__, "b": iter([3.0, 4.0]).__next__}, repeats=2)
    assert seconds == {"a": [1.0, 2.0], "b": [3.0, 4.0]}


def test_guard_refuses_what_does_not_fit():
    now = Now()
    guard = TimeGuard(minutes=1, now=now)
    now.seconds = 45.0
    assert guard.fits(15.0)
    assert not guard.fits(15.1)
    now.seconds = 90.0
    assert (guard.left, guard.elapsed) == (0.0, pytest.approx(90.0))
