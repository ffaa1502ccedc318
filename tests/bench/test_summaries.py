"""Medians, intervals, Distinct-n, turns."""

import math
import random
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness import time_in_turns
from hf_longspec.bench.results import TimeGuard
from hf_longspec.bench.summaries import (
    ORDERS,
    WINDOW,
    distinct,
    in_turns,
    mean_interval,
    ratios,
    significant,
    summarize,
)


def test_summary_is_median_and_range():
    assert summarize([5.0, 1.0, 2.0, 4.0]) == {"median": 3.0, "low": 1.0, "high": 5.0, "count": 4}


def test_ratios_are_taken_within_a_repeat():
    # the machine was half as fast in the second repeat: the ratio of medians would be 1.5
    assert ratios([10.0, 5.0, 10.0], [5.0, 2.5, 10.0]) == {"median": 2.0, "low": 1.0, "high": 2.0, "count": 3}


def test_ratios_need_pairs():
    with pytest.raises(ValueError):
        ratios([1.0, 2.0], [1.0])


@pytest.mark.parametrize(("count", "quantile"), [(2, 12.706), (3, 4.303), (6, 2.571), (24, 2.069)])
def test_intervals_are_those_of_the_tables_of_students_t(count, quantile):
    values = [float(value) for value in range(count)]
    found = mean_interval(values)
    half = quantile * statistics.stdev(values) / math.sqrt(count)
    assert found["high"] - found["mean"] == pytest.approx(half, rel=2e-3)  # four significant digits
    assert mean_interval([2.0] * count) == {"mean": 2.0, "low": 2.0, "high": 2.0, "count": count}


def test_interval_covers_the_mean_95_times_in_100():
    draw = random.Random(0)
    samples = [mean_interval([draw.gauss(2.0, 1.0) for _ in range(8)]) for _ in range(1000)]
    covered = statistics.fmean(sample["low"] <= 2.0 <= sample["high"] for sample in samples)
    assert abs(covered - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 1000)


def test_interval_of_a_single_value_is_a_point():
    assert mean_interval([2.5]) == {"mean": 2.5, "low": 2.5, "high": 2.5, "count": 1}


def test_significant_keeps_zero_and_nan():
    assert significant(0.0) == 0.0
    assert math.isnan(significant(math.nan))


def share(tokens, n):
    seen, count = set(), 0
    for start in range(len(tokens)):
        if start + n <= len(tokens):
            gram = ""
            for place in range(n):
                gram += f"{tokens[start + place]},"
            seen.add(gram)
            count += 1
    return len(seen) / count


def by_hand(tokens, n, window):
    windows = []
    while len(tokens) >= (len(windows) + 1) * window:
        windows.append(tokens[len(windows) * window : (len(windows) + 1) * window])
    shares = [share(part, n) for part in windows or [tokens]]
    return {"windowed": sum(shares) / len(shares), "corpus": share(tokens, n)}


@given(st.lists(st.integers(0, 5), min_size=4, max_size=60), st.integers(4, 25))
def test_equals_a_double_loop(tokens, window):
    for n in ORDERS:
        assert distinct(tokens, n, window) == pytest.approx(by_hand(tokens, n, window))


def test_a_longer_text_is_not_more_repetitive_by_window():
    tokens = torch.randint(4096, (5 * WINDOW + 7,), generator=torch.Generator().manual_seed(0)).tolist()
    short, long = distinct(tokens[:WINDOW], 1), distinct(tokens, 1)
    assert short["windowed"] == short["corpus"]
    assert abs(long["windowed"] - short["windowed"]) < 0.02 < 0.2 < short["corpus"] - long["corpus"]


def test_one_token_for_ever():
    for n in ORDERS:
        assert distinct([7] * 2000, n) == {"windowed": 1 / (1001 - n), "corpus": 1 / (2001 - n)}


@pytest.mark.parametrize(("tokens", "n", "window"), [([1, 2], 3, 10), ([1, 2], 0, 10), ([1, 2, 3], 2, 1), ([], 1, 10)])
def test_no_ngram_is_refused(tokens, n, window):
    with pytest.raises(ValueError, match=rf"n={n}, window={window} and {len(tokens)} tokens.*at least n tokens"):
        distinct(tokens, n, window)


class Now:
    """A clock that is set by hand."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


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
