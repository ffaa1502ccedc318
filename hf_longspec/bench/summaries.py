"""Medians with their spread, ratios within turns, means with confidence intervals."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Summary:
    """A median, the lowest and the highest value, and how many there were."""

    median: float
    low: float
    high: float
    count: int

    def to_dict(self) -> dict[str, float]:
        """For JSON, four significant digits."""
        return {name: value if name == "count" else significant(value) for name, value in asdict(self).items()}


def summarize(values: Sequence[float]) -> Summary:
    """Median and range.

    >>> summarize([3.0, 1.0, 2.0])
    Summary(median=2.0, low=1.0, high=3.0, count=3)
    """
    return Summary(statistics.median(values), min(values), max(values), len(values))


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> Summary:
    """Summary of the ratios of values that were measured side by side.

    >>> ratios([2.0, 4.0, 9.0], [1.0, 2.0, 3.0]).median
    2.0
    """
    return summarize([a / b for a, b in zip(numerators, denominators, strict=True)])


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % confidence interval."""

    mean: float
    low: float
    high: float
    count: int

    def to_dict(self) -> dict[str, float]:
        """For JSON, four significant digits."""
        return {name: value if name == "count" else significant(value) for name, value in asdict(self).items()}


def mean_interval(values: Sequence[float]) -> Interval:
    """Mean of independent values with Student's 95 % interval; the interval is the mean itself for a single value.

    >>> interval = mean_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    >>> interval.mean, round(interval.high - interval.mean, 3)
    (3.0, 1.963)
    """
    mean, count = statistics.fmean(values), len(values)
    if count < 2:
        return Interval(mean, mean, mean, count)
    half = t_quantile(count - 1) * statistics.stdev(values) / math.sqrt(count)
    return Interval(mean, mean - half, mean + half, count)


def t_quantile(degrees: int) -> float:
    """0.975 quantile of Student's t distribution.

    From 5 degrees of freedom on, the expansion in 1 / degrees of Abramowitz and Stegun, 26.7.5, right to 0.001.

    >>> round(t_quantile(23), 3), round(t_quantile(4), 3)
    (2.069, 2.776)
    """
    exact = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}
    if degrees in exact:
        return exact[degrees]
    z = statistics.NormalDist().inv_cdf(0.975)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / degrees**power for power, term in enumerate(terms))


def significant(value: float, digits: int = 4) -> float:
    """`value` rounded to significant digits.

    >>> significant(1234.567), significant(0.00123456)
    (1235.0, 0.001235)
    """
    return float(f"{value:.{digits}g}")
