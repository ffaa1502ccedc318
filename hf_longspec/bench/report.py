"""From the records of result files to rows and Markdown: medians, ratios within turns, intervals, verdicts, tables."""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise, zip_longest
from typing import Any

from ..auditing import EXACT, NEAR_TIE, NOT_LOSSLESS
from .calls import HF, PLAIN
from .results import Record, grouped, of_kind

# Verdicts on a text, the worst first.
REFERENCE, IDENTICAL, DIFFERS, NOT_COMPARED = "reference", "identical", "differs", "not compared"
VERDICTS = (DIFFERS, NOT_LOSSLESS, NEAR_TIE, NOT_COMPARED, EXACT, IDENTICAL, REFERENCE)
FAILED = (DIFFERS, NOT_LOSSLESS)
CELL = ("dtype", "context", "batch", "decoding")
NO_TIME = "no time left"
# Fewest values that an interval is shown for: with two of them Student's t multiplies the standard error by 13.
FEWEST = 3

NOTE = (
    "Every call reads its prompt anew; the prompt is the time to the first token (TTFT), and tokens/s counts from "
    "the first token to the last, all rows together. Methods take turns, and within a turn all continue the same "
    "prompts from the same seed. Medians, in brackets the lowest and the highest turn; ratios (x) are taken within "
    "a turn. `hf generate` is plain `model.generate` (DynamicCache); plain loop is this package without a draft. "
    "tau: tokens emitted per verification and row, the target's own included, in brackets the 95 % interval of the "
    "mean over turns, from three turns on; the last verification of a call is cut at the token limit. Accepted at a "
    "depth: of the verifications that accepted one less, not cut; those without a proposal there count as not "
    "accepted. Share of floor: reading weights and cache once from memory per step, at the measured bandwidth, over "
    "the time of a step. Text: `reference` is what the others are compared with, `identical` the same tokens, "
    "`exact` and `near-tie` the audit's verdict on another text. Sampled texts of this package are compared with "
    "the plain loop of the same seed. A wrong text has no speed."
)

ACCEPTANCE_NOTE = (
    "tau: tokens emitted per verification, the target's own included; mean over prompts with its 95 % "
    "interval. In brackets: difference to the first row of the same mode, prompt by prompt, with its 95 % "
    "interval. Settings not named are the defaults."
)


def summarize(values: Sequence[float]) -> dict[str, float]:
    """Median and range, rounded to four significant digits.

    >>> summarize([3.0, 1.0, 2.0])
    {'median': 2.0, 'low': 1.0, 'high': 3.0, 'count': 3}
    """
    summary = {"median": statistics.median(values), "low": min(values), "high": max(values)}
    return {**{name: significant(value) for name, value in summary.items()}, "count": len(values)}


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


def significant(value: float, digits: int = 4) -> float:
    """`value` rounded to significant digits.

    >>> significant(1234.567), significant(0.00123456)
    (1235.0, 0.001235)
    """
    return float(f"{value:.{digits}g}")


def title_of(record: Mapping[str, Any]) -> str:
    how = ", ".join(f"{name} {value}" for name, value in record["decoding"].items()) or "greedy"
    length = f"{record['context']} tokens" if record["context"] else "prompts of their own length"
    return f"{length}, batch {record['batch']}, {record['dtype']}, {how}"


def rows_of(records: Sequence[Record]) -> list[Record]:
    """One row per cell and method, ready for JSON, in the order in which they were first measured; baselines first.

    A row has the values of the cell, medians over the turns with their range, tau with its interval, the verdict on its
    texts (`text`, the worst of all calls), and no speed if one of them was wrong.
    """
    import pandas as pd

    runs = pd.DataFrame(of_kind(records, "run"))
    if runs.empty:
        return []
    runs["cell"] = [_key(record) for record in of_kind(records, "run")]
    runs["speed"] = runs.tokens / runs.decode_seconds.where(runs.decode_seconds > 0)
    runs["tau"] = runs.tokens / runs.steps.where(runs.steps > 0)
    floors = {(r["dtype"], r["context"], r["batch"]): r["seconds"] for r in of_kind(records, "floor")}
    audits = {(_key(r), r["method"]): r for r in of_kind(records, "audit")}
    rows = []
    for key, calls in runs.groupby("cell", sort=False):
        cell: Record = json.loads(str(key))
        first: dict[str, str] = {}
        speeds, taus = (calls.pivot(index="turn", columns="method", values=name) for name in ("speed", "tau"))
        texts = {(call.method, call.turn): call.text for call in calls.itertuples()}
        for name in sorted(calls.method.unique(), key=lambda name: {HF: 0, PLAIN: 1}.get(name, 2)):
            of_method, audit = calls[calls.method == name], audits.get((str(key), name))
            row = {**cell, "method": name, **_over_turns(of_method)}
            verdicts = {_verdict(call, cell, texts, audit) for call in of_method.itertuples()}
            if audit is not None and audit["verdict"] in FAILED:
                verdicts.add(audit["verdict"])
            row |= {"text": min(verdicts, key=VERDICTS.index), "audit": None if audit is None else audit["report"]}
            if row["point"]:  # compared with the first point of its draft
                base = first.setdefault(draft_of(row), name)
                gaps = (taus[name] - taus[base]).dropna()
                row["tau_difference"] = mean_interval(list(gaps)) if base != name and len(gaps) else None
            if row["text"] not in FAILED and (speed := _summary(speeds[name])) is not None:
                row["tokens_per_second"] = speed
                for key_of, base in (("ratio_to_hf", HF), ("ratio_to_plain", PLAIN)):
                    row[key_of] = _summary(speeds[name] / speeds[base]) if base in speeds else None
                floor = floors.get((cell["dtype"], cell["context"], cell["batch"]))
                if floor is not None:
                    # tau tokens per floor at most: for loops without a draft the share of the floor itself
                    share = floor * of_method.speed.median() / cell["batch"] / row["tau"]
                    row["share_of_floor"] = significant(share)
            rows.append(row)
    return rows


def _over_turns(runs: Any) -> Record:
    """The values of a row that its calls alone decide."""
    taus, peaks = runs.tau.dropna(), runs.peak_bytes.dropna()
    by_turn = list(zip_longest(*map(by_depth, runs.accepted)))
    return {
        "point": runs.point.iloc[0],
        "prompt_tokens": significant(runs.prompt_tokens.mean()),
        "repeats": len(runs),
        "ttft_seconds": summarize(list(runs.ttft_seconds)),
        "tau": significant(runs.tokens.sum() / max(1, runs.steps.sum())),
        "tau_interval": _interval(taus, least=1.0),
        "acceptance_histogram": _added(runs.histogram),
        "acceptance_by_depth": [significant(share) for share in by_depth(_added(runs.accepted))],
        "acceptance_intervals": [_interval([s for s in at if s is not None], least=0.0, most=1.0) for at in by_turn],
        "peak_bytes": int(peaks.max()) if len(peaks) else None,
        "draft_state_bytes": int(runs.draft_state_bytes.max()),
    }


def _summary(values: Any) -> dict[str, float] | None:
    measured = list(values.dropna())
    return summarize(measured) if measured else None


def _interval(values: Sequence[float], **bounds: float) -> dict[str, float] | None:
    return mean_interval(list(values), **bounds) if len(values) >= FEWEST else None


def _verdict(run: Any, cell: Mapping[str, Any], texts: Mapping[Any, Any], audit: Record | None) -> str:
    """The verdict on the text of one call; an audit stands for all texts that are not `generate`'s."""
    expected = texts.get((run.compared_with, run.turn))
    if run.compared_with == run.method:
        return REFERENCE
    if expected is None:
        return NOT_COMPARED
    if run.text == expected:
        return IDENTICAL
    if cell["dtype"] == "float32":
        return DIFFERS
    return NOT_COMPARED if audit is None else str(audit["verdict"])


def draft_of(row: Record) -> str:
    return str(row["method"]).partition(", ")[0]


def _key(record: Record) -> str:
    return json.dumps({name: record[name] for name in CELL}, sort_keys=True)


def by_depth(histogram: Sequence[int]) -> list[float]:
    """Share of the verifications that accepted a drafted token at depth d, out of those that accepted at d - 1.

    Verifications to which nothing was proposed at that depth count as not accepting.

    >>> by_depth([2, 1, 1])
    [0.5, 0.5]
    """
    reached = [sum(histogram[depth:]) for depth in range(len(histogram))]
    return [after / before for before, after in pairwise(reached) if before]


def _added(histograms: Iterable[Sequence[int]]) -> list[int]:
    return [sum(counts) for counts in zip_longest(*histograms, fillvalue=0)]


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table.

    >>> print(markdown_table(["a"], [["1"]]).replace("\\n", " "))
    | a | |---| | 1 |
    """
    first, *others = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    return "\n".join([first, "|" + "---|" * len(header), *others])


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


def range_of(summary: dict[str, Any] | None, digits: int = 2) -> str:
    """A median with its lowest and highest value; nothing for `None`."""
    return format(Shown(summary), f"~.{digits}f")


# Of the largest value of an interval whose three values have four significant digits, the most that rounding moves its
# middle from the mean, twice.
ROUNDED = 2e-3


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


def matrix_report(records: Sequence[Record], brief: bool = False) -> str:
    rows, environment = rows_of(records), of_kind(records, "environment")[0]
    settings = {
        key: value for key, value in environment["settings"].items() if key in ("target", "data", "tokens", "seed")
    }
    parts = [
        "# Benchmark",
        f"{environment.get('device')}, hf_longspec {environment.get('hf_longspec')}, {environment_line(records)}",
        f"Settings: `{json.dumps(settings)}`.",
        NOTE,
        f"Peak memory: {environment.get('peak_memory')}.",
    ]
    cells = grouped(rows, title_of)
    for title, members in cells.items():
        parts += [f"## {title}", table(members, {name: COLUMNS[name] for name in (BRIEF if brief else COLUMNS)})]
    for title, members in cells.items():
        if swept := [row for row in members if row["point"]]:
            swept = [row for points in grouped(swept, draft_of).values() for row in points]
            parts += [f"## Settings: {title}", table(swept, SWEPT)]
    parts += by_category(records)
    if failed := [row for row in rows if row["text"] in FAILED]:
        lines = [f"- {row['method']}, {title_of(row)}: {row['audit'] or row['text']}" for row in failed]
        parts += ["## Wrong texts", "\n".join(lines)]
    return "\n\n".join([*parts, *_left_out(records)]) + "\n"


def _tau(row: Record) -> str:
    interval = row["tau_interval"]
    return f"{row['tau']:.2f}" + ("" if interval is None else f" [{interval['low']:.2f}, {interval['high']:.2f}]")


# Headings of the tables, with the cell below them.
COLUMNS: dict[str, Column] = {
    "method": "method",
    "turns": "repeats",
    "TTFT, s": "{ttft_seconds:~.3f}",
    "tokens/s": "{tokens_per_second:~.1f}",
    "x `generate`": "{ratio_to_hf:~.2f}",
    "x plain loop": "{ratio_to_plain:~.2f}",
    "tau": _tau,
    "accepted at depth 1, 2, ...": lambda row: " ".join(f"{share:.2f}" for share in row["acceptance_by_depth"]),
    "peak memory, MiB": lambda row: "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:.0f}",
    "draft state, KiB": lambda row: f"{row['draft_state_bytes'] / 2**10:.0f}" if row["draft_state_bytes"] else "",
    "share of floor": "{share_of_floor:.0%}",
    "text": "text",
}
BRIEF = ("method", "TTFT, s", "tokens/s", "x `generate`", "x plain loop", "tau", "peak memory, MiB", "text")
SWEPT: dict[str, Column] = {
    **{name: COLUMNS[name] for name in ("method", "tau")},
    "difference of tau to the first": "{tau_difference:~+.2f}",
    **{name: COLUMNS[name] for name in ("tokens/s", "x plain loop")},
}


def by_category(records: Sequence[Record]) -> list[str]:
    """Return a table of tau by category for every cell, if the prompts have more than one."""
    parts = []
    for title, runs in grouped(of_kind(records, "run"), title_of).items():
        sums: dict[tuple[str, str], Record] = {}
        for run in (run for run in runs if run["method"] not in (HF, PLAIN)):
            for category, steps in zip(run.get("categories", ()), run["row_steps"], strict=False):
                start = {"method": run["method"], "category": category, "tokens": 0, "steps": 0}
                row = sums.setdefault((run["method"], category), start)
                row["tokens"] += run["tokens"] / max(1, len(run["row_steps"]))
                row["steps"] += steps
        if len({category for _, category in sums}) > 1:
            rows = [row | {"tau": row["tokens"] / max(1, row["steps"])} for row in sums.values()]
            shown = pivot(rows, {"method": "method"}, "category", "{}", "{tau:.2f}".format_map)
            parts += [f"## tau by category: {title}", shown]
    return parts


def _left_out(records: Sequence[Record]) -> list[str]:
    """List the missing calls with their reasons."""
    lines: dict[str, dict[str, None]] = {}
    for record in of_kind(records, "skipped"):
        lines.setdefault(record["reason"], {})[f"{record['method']} ({title_of(record)})"] = None
    missing = [f"- {reason}: {'; '.join(what)}" for reason, what in lines.items()]
    return ["## Left out", "\n".join(missing)] if missing else []


def acceptance_table(records: Sequence[Record]) -> str:
    """One row per setting, one column per length: mean and interval, and the difference to the first setting."""
    rows = of_kind(records, "acceptance")
    return pivot(rows, {"mode": "mode", "setting": _options}, "length", "tau at {}", _tau_of)


def _options(row: Record) -> str:
    return ", ".join(str(value) if name == "selection" else f"{name}={value}" for name, value in row["options"].items())


def _tau_of(row: Record) -> str:
    gap = row.get("difference")
    return estimate(row["tau"]) + ("" if gap is None else f" ({estimate(gap, '+.2f')})")


def acceptance_section(records: Sequence[Record]) -> str:
    """Table of tau by context length for the draft of [`records_of_draft`], as its model card quotes it."""
    return "\n\n".join([acceptance_table(records), with_defaults(ACCEPTANCE_NOTE, records), environment_line(records)])
