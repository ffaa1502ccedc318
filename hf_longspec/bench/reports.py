"""Result files as Markdown: the full report beside each file, and the headline that README quotes."""

from collections.abc import Callable, Sequence
from typing import Any

from .engine import HF, PLAIN
from .results import Record

MODES = {"sample": "Sampling at temperature 1", "greedy": "Greedy"}
NOTES = {
    "engine": (
        "Tokens per second of all rows together, from the first token to the last, on a cache that was prefilled "
        "before; median of interleaved repeats, lowest and highest in brackets, ratios taken within a repeat. `hf "
        "generate` is plain `model.generate` (DynamicCache, sdpa); plain loop is ours without a draft. Ratios (x) "
        "are to `generate`, unless it says plain. tau: tokens per verification, the target's own included. Floor: "
        "reading weights and cache once from memory; a model that fits into the processor's cache can be below it."
    ),
    "verification": (
        "Milliseconds for one layer (attention) and for the whole model (forward), medians of interleaved repeats; "
        "ratio: transformers' time over ours, lowest and highest in brackets. Transformers runs its sdpa attention "
        "with a 4-D mask on a DynamicCache; for a single node, as in plain decoding, without a mask. Error: "
        "attention against float64, logits of one forward against the other's."
    ),
    "draft_state": (
        "Bytes that the draft keeps for one row beside the target's cache, bytes of that cache, and the median time to "
        "draft one tree, on a random model of 3 layers."
    ),
    "acceptance": (
        "tau: tokens emitted per verification, the target's own included; mean over prompts with its 95 % "
        "interval. In brackets: difference to the first row of the same mode, prompt by prompt, with its 95 % "
        "interval. Settings not named are the defaults."
    ),
}


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table.

    >>> print(markdown_table(["a", "b"], [["1", "2"]]))
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    first, *others = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    return "\n".join([first, "|" + "---|" * len(header), *others])


def of_kind(records: Sequence[Record], kind: str) -> list[Record]:
    """The records of one kind."""
    return [record for record in records if record["kind"] == kind]


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
    ]
    state = "" if of_kind(records, "end") else " The run was not finished."
    return f"{', '.join(parts)}: `{found['command']}`.{state}"


def range_of(summary: dict[str, Any], digits: int = 2) -> str:
    """A median with its lowest and highest value."""
    return f"{summary['median']:.{digits}f} ({summary['low']:.{digits}f}-{summary['high']:.{digits}f})"


def left_out(records: Sequence[Record]) -> list[str]:
    """What was not measured, one line per reason."""
    reasons: dict[str, list[str]] = {}
    for record in of_kind(records, "skipped"):
        values = [value for name, value in record.items() if name not in ("kind", "reason", "options")]
        values += [f"{name}={value}" for name, value in record.get("options", {}).items()]
        reasons.setdefault(record["reason"], []).append(" ".join(map(str, values)))
    lines = [f"- {reason}: {'; '.join(what)}" for reason, what in reasons.items()]
    return ["Left out:\n\n" + "\n".join(lines)] if lines else []


def note(records: Sequence[Record]) -> str:
    """How the numbers of a result file are to be read."""
    found = of_kind(records, "environment")[0]
    defaults = found.get("settings", {}).get("defaults", {})
    named = ", ".join(f"{name}={value}" for name, value in defaults.items())
    return NOTES[found["benchmark"]] + (f" Defaults: {named}." if named else "")


def engine_headline(records: Sequence[Record]) -> str:
    """One row per cell: speed of plain `generate`, ratios of the others, sampled and greedy."""
    rows = of_kind(records, "decoding")
    methods = list(dict.fromkeys(row["method"] for row in rows if row["method"] != HF))
    cells = list(dict.fromkeys((row["dtype"], row["context"], row["batch"]) for row in rows))
    modes = [mode for mode in MODES if any(row["mode"] == mode for row in rows)]
    by_key = {(row["dtype"], row["context"], row["batch"], row["mode"], row["method"]): row for row in rows}
    titles = {"sample": "", "greedy": "greedy: "}
    header = ["dtype", "context", "batch", "`generate`, tokens/s"]
    header += [titles[mode] + method for mode in modes for method in methods]
    lines = []
    for cell in cells:
        base = by_key.get((*cell, "sample", HF)) or by_key.get((*cell, "greedy", HF))
        speed = f"{base['tokens_per_second']['median']:.1f}" if base else ""
        values = [_ratios(by_key.get((*cell, mode, method))) for mode in modes for method in methods]
        lines.append([*map(str, cell), speed, *values])
    return markdown_table(header, lines)


def _ratios(row: Record | None) -> str:
    if row is None:
        return ""
    to_hf = f"{row['ratio_to_hf']['median']:.2f}x"
    if row["method"] == PLAIN:
        return to_hf
    return f"{to_hf}; {row['ratio_to_plain']['median']:.2f}x plain, tau {row['tau']:.2f}"


def engine_report(records: Sequence[Record]) -> str:
    """Everything that was measured, one table per mode."""
    parts = ["# Decoding speed", environment_line(records), note(records)]
    header = ["dtype", "context", "batch", "method", "tokens/s", "x `generate`", "x plain loop", "tau"]
    header += ["drafting / verifying / rest", "draft state", "share of floor"]
    for mode, title in MODES.items():
        rows = [
            [
                row["dtype"],
                str(row["context"]),
                str(row["batch"]),
                row["method"],
                range_of(row["tokens_per_second"], 1),
                range_of(row["ratio_to_hf"]),
                range_of(row["ratio_to_plain"]),
                f"{row['tau']:.2f}",
                " / ".join(f"{share:.0%}" for share in row["shares"].values()),
                f"{row['draft_state_bytes'] / 1024:.0f} KiB" if row["draft_state_bytes"] else "",
                f"{row['share_of_floor']:.0%}",
            ]
            for row in of_kind(records, "decoding")
            if row["mode"] == mode
        ]
        if rows:
            parts += [f"## {title}", markdown_table(header, rows)]
    return "\n\n".join([*parts, *left_out(records)]) + "\n"


def verification_headline(records: Sequence[Record]) -> str:
    """One row per case: both times and their ratio."""
    header = ["part", "dtype", "nodes", "transformers, ms", "ours, ms", "ratio", "bandwidth floor, ms", "error"]
    rows = [
        [
            row["part"],
            row["dtype"],
            str(row["nodes"]),
            f"{row['hf_ms']['median']:.1f}",
            f"{row['ours_ms']['median']:.1f}",
            range_of(row["ratio"]),
            f"{row['floor_ms']:.1f}",
            f"{row['error']:.0e}",
        ]
        for row in of_kind(records, "verification")
    ]
    return markdown_table(header, rows)


def verification_report(records: Sequence[Record]) -> str:
    """The table with its environment."""
    parts = ["# One verification", environment_line(records), note(records), verification_headline(records)]
    return "\n\n".join([*parts, *left_out(records)]) + "\n"


def acceptance_headline(records: Sequence[Record]) -> str:
    """One row per setting, one column per length: mean and interval, and the difference to the first setting."""
    rows = of_kind(records, "acceptance")
    lengths = sorted({row["length"] for row in rows})
    settings = list(dict.fromkeys((row["mode"], _options(row)) for row in rows))
    by_key = {(row["mode"], _options(row), row["length"]): row for row in rows}
    lines = []
    for mode, options in settings:
        shown = ", ".join(value if name == "selection" else f"{name}={value}" for name, value in options)
        lines.append([mode, shown, *(_tau(by_key.get((mode, options, length))) for length in lengths)])
    return markdown_table(["mode", "setting", *(f"tau at {length}" for length in lengths)], lines)


def _options(row: Record) -> tuple[tuple[str, str], ...]:
    return tuple((name, str(value)) for name, value in row["options"].items())


def _tau(row: Record | None) -> str:
    if row is None:
        return ""
    difference = f" ({row['difference']['mean']:+.2f} ± {_half(row['difference'])})" if "difference" in row else ""
    return f"{row['tau']['mean']:.2f} ± {_half(row['tau'])}" + difference


def _half(interval: dict[str, Any]) -> str:
    return f"{(interval['high'] - interval['low']) / 2:.2f}"


def acceptance_report(records: Sequence[Record]) -> str:
    """The table with its environment."""
    parts = ["# Tokens per verification", environment_line(records), note(records), acceptance_headline(records)]
    return "\n\n".join([*parts, *left_out(records)]) + "\n"


def draft_state_headline(records: Sequence[Record]) -> str:
    """One row per context."""
    header = ["context", "draft state, KiB", "target's cache, MiB", "ms per draft tree"]
    rows = [
        [
            str(row["context"]),
            f"{row['draft_state_bytes'] / 2**10:.0f}",
            f"{row['target_cache_bytes'] / 2**20:.1f}",
            f"{row['draft_ms']:.2f}",
        ]
        for row in of_kind(records, "draft_state")
    ]
    return markdown_table(header, rows)


def draft_state_report(records: Sequence[Record]) -> str:
    """The table with its environment."""
    parts = ["# State of a LongSpec draft", environment_line(records), note(records), draft_state_headline(records)]
    return "\n\n".join([*parts, *left_out(records)]) + "\n"


# What README quotes of each benchmark: title and table.
HEADLINES: dict[str, tuple[str, Callable[[Sequence[Record]], str]]] = {
    "engine": ("Decoding speed", engine_headline),
    "verification": ("One verification behind a long prefix", verification_headline),
    "draft_state": ("State of a LongSpec draft", draft_state_headline),
    "acceptance": ("Tokens per verification (tau)", acceptance_headline),
}
