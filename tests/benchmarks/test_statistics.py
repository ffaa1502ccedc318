"""Intervals and corrected p, against scipy and definitions; reports of test_tables.py show them."""

import math
import random
import statistics
from itertools import combinations

import pytest
from scipy import stats

from benchmarks.figure_report import holm, ratio_interval
from benchmarks.report import mean_interval


@pytest.mark.parametrize(("count", "quantile"), [(3, 4.303), (6, 2.571), (24, 2.069)])
def test_intervals_are_those_of_the_tables_of_students_t(count, quantile):
    values = [float(value) for value in range(count)]
    found = mean_interval(values)
    half = quantile * statistics.stdev(values) / math.sqrt(count)
    assert found["high"] - found["mean"] == pytest.approx(half, rel=2e-3)  # four significant digits
    assert mean_interval([2.0] * count) == {"mean": 2.0, "low": 2.0, "high": 2.0, "count": count}
    assert mean_interval([2.0, 3.0]) == {"mean": 2.5, "low": 2.5, "high": 2.5, "count": 2}  # too few


def test_intervals_do_not_cross_their_bounds():
    """Taus near 1 and shares near 0 and 1; far from the bounds the interval is Student's."""
    draw = random.Random(0)
    for count in (3, 5, 24):
        for _ in range(50):
            taus = [1 + draw.expovariate(3) ** 3 for _ in range(count)]
            shares = [draw.betavariate(0.2, 0.2) for _ in range(count)]
            tau, share = mean_interval(taus, least=1), mean_interval(shares, least=0, most=1)
            assert 1 <= tau["low"] <= tau["mean"] <= tau["high"]
            assert 0 <= share["low"] <= share["mean"] <= share["high"] <= 1
    far = [1e4 + value for value in range(5)]
    assert mean_interval(far, least=1, most=1e9) == mean_interval(far)


def test_intervals_of_ratios_are_students_on_the_scale_of_logarithms():
    logs = [0.1, 0.3, -0.2, 0.4, 0.2]
    low, high = stats.t.interval(0.95, len(logs) - 1, statistics.fmean(logs), stats.sem(logs))
    found = ratio_interval(logs)
    expected = [math.exp(value) for value in (low, statistics.fmean(logs), high)]
    assert [found["low"], found["mean"], found["high"]] == pytest.approx(expected, rel=1e-3)


def test_holm_is_closed_testing_by_bonferroni():
    """The corrected p of a test is the largest Bonferroni p of all sets of tests that it belongs to."""
    source = random.Random(0)
    for count in (0, 1, 2, 5):
        values = [source.choice([0.001, 0.01, 0.04, 0.2]) * source.random() for _ in range(count)]
        sets = [group for size in range(1, count + 1) for group in combinations(range(count), size)]
        expected = [
            max(min(1.0, len(group) * min(values[index] for index in group)) for group in sets if own in group)
            for own in range(count)
        ]
        assert holm(values) == pytest.approx(expected)
