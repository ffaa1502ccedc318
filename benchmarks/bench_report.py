"""Reports of files that `hf-longspec bench` wrote before it had one table: methods in cells, with their settings."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise, zip_longest
from typing import Any

from benchmarks.report import Column, mean_interval, table
from hf_longspec.auditing import EXACT, NEAR_TIE
from hf_longspec.cli.acceptance import FEWEST, environment_line
from hf_longspec.cli.files import Record, of_kind
from hf_longspec.cli.measuring import (
    DIFFERS,
    FAILED,
    HF,
    IDENTICAL,
    NOT_COMPARED,
    PLAIN,
    REFERENCE,
    significant,
    summarize,
)

# Verdicts on a text, the worst first.
VERDICTS = (*FAILED, NEAR_TIE, NOT_COMPARED, EXACT, IDENTICAL, REFERENCE)
CELL = ("dtype", "context", "batch", "decoding")

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


def title_of(record: Mapping[str, Any]) -> str:
    how = ", ".join(f"{name} {value}" for name, value in record["decoding"].items()) or "greedy"
    length = f"{record['context']} tokens" if record["context"] else "prompts of their own length"
    return f"{length}, batch {record['batch']}, {record['dtype']}, {how}"


def grouped(records: Iterable[Record], key: Callable[[Record], str]) -> dict[str, list[Record]]:
    """The records by a text that is made of each."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups


def _cell(record: Record) -> str:
    return json.dumps({name: record[name] for name in CELL}, sort_keys=True)


def rows_of(records: Sequence[Record]) -> list[Record]:
    """One row per cell and method, in the order in which they were first measured; baselines first.

    A row has the values of the cell, medians over the turns with their range, tau with its interval, the verdict on its
    texts (`text`, the worst of all calls), and no speed if one of them was wrong.
    """
    floors = {_cell(r | {"decoding": {}}): r["seconds"] for r in of_kind(records, "floor")}
    audits = {(_cell(r), r["method"]): r for r in of_kind(records, "audit")}
    rows = []
    for key, runs in grouped(of_kind(records, "run"), _cell).items():
        by_method = grouped(runs, lambda run: run["method"])
        speeds, taus = ({name: _by_turn(of, *pair) for name, of in by_method.items()} for pair in QUOTIENTS)
        texts = {(run["method"], run["turn"]): run["text"] for run in runs}
        first: dict[str, str] = {}
        for name in sorted(by_method, key=lambda name: {HF: 0, PLAIN: 1}.get(name, 2)):
            own, audit = by_method[name], audits.get((key, name))
            row = {**{part: own[0][part] for part in CELL}, "method": name, **_over_turns(own, taus[name])}
            verdicts = {_verdict(run, texts, audit) for run in own}
            if audit is not None and audit["verdict"] in FAILED:
                verdicts.add(audit["verdict"])
            row |= {"text": min(verdicts, key=VERDICTS.index), "audit": None if audit is None else audit["report"]}
            if row["point"]:  # compared with the first point of its draft
                base = first.setdefault(draft_of(row), name)
                gaps = [tau - taus[base][turn] for turn, tau in taus[name].items() if turn in taus[base]]
                row["tau_difference"] = mean_interval(gaps) if base != name and gaps else None
            if row["text"] not in FAILED and speeds[name]:
                row["tokens_per_second"] = summarize([*speeds[name].values()])
                for ratio, base in (("ratio_to_hf", HF), ("ratio_to_plain", PLAIN)):
                    others = speeds.get(base, {})
                    ratios = [speed / others[turn] for turn, speed in speeds[name].items() if turn in others]
                    row[ratio] = summarize(ratios) if ratios else None
                if (floor := floors.get(_cell(row | {"decoding": {}}))) is not None:
                    # tau tokens per floor at most: for loops without a draft the share of the floor itself
                    median = summarize([*speeds[name].values()])["median"]
                    row["share_of_floor"] = significant(floor * median / row["batch"] / row["tau"])
            rows.append(row)
    return rows


# Numerator and denominator of the speed and of tau of a call.
QUOTIENTS = (("tokens", "decode_seconds"), ("tokens", "steps"))


def _by_turn(runs: Sequence[Record], above: str, below: str) -> dict[int, float]:
    return {run["turn"]: run[above] / run[below] for run in runs if run[below] > 0}


def _over_turns(runs: Sequence[Record], taus: Mapping[int, float]) -> Record:
    """The values of a row that its calls alone decide."""
    accepted = [sum(counts) for counts in zip_longest(*(run["accepted"] for run in runs), fillvalue=0)]
    peaks = [run["peak_bytes"] for run in runs if run["peak_bytes"] is not None]
    return {
        "point": runs[0]["point"],
        "repeats": len(runs),
        "ttft_seconds": summarize([run["ttft_seconds"] for run in runs]),
        "tau": significant(sum(run["tokens"] for run in runs) / max(1, sum(run["steps"] for run in runs))),
        "tau_interval": mean_interval([*taus.values()], least=1.0) if len(taus) >= FEWEST else None,
        "acceptance_by_depth": [significant(share) for share in by_depth(accepted)],
        "peak_bytes": max(peaks, default=None),
        "draft_state_bytes": max(run["draft_state_bytes"] for run in runs),
    }


def _verdict(run: Record, texts: Mapping[Any, Any], audit: Record | None) -> str:
    """The verdict on the text of one call; an audit stands for all texts that are not `generate`'s."""
    expected = texts.get((run["compared_with"], run["turn"]))
    if run["compared_with"] == run["method"]:
        return REFERENCE
    if expected is None:
        return NOT_COMPARED
    if run["text"] == expected:
        return IDENTICAL
    if run["dtype"] == "float32":
        return DIFFERS
    return NOT_COMPARED if audit is None else str(audit["verdict"])


def draft_of(row: Record) -> str:
    return str(row["method"]).partition(", ")[0]


def by_depth(histogram: Sequence[int]) -> list[float]:
    """Share of the verifications that accepted a drafted token at depth d, out of those that accepted at d - 1.

    Verifications to which nothing was proposed at that depth count as not accepting.

    >>> by_depth([2, 1, 1])
    [0.5, 0.5]
    """
    reached = [sum(histogram[depth:]) for depth in range(len(histogram))]
    return [after / before for before, after in pairwise(reached) if before]


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
SWEPT: dict[str, Column] = {
    **{name: COLUMNS[name] for name in ("method", "tau")},
    "difference of tau to the first": "{tau_difference:~+.2f}",
    **{name: COLUMNS[name] for name in ("tokens/s", "x plain loop")},
}


def bench_report(records: Sequence[Record]) -> str:
    rows, environment = rows_of(records), of_kind(records, "environment")[0]
    named = ("target", "data", "tokens", "seed")
    settings = {key: value for key, value in environment["settings"].items() if key in named}
    parts = [
        "# Benchmark",
        f"{environment.get('device')}, hf_longspec {environment.get('hf_longspec')}, {environment_line(records)}",
        f"Settings: `{json.dumps(settings)}`.",
        NOTE,
        f"Peak memory: {environment.get('peak_memory')}.",
    ]
    cells = grouped(rows, title_of)
    parts += [f"## {title}\n\n{table(members, COLUMNS)}" for title, members in cells.items()]
    for title, members in cells.items():
        if swept := [row for row in members if row["point"]]:
            swept = [row for points in grouped(swept, draft_of).values() for row in points]
            parts += [f"## Settings: {title}", table(swept, SWEPT)]
    lines: dict[str, dict[str, None]] = {}
    for record in of_kind(records, "skipped"):
        lines.setdefault(record["reason"], {})[f"{record['method']} ({title_of(record)})"] = None
    missing = [f"- {reason}: {'; '.join(what)}" for reason, what in lines.items()]
    return "\n\n".join([*parts, *(["## Left out", "\n".join(missing)] if missing else [])]) + "\n"
