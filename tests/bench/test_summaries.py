import math
import random
import statistics

import pytest

from hf_longspec.bench.summaries import Summary, mean_interval, ratios, significant, summarize, t_quantile


def test_summary_is_median_and_range():
    assert summarize([5.0, 1.0, 2.0, 4.0]) == Summary(3.0, 1.0, 5.0, 4)


def test_ratios_are_taken_within_a_repeat():
    # the machine was half as fast in the second repeat: the ratio of medians would be 1.5
    assert ratios([10.0, 5.0, 10.0], [5.0, 2.5, 10.0]) == Summary(2.0, 1.0, 2.0, 3)


def test_ratios_need_pairs():
    with pytest.raises(ValueError):
        ratios([1.0, 2.0], [1.0])


@pytest.mark.parametrize(
    ("degrees", "expected"), [(1, 12.706), (2, 4.303), (5, 2.571), (10, 2.228), (23, 2.069), (100, 1.984)]
)
def test_t_quantile_is_that_of_the_tables(degrees, expected):
    assert t_quantile(degrees) == pytest.approx(expected, abs=1e-3)


def test_interval_covers_the_mean_95_times_in_100():
    draw = random.Random(0)
    samples = [mean_interval([draw.gauss(2.0, 1.0) for _ in range(8)]) for _ in range(4000)]
    covered = statistics.fmean(sample.low <= 2.0 <= sample.high for sample in samples)
    assert abs(covered - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 4000)


def test_interval_of_a_single_value_is_a_point():
    assert mean_interval([2.5]).to_dict() == {"mean": 2.5, "low": 2.5, "high": 2.5, "count": 1}


def test_significant_keeps_zero_and_nan():
    assert significant(0.0) == 0.0
    assert math.isnan(significant(math.nan))
