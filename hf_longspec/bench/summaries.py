"""Medians with their spread, ratios within turns, means with confidence intervals, as dictionaries for JSON."""

import statistics
from collections.abc import Iterator, Sequence

# Orders of n-grams that Distinct-n is reported for.
ORDERS = (1, 2, 3, 4)
# Tokens over which a text of any length is looked at. Divides the lengths at which long texts are compared.
WINDOW = 1000


def summarize(values: Sequence[float]) -> dict[str, float]:
    """Median and range, rounded to four significant digits.

    >>> summarize([3.0, 1.0, 2.0])
    {'median': 2.0, 'low': 1.0, 'high': 3.0, 'count': 3}
    """
    found = {"median": statistics.median(values), "low": min(values), "high": max(values)}
    return {**{name: significant(value) for name, value in found.items()}, "count": len(values)}


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> dict[str, float]:
    """Summary of the ratios of values that were measured side by side.

    >>> ratios([2.0, 4.0, 9.0], [1.0, 2.0, 3.0])["median"]
    2.0
    """
    return summarize([a / b for a, b in zip(numerators, denominators, strict=True)])


def mean_interval(values: Sequence[float]) -> dict[str, float]:
    """Mean of independent values with Student's 95 % interval; the interval of a single value is the value itself.

    >>> found = mean_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    >>> found["mean"], found["high"]
    (3.0, 4.963)
    """
    from scipy.stats import sem, t

    mean, count = statistics.fmean(values), len(values)
    error = sem(values) if count > 1 else 0.0
    # scipy gives NaN for a scale of 0, which equal values have
    low, high = t.interval(0.95, count - 1, loc=mean, scale=error) if error else (mean, mean)
    return {"mean": significant(mean), "low": significant(low), "high": significant(high), "count": count}


def significant(value: float, digits: int = 4) -> float:
    """`value` rounded to significant digits.

    >>> significant(1234.567), significant(0.00123456)
    (1235.0, 0.001235)
    """
    return float(f"{value:.{digits}g}")


def in_turns(names: Sequence[str], repeats: int) -> Iterator[tuple[int, str]]:
    """Pairs `(repeat, name)` with all names in every repeat, each repeat beginning with another one.

    >>> [name for _, name in in_turns(["a", "b", "c"], 2)]
    ['a', 'b', 'c', 'b', 'c', 'a']
    """
    for repeat in range(repeats):
        first = repeat % len(names)
        for name in [*names[first:], *names[:first]]:
            yield repeat, name


def distinct(tokens: Sequence[int], n: int, window: int = WINDOW) -> dict[str, float]:
    """Distinct-n: how much of a text is not a repetition of itself, over the whole text and averaged over windows.

    Distinct-n counts the different n-grams and divides by the number of all (after Li et al., 2016,
    https://huggingface.co/papers/1510.03055). The value of a whole text falls with its length, because its vocabulary
    is finite: texts of different lengths cannot be compared by it. TokenSwift
    (https://huggingface.co/papers/2502.18890) reports values up to 0.95 for texts of 100,000 tokens, which have fewer
    different words than that, and does not name what it averaged over. So both are given here: `corpus` is that of the
    whole text; `windowed` is the mean over successive windows of fixed length, n-grams across their borders not
    counted, and does not depend on the length.

    Args:
        tokens (`Sequence[int]`): The text. The rest after the last whole window counts for `corpus` only, but a
            text that is shorter than a window is one.
        n (`int`): Length of the n-grams; usual are 1 to 4.
        window (`int`, *optional*, defaults to 1000): Tokens per window, at least `n`.

    Returns:
        `dict[str, float]` with `windowed` and `corpus`, each in (0, 1].

    Raises:
        ValueError: If the text or the window has no n-gram.

    >>> distinct([1, 2, 1, 2, 3, 4], n=1, window=2)
    {'windowed': 1.0, 'corpus': 0.6666666666666666}
    """
    if n < 1 or min(window, len(tokens)) < n:
        raise ValueError(
            f"n={n}, window={window} and {len(tokens)} tokens: there must be an n-gram in the text and in a window. "
            "Pass n of at least 1, and at least n tokens."
        )
    starts = range(0, max(len(tokens) - window, 0) + 1, window)
    shares = [_share(tokens[start : start + window], n) for start in starts]
    return {"windowed": sum(shares) / len(shares), "corpus": _share(tokens, n)}


def _share(tokens: Sequence[int], n: int) -> float:
    """Different n-grams per n-gram."""
    ngrams = zip(*(tokens[start:] for start in range(n)), strict=False)  # the shortest of them ends it
    return len(set(ngrams)) / (len(tokens) - n + 1)
