"""Medians with their spread, means with confidence intervals, and the order of the turns."""

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

# Fewest values that an interval is shown for: with two of them Student's t multiplies the standard error by 13.
FEWEST = 3


def summarize(values: Sequence[float]) -> dict[str, float]:
    """Median and range, rounded to four significant digits.

    >>> summarize([3.0, 1.0, 2.0])
    {'median': 2.0, 'low': 1.0, 'high': 3.0, 'count': 3}
    """
    found = {"median": statistics.median(values), "low": min(values), "high": max(values)}
    return {**{name: significant(value) for name, value in found.items()}, "count": len(values)}


def mean_interval(values: Sequence[float], least: float = -math.inf, most: float = math.inf) -> dict[str, float]:
    """Mean of independent values with Student's 95 % interval.

    Towards a bound the half-width is taken on the scale of the logarithm of the distance to the bound: the interval is
    the usual one far from the bound and does not cross it.

    Args:
        values (`Sequence[float]`): Fewer than three give no interval: `low` and `high` are the mean then.
        least (`float`, *optional*): Lowest value that is possible, such as 1 for tau.
        most (`float`, *optional*): Highest value that is possible, such as 1 for a share.

    >>> found = mean_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    >>> found["mean"], found["high"]
    (3.0, 4.963)
    """
    mean = statistics.fmean(values)
    low = high = mean
    # equal values have an interval of no width, also at a bound
    if len(values) >= FEWEST and len(set(values)) > 1:
        from scipy.stats import sem, t

        half = t.ppf(0.975, len(values) - 1) * sem(values)
        low = mean - half if math.isinf(least) else least + (mean - least) * math.exp(-half / (mean - least))
        high = mean + half if math.isinf(most) else most - (most - mean) * math.exp(-half / (most - mean))
    return {"mean": significant(mean), "low": significant(low), "high": significant(high), "count": len(values)}


def ratio_interval(logs: Sequence[float]) -> dict[str, float]:
    """Geometric mean of ratios, given by their logarithms, with Student's 95 % interval, which is not symmetric.

    >>> ratio_interval([0.0, 0.0, 0.0])["mean"]
    1.0
    """
    found = mean_interval(logs)
    return {name: value if name == "count" else math.exp(value) for name, value in found.items()}


def holm(values: Sequence[float]) -> list[float]:
    """Return p-values of several tests, corrected for their number: the chance of any error stays below the level.

    >>> holm([0.01, 0.5, 0.02])
    [0.03, 0.5, 0.04]
    """
    corrected, largest = list(values), 0.0
    for rank, index in enumerate(sorted(range(len(values)), key=lambda index: values[index])):
        largest = max(largest, min(1.0, (len(values) - rank) * values[index]))
        corrected[index] = largest
    return corrected


def significant(value: float, digits: int = 4) -> float:
    """`value` rounded to significant digits.

    >>> significant(1234.567), significant(0.00123456)
    (1235.0, 0.001235)
    """
    return float(f"{value:.{digits}g}")


def in_turns(names: Sequence[T], repeats: int) -> Iterator[tuple[int, T]]:
    """Pairs `(repeat, name)` with all names in every repeat, each repeat beginning with another one.

    >>> [name for _, name in in_turns(["a", "b", "c"], 2)]
    ['a', 'b', 'c', 'b', 'c', 'a']
    """
    for repeat in range(repeats):
        for name in rotated(names, repeat):
            yield repeat, name


def rotated(names: Sequence[T], turn: int) -> list[T]:
    """Return all names, each turn beginning with another one."""
    first = turn % len(names)
    return [*names[first:], *names[:first]]
