"""The parts that all reports have in common, and the table of acceptance that model cards quote, as Markdown."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .results import Record, of_kind, read_records
from .summaries import FEWEST

ACCEPTANCE_NOTE = (
    "tau: tokens emitted per verification, the target's own included; mean over prompts with its 95 % "
    "interval. In brackets: difference to the first row of the same mode, prompt by prompt, with its 95 % "
    "interval. Settings not named are the defaults."
)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table.

    >>> print(markdown_table(["a", "b"], [["1", "2"]]))
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    first, *others = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    return "\n".join([first, "|" + "---|" * len(header), *others])


# A column of a table: a key of the records, or a function of one.
Column = str | Callable[[Record], object]


def table(rows: Sequence[Record], columns: Mapping[str, Column]) -> str:
    """A Markdown table with one line per record. Numbers have three significant digits; missing values are empty."""
    lines = [[_cell(row.get(of) if isinstance(of, str) else of(row)) for of in columns.values()] for row in rows]
    return markdown_table(list(columns), lines)


def pivot(
    rows: Sequence[Record], columns: Mapping[str, Column], across: str, heading: str, cell: Callable[[Record], str]
) -> str:
    """A Markdown table with one line for all records with the same `columns`, and one cell per value of `across`.

    Args:
        heading (`str`): Heading of such a cell, with `{}` for the value.
        cell (`Callable`): Its text.
    """
    lines: dict[tuple[str, ...], Record] = {}
    for row in rows:
        named = {name: _cell(row[of] if isinstance(of, str) else of(row)) for name, of in columns.items()}
        lines.setdefault(tuple(named.values()), named)[heading.format(row[across])] = cell(row)
    headings = [heading.format(value) for value in sorted({row[across] for row in rows})]
    return table(list(lines.values()), {name: name for name in (*columns, *headings)})


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def environment_line(records: Sequence[Record]) -> str:
    """Machine, versions, commit, date and command in one paragraph."""
    found = of_kind(records, "environment")[0]
    native = {True: "native bfloat16", False: "no native bfloat16", None: "bfloat16 support unknown"}
    parts = [
        found["cpu"],
        f"{found['cores']} cores, {found['usable_cores']} usable, {found['threads']} used",
        native[found["native_bfloat16"]],
        *(f"{record['read_gb_per_second']} GB/s read" for record in of_kind(records, "ceilings")),
        f"torch {found['torch']}",
        f"transformers {found['transformers']}",
        f"commit {found['commit']}",
        f"load average {found['load_average']} at the start",
        found["date"],
        *(f"resumed {record['date']}" for record in of_kind(records, "resumed")),
    ]
    state = "" if of_kind(records, "end") else " The run was not finished."
    return f"{', '.join(parts)}: `{found['command']}`.{state}"


def with_defaults(note: str, records: Sequence[Record]) -> str:
    """The note on how to read the numbers, with the default settings if the result file names them."""
    defaults = of_kind(records, "environment")[0].get("settings", {}).get("defaults", {})
    named = ", ".join(f"{name}={value}" for name, value in defaults.items())
    return note + (f" Defaults: {named}." if named else "")


def range_of(summary: dict[str, Any] | None, digits: int = 2) -> str:
    """A median with its lowest and highest value; nothing for `None`."""
    if summary is None:
        return ""
    return f"{summary['median']:.{digits}f} ({summary['low']:.{digits}f}-{summary['high']:.{digits}f})"


# Of the largest value of an interval whose three values have four significant digits, the most that rounding moves its
# middle from the mean, twice.
ROUNDED = 2e-3


def estimate(interval: dict[str, Any], form: str = ".2f", minus: float = 0.0) -> str:
    """A mean with its 95 % interval: after a sign if it is symmetric, else both ends in brackets.

    Fewer than three values have no interval, and equal values one of no width.

    Args:
        form (`str`, *optional*): Format of the numbers; only the mean and the ends have its sign.
        minus (`float`, *optional*): Subtracted from the mean and the ends, such as 1 to show a ratio as a difference.

    >>> estimate({"mean": 2.31, "low": 2.1, "high": 2.52}), estimate({"mean": 2.31, "low": 2.1, "high": 2.6})
    ('2.31 ± 0.21', '2.31 [2.10, 2.60]')
    """
    mean, low, high = interval["mean"], interval["low"], interval["high"]
    shown = format(mean - minus, form)
    if interval.get("count", FEWEST) < FEWEST or low == high:
        return shown
    if abs(high + low - 2 * mean) <= ROUNDED * max(abs(low - minus), abs(high - minus)):
        return f"{shown} ± {format((high - low) / 2, form.removeprefix('+'))}"
    return f"{shown} [{format(low - minus, form)}, {format(high - minus, form)}]"


def acceptance_table(records: Sequence[Record]) -> str:
    """One row per setting, one column per length: mean and interval, and the difference to the first setting."""
    columns: dict[str, Column] = {"mode": "mode", "setting": _options}
    return pivot(of_kind(records, "acceptance"), columns, "length", "tau at {}", _tau)


def _options(row: Record) -> str:
    return ", ".join(str(value) if name == "selection" else f"{name}={value}" for name, value in row["options"].items())


def _tau(row: Record) -> str:
    gap = row.get("difference")
    return estimate(row["tau"]) + ("" if gap is None else f" ({estimate(gap, '+.2f')})")


def acceptance_section(results: Path, draft: str) -> str:
    """Table of tau by context length for one draft, with its note and its environment, as its model card quotes it.

    Args:
        results (`Path`): The file that `benchmarks/acceptance.py --draft` wrote.
        draft (`str`): Name of the draft in it.

    Raises:
        ValueError: If the file holds no acceptance of that draft.
        OSError: If it cannot be read.
    """
    records = read_records(results)
    own = [record for record in records if record.get("options", {}).get("draft", draft) == draft]
    if not of_kind(own, "acceptance") or not of_kind(own, "environment"):
        names = dict.fromkeys(record["options"].get("draft") for record in records if record.get("options"))
        found = ", ".join(str(name) for name in names if name) or "none"
        raise ValueError(f"{results} holds no acceptance of the draft {draft!r}, but of: {found}. Name one of them.")
    return "\n\n".join([acceptance_table(own), with_defaults(ACCEPTANCE_NOTE, own), environment_line(own)])
