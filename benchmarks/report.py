"""The tables of all reports, and the statistics in them: intervals, and values in the formats of pages.yaml."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.acceptance_card import FEWEST, estimate, markdown_table
from hf_longspec.cli.files import Record
from hf_longspec.cli.measuring import significant


def mean_interval(values: Sequence[float], least: float = -math.inf, most: float = math.inf) -> dict[str, float]:
    """Mean of independent values with Student's 95 % interval, which is the mean itself for fewer than three values.

    Towards a bound the half-width is taken on the scale of the logarithm of the distance to the bound: the interval is
    the usual one far from the bound and does not cross it.

    >>> interval = mean_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    >>> interval["mean"], interval["high"]
    (3.0, 4.963)
    """
    mean = statistics.fmean(values)
    low = high = mean
    # equal values have an interval of no width, also at a bound
    if len(values) >= FEWEST and len(set(values)) > 1:
        from scipy.stats import ttest_1samp

        half = ttest_1samp(values, 0.0).confidence_interval(0.95).high - mean
        low = mean - half if math.isinf(least) else least + (mean - least) * math.exp(-half / (mean - least))
        high = mean + half if math.isinf(most) else most - (most - mean) * math.exp(-half / (most - mean))
    return {"mean": significant(mean), "low": significant(low), "high": significant(high), "count": len(values)}


class Shown:
    """A value of a record in a format such as `{ratio:~.2f}`; nothing for `None`.

    Of a summary or an interval the format has the middle, and after `~` the range or the ends too.

    >>> summary = {"median": 2.0, "low": 1.0, "high": 3.0}
    >>> "{:.1f}, {:~.1f}".format(Shown(summary), Shown(summary))
    '2.0, 2.0 (1.0-3.0)'
    """

    def __init__(self, value: Any):
        self.value = value

    def __format__(self, form: str) -> str:
        value, number = self.value, form.removeprefix("~")
        if not isinstance(value, dict):
            return "" if value is None else format(value, number)
        middle = format(value["mean"] if "mean" in value else value["median"], number)
        if number == form:
            return middle
        return (
            estimate(value, number)
            if "mean" in value
            else f"{middle} ({value['low']:{number}}-{value['high']:{number}})"
        )


class _Fields(dict[str, Any]):
    """The values of a record for `str.format_map`."""

    def __getitem__(self, name: str) -> Shown:
        return Shown(self.get(name))


# A column of a table: a key of the records, a format of their values such as `{tau:.2f}`, or a function of one.
Column = str | Callable[[Record], object]


def table(rows: Sequence[Record], columns: Mapping[str, Column] | None = None) -> str:
    """A Markdown table with one line per record. Numbers have three significant digits; missing values are empty."""
    columns = {name: name for name in rows[0]} if columns is None else columns
    return markdown_table(list(columns), [[_cell(row, of) for of in columns.values()] for row in rows])


def pivot(
    rows: Sequence[Record], columns: Mapping[str, Column], across: str, heading: str, cell: Callable[[Record], str]
) -> str:
    """A Markdown table with one line for all records with the same `columns`, and one cell per value of `across`."""
    lines: dict[tuple[str, ...], Record] = {}
    for row in rows:
        named = {name: _cell(row, of) for name, of in columns.items()}
        lines.setdefault(tuple(named.values()), named)[heading.format(row[across])] = cell(row)
    headings = [heading.format(value) for value in sorted({row[across] for row in rows})]
    return table(list(lines.values()), {name: name for name in (*columns, *headings)})


def _cell(row: Record, of: Column) -> str:
    if isinstance(of, str) and "{" in of:
        return of.format_map(_Fields(row))
    value = row.get(of) if isinstance(of, str) else of(row)
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def range_of(summary: dict[str, Any] | None, digits: int = 2) -> str:
    """A median with its lowest and highest value; nothing for `None`."""
    return format(Shown(summary), f"~.{digits}f")
