"""The Markdown report of `hf-longspec bench`."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from .matrix import NO_TIME
from .matrix_summary import Row, rows_of
from .report_parts import half_width, markdown_table, of_kind, range_of
from .results import Record

NOTE = (
    "Every call reads its prompt anew; the prompt is the time to the first token (TTFT), and tokens/s counts from the "
    "first token to the last, all rows together. Methods take turns, and within a turn all continue the same prompts "
    "from the same seed. Medians, in brackets the lowest and the highest turn; ratios (x) are taken within a turn. `hf "
    "generate` is plain `model.generate` (DynamicCache); plain loop is ours without a draft. tau: tokens emitted per "
    "verification and row, the target's own included, with the 95 % interval of the mean over turns; the last "
    "verification of a call is cut at the token limit. Accepted at a depth: of the verifications that accepted one "
    "less, not cut; those without a proposal there count as not accepted. Share of floor: reading weights and cache "
    "once from memory per step, at the measured bandwidth, over the time of a step. Text: `reference` is what the "
    "others are compared with, `identical` the same tokens, `exact` and `near-tie` the audit's verdict on another "
    "text. Where tokens are drawn, ours are compared with the plain loop of the same seed. A wrong text has no speed."
)

# What the papers compare with and this benchmark does not run, and why not.
NOT_RUN = {
    "Token Recycling": "it adapts a table of candidates per target, which is not implemented here",
    "EAGLE, EAGLE-2, EAGLE-3": "their drafts are trained for single targets in formats that are not read here",
    "Medusa": "its heads are not read; unchained TokenSwift heads (`chained=false`) have the same structure",
    "TriForce": "it needs a third, small model beside the target's sparse cache, which is not implemented here",
    "MagicDec": "its engine is not run; `--sweep selection=window,quest` measures both of its selections in this one",
    "SpecExtend": "it is not run; `--sweep selection=last_accepted` measures its criterion in every layer",
    "vLLM, SGLang": "other engines, whose own model code leaves nothing to compare in one process",
}


def matrix_report(records: Sequence[Record]) -> str:
    """Everything that was measured so far."""
    rows = rows_of(records)
    parts = ["# Benchmark", environment_paragraph(records), NOTE]
    parts += [f"Peak memory: {of_kind(records, 'environment')[0].get('peak_memory')}."]
    for title, part in _grouped(rows, lambda row: title_of(row.cell)).items():
        parts += [f"## {title}", cell_table(part)]
    for title, part in _grouped(rows, lambda row: title_of(row.cell)).items():
        if any(row.runs[0]["point"] for row in part):
            parts += [f"## Settings: {title}", sweep_table(part)]
    failed = [
        f"- {row.method}, {title_of(row.cell)}: {(row.audit or {}).get('report', row.verdict)}"
        for row in rows
        if row.failed
    ]
    parts += ["## Wrong texts", "\n".join(failed)] if failed else []
    parts += _analyses(records)
    parts += ["## Not run", "\n".join(f"- {name}: {why}." for name, why in NOT_RUN.items())]
    return "\n\n".join([*parts, *_left_out(records)]) + "\n"


def environment_paragraph(records: Sequence[Record]) -> str:
    """Machine, versions, commit, date, command."""
    found = of_kind(records, "environment")[0]
    bandwidth = [f"{r['read_gb_per_second']} GB/s read" for r in of_kind(records, "ceilings")[-1:]]
    parts = [
        str(found.get("device")),
        f"{found['cpu']}, {found['usable_cores']} of {found['cores']} cores usable, {found['threads']} threads",
        *bandwidth,
        f"torch {found['torch']}",
        f"transformers {found['transformers']}",
        f"hf_longspec {found.get('hf_longspec')}, commit {found['commit']}",
        f"load average {found['load_average']} at the start",
        found["date"],
    ]
    again = [f"resumed {record['date']}" for record in of_kind(records, "resumed")]
    state = "" if of_kind(records, "end") else " The run was not finished."
    settings = {key: value for key, value in found["settings"].items() if key in ("target", "data", "tokens", "seed")}
    return f"{', '.join([*parts, *again])}: `{found['command']}`.{state}\n\nSettings: `{json.dumps(settings)}`."


def title_of(cell: dict[str, Any]) -> str:
    """A cell in words."""
    length = f"{cell['context']} tokens" if cell["context"] else "prompts of their own length"
    how = ", ".join(f"{name} {value}" for name, value in cell["decoding"].items()) or "greedy"
    return f"{length}, batch {cell['batch']}, {cell['dtype']}, {how}"


def cell_table(rows: Sequence[Row]) -> str:
    """One line per method."""
    header = [
        "method",
        "turns",
        "TTFT, s",
        "tokens/s",
        "x `generate`",
        "x plain loop",
        "tau",
        "accepted at depth 1, 2, ...",
    ]
    header += ["peak memory, MiB", "draft state, KiB", "share of floor", "text"]
    return markdown_table(header, [_line(row, row.to_dict()) for row in rows])


def _line(row: Row, values: dict[str, Any]) -> list[str]:
    depths = " ".join(f"{share:.2f}" for share in values["acceptance_by_depth"])
    peak, floor = values["peak_bytes"], values.get("share_of_floor")
    return [
        row.method,
        str(values["repeats"]),
        range_of(values["ttft_seconds"], 3),
        *(
            _ranged(values.get(name), digits)
            for name, digits in (("tokens_per_second", 1), ("ratio_to_hf", 2), ("ratio_to_plain", 2))
        ),
        with_interval(values["tau"], values["tau_interval"]),
        depths,
        "" if peak is None else f"{peak / 2**20:.0f}",
        f"{values['draft_state_bytes'] / 2**10:.0f}" if values["draft_state_bytes"] else "",
        "" if floor is None else f"{floor:.0%}",
        row.verdict,
    ]


def _ranged(summary: dict[str, Any] | None, digits: int) -> str:
    return "" if summary is None else range_of(summary, digits)


def with_interval(value: float, interval: dict[str, float] | None) -> str:
    """A mean with half of its interval; without it if there was one value only."""
    return f"{value:.2f}" if interval is None or interval["count"] < 2 else f"{value:.2f} ± {half_width(interval)}"


def sweep_table(rows: Sequence[Row]) -> str:
    """The points of every draft with their difference to its first, turn by turn."""
    lines = []
    for points in _grouped(rows, lambda row: row.method.partition(", ")[0]).values():
        for row in points:
            if not row.runs[0]["point"]:
                continue
            gap = None if row is points[0] else row.difference_to(points[0])
            values = row.to_dict()
            shown = "" if gap is None else f"{gap['mean']:+.2f}" + (f" ± {half_width(gap)}" if gap["count"] > 1 else "")
            speeds = (
                _ranged(values.get(name), digits) for name, digits in (("tokens_per_second", 1), ("ratio_to_plain", 2))
            )
            lines.append([row.method, with_interval(values["tau"], values["tau_interval"]), shown, *speeds])
    return markdown_table(["method", "tau", "difference of tau to the first", "tokens/s", "x plain loop"], lines)


def _analyses(records: Sequence[Record]) -> list[str]:
    parts: list[str] = []
    for record in of_kind(records, "analysis"):
        parts += [f"## Analysis: {record['method']}, {title_of(record)}", analysis_text(record)]
    return parts


def analysis_text(record: Record) -> str:
    """What a draft's tokens met, in words and tables."""
    header = ["depth", "verifications that reached it", "accepted there", "rate"]
    lines = [
        [str(depth), str(reached), str(accepted), f"{accepted / reached:.3f}" if reached else ""]
        for depth, (reached, accepted) in enumerate(zip(record["reached"], record["accepted"], strict=True), 1)
    ]
    parts = [markdown_table(header, lines)]
    rejected = record["rejected"]
    header = [
        "of rejected tokens",
        "count",
        "mean",
        *(f"{low:.1f}-{low + 0.1:.1f}" for low in (n / 10 for n in range(10))),
    ]
    lines = [
        [title, str(rejected[name]["count"]), f"{rejected[name]['mean']:.3f}", *map(str, rejected[name]["deciles"])]
        for name, title in (("p", "target's probability p"), ("q", "draft's probability q"), ("rate", "min(1, p / q)"))
        if rejected[name]["count"]
    ]
    if lines:
        parts.append(markdown_table(header, lines))
    if rejected["p"]["count"] and not rejected["q"]["count"]:
        parts.append("The draft's probabilities q are known for SpecAttn only.")
    for name, title in (
        (
            "overlap",
            "Share of the selected entries that the next verification selects again, sinks included, mean over layers",
        ),
        ("pair_overlap", "Overlap of the entries that two tokens of one verification would select, by their distance"),
    ):
        if record.get(name):
            shown = ", ".join(f"{key}: {value:.3f}" for key, value in record[name].items())
            parts.append(f"{title}: {shown}.")
    return "\n\n".join(parts)


def _left_out(records: Sequence[Record]) -> list[str]:
    """What is missing, and why; not what an earlier part had no time for and a later one measured."""
    repeats = of_kind(records, "environment")[0]["settings"].get("repeats")
    runs = of_kind(records, "run")
    lines: dict[str, list[str]] = {}
    for record in of_kind(records, "skipped"):
        same = [r for r in runs if all(r[k] == record[k] for k in ("dtype", "context", "batch", "decoding", "method"))]
        if record["reason"] != NO_TIME or len(same) < (repeats or 0):
            lines.setdefault(record["reason"], []).append(f"{record['method']} ({title_of(record)})")
    found = [f"- {reason}: {'; '.join(dict.fromkeys(what))}" for reason, what in lines.items()]
    return ["## Left out", "\n".join(found)] if found else []


def _grouped(rows: Sequence[Row], key: Callable[[Row], str]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups
