"""Reports of result files, and the part of each that documents quote, as Markdown: one page per benchmark.

pages.yaml has the titles, the notes and the columns that need no arithmetic.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from benchmarks import figure_report, gpu_report, read_yaml
from benchmarks.acceptance_card import ACCEPTANCE_NOTE, acceptance_table, environment_line, with_defaults
from benchmarks.records import of_kind
from benchmarks.report import Column, pivot, table
from hf_longspec.cli.files import Record
from hf_longspec.cli.measuring import HF, PLAIN

Columns = Mapping[str, Column]
# Measurements that were left out for one reason and are named.
MOST_NAMED = 6


def left_out(records: Sequence[Record]) -> list[str]:
    """List what was not measured, one line per reason, which names the first few."""
    reasons: dict[str, list[str]] = {}
    for record in of_kind(records, "skipped"):
        values = [value for name, value in record.items() if name not in ("kind", "reason", "options", "decoding")]
        values += [f"{name}={value}" for name, value in record.get("options", {}).items()]
        reasons.setdefault(record["reason"], []).append(" ".join(map(str, values)))
    lines = []
    for reason, what in reasons.items():
        names, more = list(dict.fromkeys(what))[:MOST_NAMED], len(set(what)) - MOST_NAMED
        lines.append(f"- {reason}: {'; '.join(names)}" + (f"; and {more} more" if more > 0 else ""))
    return ["Left out:\n\n" + "\n".join(lines)] if lines else []


@dataclass(frozen=True)
class Page:
    """The way in which the results of one benchmark are shown."""

    title: str  # heading of the part that documents quote, and of the report unless it has its own
    note: str  # how to read the numbers
    headline: Callable[[Sequence[Record]], str]  # the part that documents quote
    parts: Callable[[Sequence[Record]], list[str]] | None = None  # the report; the headline by default
    report_title: str | None = None  # heading of the report
    about: Callable[[Sequence[Record], str], str] | None = None  # what documents quote about one thing
    last: Callable[[Sequence[Record]], str] | None = None  # end of the report, after what was left out; may be empty
    environment: Callable[[Sequence[Record]], str] = environment_line

    def report(self, records: Sequence[Record]) -> str:
        head = [f"# {self.report_title or self.title}", self.environment(records), with_defaults(self.note, records)]
        if target := of_kind(records, "environment")[0].get("settings", {}).get("target"):
            head.insert(1, f"Target: {target}.")
        parts = [self.headline(records)] if self.parts is None else self.parts(records)
        last = "" if self.last is None else self.last(records)
        return "\n\n".join([*head, *parts, *left_out(records), *([last] if last else [])]) + "\n"


def long_rows(records: Sequence[Record]) -> list[Record]:
    """One row per method and mark, with its speed over those of the plain loop and of `generate`."""
    rows, speed = of_kind(records, "long"), "tokens_per_second"

    def run_of(row: Record) -> tuple[str, bool, int]:
        return row["mode"], row["penalised"], row["mark"]

    plain = {run_of(row): row[speed] for row in rows if row["method"] == PLAIN}
    near = {(row["method"], run_of(row)): row[speed] for row in of_kind(records, "baseline")}
    bases = {"over_plain": plain, "near_over_plain": {}, "near_over_generate": {}}
    for (method, run), value in near.items():
        bases["near_over_generate" if method == HF else "near_over_plain"][run] = value
    found = []
    for row in rows:
        over = {name: base[run_of(row)] for name, base in bases.items() if run_of(row) in base}
        ratios = {name: row[f"{speed}_near" if "near" in name else speed] / base for name, base in over.items()}
        found.append(row | ratios | {"penalty": "yes" if row["penalised"] else "no"})
    return found


def _mib(key: str) -> Callable[[Record], str]:
    return lambda row: "" if row.get(key) is None else f"{row[key] / 2**20:.2f}"


def memory_headline(records: Sequence[Record]) -> str:
    def share(row: Record) -> str:
        return f"{_mib('extra_bytes')(row)} MiB, {row['extra_bytes'] / row['kv_bytes']:.2%}"

    columns: Columns = {"part": "part", "method": "method"}
    return pivot(of_kind(records, "memory"), columns, "context", "{} tokens", share)


def memory_tables(records: Sequence[Record]) -> list[str]:
    columns: Columns = {
        "method": "method",
        "context": "context",
        "extra, MiB": _mib("extra_bytes"),
        "of it torch": _mib("torch_bytes"),
        "bound, MiB": _mib("bound_bytes"),
        "within": lambda row: {True: "yes", False: "NO", None: ""}[row.get("within")],
        "keys and values, MiB": _mib("kv_bytes"),
    }
    titles = {"decode": "## Decoding after a full cache", "prefill": "## The last chunk of a prompt"}
    rows = {title: of_kind(records, "memory", part=part) for part, title in titles.items()}
    return [memory_headline(records), *chain(*([title, table(own, columns)] for title, own in rows.items() if own))]


def _mean(key: str) -> Callable[[Record], str]:
    """A column: a mean with half of its interval."""
    return lambda row: f"{row[key]['mean']:.2f} ± {(row[key]['high'] - row[key]['low']) / 2:.2f}"


def _speedup(key: str) -> Callable[[Record], str]:
    """A column: a mean ratio, with half of its interval if there are several texts."""

    def shown(row: Record) -> str:
        if key not in row:
            return ""
        half = (row[key]["high"] - row[key]["low"]) / 2
        return f"{row[key]['mean']:.2f}" + (f" ± {half:.2f}" if row["texts"] > 2 else "")

    return shown


GATE: Columns = {
    "task or context": "task",
    "threads": "threads",
    "temperature": "temperature",
    "tokens": "tokens",
    "draft": "method",
    "tokens/s": "{tokens_per_second:.1f}",
    "over generate": _speedup("over_generate"),
    "over no draft": _speedup("speedup"),
    "in CPU time": _speedup("cpu_speedup"),
    "tau": "{tau:.2f}",
    "cost": lambda row: f"{row['cost']:.2f}" if "cost" in row else "",
    "nodes": "{nodes:.1f}",
    "plain steps": "{plain_steps:.0f}",
    "expected / real tokens": "{expected_over_emitted:.2f}",
    "same text": "{same_texts}/{texts}",
}
GATE_QUOTED = (
    *("task or context", "threads", "temperature", "tokens", "draft"),
    *("over generate", "over no draft", "tau", "cost", "nodes", "expected / real tokens", "same text"),
)


def gate_table(records: Sequence[Record], names: Iterable[str]) -> str:
    """Return these columns, without those of measurements that no record has."""
    rows = of_kind(records, "gate")
    optional = {"over generate": "over_generate", "cost": "cost"}
    missing = {name for name, key in optional.items() if not any(key in row for row in rows)}
    return table(rows, {name: GATE[name] for name in names if name not in missing})


STOCK = "generate"  # as benchmarks/gate.py names it


# Columns of the tables of gains, by the methods of gate.py. SpecAttn with all bits reads what a plain step reads.
GAINS = {
    PLAIN: "no draft",
    "n-grams": "n-grams",
    "smollm2-135m-tokenswift-alone": "TokenSwift heads",
    "smollm2-135m-tokenswift": "TokenSwift and n-grams",
    "generate, prompt lookup": "prompt lookup of transformers",
}
MORE_GAINS = GAINS | {"smollm2-135m-longspec": "LongSpec", "SpecAttn, int4": "SpecAttn, 4-bit weights"}


def gains(records: Sequence[Record], part: str) -> str:
    """Return speeds divided by that of plain `generate`, a line per task or context.

    `part` is `gains` or `gains with intervals`, for the longest answers, or `gains by length`, with more drafts.
    Without intervals it is the speed in all texts together, which is less than the mean over texts.
    """
    rows, shown = of_kind(records, "gate"), MORE_GAINS if part == "gains by length" else GAINS
    if part != "gains by length":
        rows = [row for row in rows if row["tokens"] == max(row["tokens"] for row in rows)]
    stock = {(row["task"], row["tokens"]): row["tokens_per_second"] for row in rows if row["method"] == STOCK}
    head = "tokens before" if all(row["task"].isdecimal() for row in rows) else "task"
    lines: dict[tuple[str, int], dict[str, Any]] = {}
    for row in rows:
        place = row["task"], row["tokens"]
        line = lines.setdefault(place, {head: place[0].replace("_", " "), "tokens of the answer": place[1]})
        if name := shown.get(row["method"]):
            has_interval = part == "gains with intervals" and "over_generate" in row
            of_all_texts = f"{row['tokens_per_second'] / stock[place]:.2f}"
            line[name] = _mean("over_generate")(row) if has_interval else of_all_texts
    heads = [head] + ["tokens of the answer"] * (part == "gains by length")
    measured = [name for name in shown.values() if any(name in line for line in lines.values())]
    return table(list(lines.values()), {name: name for name in [*heads, *measured]})


ROLLOUTS: Columns = {
    "model": "model",
    "way": "way",
    "rows": "rows",
    "threads": "threads",
    "tokens/s": "{tokens_per_second:.0f}",
    "over TRL's own": "{speed:.2f} ({lowest:.2f} to {highest:.2f})",
    "share of the time": "{share:.2f}",
    "reward": "{reward:.3f}",
    "tau": "{tau:.2f}",
}
ROLLOUTS_QUOTED = ("way", "tokens/s", "over TRL's own", "share of the time", "tau")
TAUS: Columns = {
    "model": "model",
    "draft": "way",
    "step": "step",
    "tau": _mean("tau"),
    "reward": _mean("reward"),
    "share of the time": "{share:.3f}",
}


def _table_of(rows: Callable[[Sequence[Record]], Sequence[Record]], columns: Columns) -> dict[str, Any]:
    return {"headline": lambda records: table(rows(records), columns)}


# What the pages of pages.yaml compute; by default a headline with one row per record.
COMPUTED: dict[str, dict[str, Any]] = {
    "figure": {"headline": figure_report.summary, "parts": figure_report.tables, "about": figure_report.part},
    "gpu": {
        "headline": gpu_report.gpu_report,
        "about": gpu_report.part,
        "last": gpu_report.goals,
        "environment": gpu_report.gpu_environment,
    },
    "memory": {"headline": memory_headline, "parts": memory_tables},
    "acceptance": {"note": ACCEPTANCE_NOTE, "headline": acceptance_table},
    "rollouts": {
        "parts": lambda records: [
            table(rows, columns)
            for kind, columns in (("rollouts", ROLLOUTS), ("tau", TAUS))
            if (rows := of_kind(records, kind))
        ],
        "headline": lambda records: table(
            of_kind(records, "rollouts"), {name: ROLLOUTS[name] for name in ROLLOUTS_QUOTED}
        ),
    },
    "gate": {
        "headline": lambda records: gate_table(records, GATE_QUOTED),
        "about": gains,
        "parts": lambda records: [gate_table(records, GATE)],
    },
}


def _pages() -> dict[str, Page]:
    pages = {}
    for name, page in read_yaml("pages.yaml").items():
        if columns := page.pop("columns", None):
            rows = long_rows if name == "long" else lambda records, name=name: of_kind(records, name)
            page |= _table_of(rows, columns)
        pages[name] = Page(**page, **COMPUTED.get(name, {}))
    return pages


PAGES = _pages()
