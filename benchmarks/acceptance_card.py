"""tau of a draft in a result file of `benchmarks/acceptance.py`, as its model card quotes it.

python -m benchmarks.acceptance_card benchmarks/results/drafts.jsonl tiny-longspec > acceptance.md
hf-longspec publish hub_cards/tiny-longspec --dry-run --acceptance acceptance.md
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.records import of_kind, read_records
from hf_longspec.cli.files import Record

# Fewest values that an interval is shown for: with two of them Student's t multiplies the standard error by 13.
FEWEST = 3
# Of the largest value of an interval whose three values have four significant digits, the most that rounding moves its
# middle from the mean, twice.
ROUNDED = 2e-3

ACCEPTANCE_NOTE = (
    "tau: tokens emitted per verification, the target's own included; mean over prompts with its 95 % "
    "interval. In brackets: difference to the first row of the same mode, prompt by prompt, with its 95 % "
    "interval. Settings not named are the defaults."
)


def records_of_draft(results: Path, draft: str) -> list[Record]:
    """Return what `benchmarks/acceptance.py` has measured of one draft, or refuse a file without it."""
    records = read_records(results)
    of_draft = [record for record in records if record.get("options", {}).get("draft", draft) == draft]
    if not of_kind(of_draft, "acceptance") or not of_kind(of_draft, "environment"):
        names = dict.fromkeys(record["options"].get("draft") for record in records if record.get("options"))
        found = ", ".join(str(name) for name in names if name) or "none"
        raise ValueError(f"{results} has no acceptance of the draft {draft!r}, only of {found}. Pass one of them.")
    return of_draft


def acceptance_section(records: Sequence[Record]) -> str:
    """Table of tau by context length for the draft of [`records_of_draft`], as its model card quotes it."""
    return "\n\n".join([acceptance_table(records), with_defaults(ACCEPTANCE_NOTE, records), environment_line(records)])


def acceptance_table(records: Sequence[Record]) -> str:
    """One row per setting, one column per length: mean and interval, and the difference to the first setting."""
    rows = of_kind(records, "acceptance")
    lengths = sorted({row["length"] for row in rows})
    lines: dict[tuple[str, str], dict[int, str]] = {}
    for row in rows:
        lines.setdefault((row["mode"], _setting(row)), {})[row["length"]] = _tau(row)
    header = ["mode", "setting", *(f"tau at {length}" for length in lengths)]
    return markdown_table(header, [[*of, *(taus.get(at, "") for at in lengths)] for of, taus in lines.items()])


def _setting(row: Record) -> str:
    return ", ".join(str(value) if name == "selection" else f"{name}={value}" for name, value in row["options"].items())


def _tau(row: Record) -> str:
    gap = row.get("difference")
    return estimate(row["tau"]) + ("" if gap is None else f" ({estimate(gap, '+.2f')})")


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table.

    >>> print(markdown_table(["a"], [["1"]]).replace("\\n", " "))
    | a | |---| | 1 |
    """
    first, *others = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    return "\n".join([first, "|" + "---|" * len(header), *others])


def estimate(interval: dict[str, Any], form: str = ".2f", minus: float = 0.0) -> str:
    """A mean with its 95 % interval: after a sign if it is symmetric, else both ends in brackets.

    Fewer than three values have no interval, and equal values one of no width. Only the mean and the ends have the sign
    of `form`; `minus` is subtracted from them, such as 1 to show a ratio as a difference.

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


def environment_line(records: Sequence[Record]) -> str:
    """Machine, versions, commit, date and command in one paragraph."""
    facts = of_kind(records, "environment")[0]
    native = {True: "native bfloat16", False: "no native bfloat16", None: "bfloat16 support unknown"}
    parts = [
        facts["cpu"],
        f"{facts['cores']} cores, {facts['usable_cores']} usable, {facts['threads']} used",
        native[facts["native_bfloat16"]],
        *(f"{record['read_gb_per_second']} GB/s read" for record in of_kind(records, "ceilings")),
        f"torch {facts['torch']}",
        f"transformers {facts['transformers']}",
        f"commit {facts['commit']}",
        f"load average {facts['load_average']} at the start",
        facts["date"],
        *(f"resumed {record['date']}" for record in of_kind(records, "resumed")),
    ]
    state = "" if of_kind(records, "end") else " The run was not finished."
    joined = "".join(f" Joined with a run of {run['date']}: `{run['command']}`." for run in of_kind(records, "joined"))
    return f"{', '.join(parts)}: `{facts['command']}`.{joined}{state}"


def with_defaults(note: str, records: Sequence[Record]) -> str:
    """The note on how to read the numbers, with the default settings if the result file names them."""
    defaults = of_kind(records, "environment")[0].get("settings", {}).get("defaults", {})
    named = ", ".join(f"{name}={value}" for name, value in defaults.items())
    return note + (f" Defaults: {named}." if named else "")


if __name__ == "__main__":
    print(acceptance_section(records_of_draft(Path(sys.argv[1]), sys.argv[2])))
