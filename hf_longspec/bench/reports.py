"""Result files as Markdown: the full report beside each file, and the headline that documents quote."""

from collections.abc import Callable, Sequence
from typing import Any

from .engine import COMPILED, HF, PLAIN
from .engine_best import best_of_cells, kinds_of
from .gpu_report import gpu_headline
from .memory_report import memory_headline
from .report_parts import environment_line, half_width, left_out, markdown_table, note, of_kind, range_of
from .results import Record

MODES = {"sample": "Sampling at temperature 1", "greedy": "Greedy"}


def engine_headline(records: Sequence[Record]) -> str:
    """One row per cell and mode: speed of plain `generate`, ratios of the others, each kind of draft at its best."""
    kinds = kinds_of(records)
    lines = []
    for cell, best in best_of_cells(records).items():
        speed = f"{best[HF]['tokens_per_second']['median']:.1f}" if HF in best else ""
        lines.append([*map(str, cell), speed, *(_ratios(best.get(kind)) for kind in kinds)])
    return markdown_table(["dtype", "context", "batch", "mode", "`generate`, tokens/s", *kinds], lines)


def _ratios(row: Record | None) -> str:
    if row is None:
        return ""
    name = row["method"].removesuffix(COMPILED)
    to_hf = f"{row['ratio_to_hf']['median']:.2f}x"
    eager = f", {row['ratio_to_eager']['median']:.2f}x eager" if "ratio_to_eager" in row else ""
    if name == PLAIN:
        return to_hf + eager
    setting = f" ({name.split(', ', 1)[1]})" if ", " in name else ""
    return f"{to_hf}; {row['ratio_to_plain']['median']:.2f}x plain, tau {row['tau']:.2f}{setting}"


def engine_report(records: Sequence[Record]) -> str:
    """Everything that was measured, one table per mode."""
    parts = ["# Decoding speed", environment_line(records), note(records), *_speed_tables(records)]
    return "\n\n".join([*parts, *left_out(records)]) + "\n"


def _speed_tables(records: Sequence[Record]) -> list[str]:
    parts: list[str] = []
    header = ["dtype", "context", "batch", "method", "tokens/s", "x `generate`", "x plain loop", "tau"]
    header += ["drafting / verifying / rest", "draft state", "share of floor", "x eager"]
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
                range_of(row["ratio_to_eager"]) if "ratio_to_eager" in row else "",
            ]
            for row in of_kind(records, "decoding")
            if row["mode"] == mode
        ]
        if rows:
            parts += [f"## {title}", markdown_table(header, rows)]
    return parts


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
    return _report("One verification", verification_headline(records), records)


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
    difference = f" ({row['difference']['mean']:+.2f} ± {half_width(row['difference'])})" if "difference" in row else ""
    return f"{row['tau']['mean']:.2f} ± {half_width(row['tau'])}" + difference


def acceptance_report(records: Sequence[Record]) -> str:
    """The table with its environment."""
    return _report("Tokens per verification", acceptance_headline(records), records)


def ngram_headline(records: Sequence[Record]) -> str:
    """Tokens per verification, then speed, as far as either was measured."""
    parts = {"acceptance": acceptance_headline, "decoding": engine_headline}
    return "\n\n".join(table(records) for kind, table in parts.items() if of_kind(records, kind))


def ngram_report(records: Sequence[Record]) -> str:
    """Tokens per verification, then one table of speeds per mode."""
    parts = ["# N-grams and prompt lookup", environment_line(records), note(records)]
    if of_kind(records, "acceptance"):
        parts += ["## Tokens per verification", acceptance_headline(records)]
    return "\n\n".join([*parts, *_speed_tables(records), *left_out(records)]) + "\n"


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
    return _report("State of a LongSpec draft", draft_state_headline(records), records)


def offsets_headline(records: Sequence[Record]) -> str:
    """One row per offset and number of anchored positions."""
    rows = [
        [
            str(row["offset"]),
            str(row["anchors"]),
            f"{row['loss']['mean']:.3f} ± {half_width(row['loss'])}",
            f"{row['difference']['mean']:+.4f} ± {half_width(row['difference'], 4)}",
        ]
        for row in of_kind(records, "offsets")
    ]
    return markdown_table(["offset", "anchors", "target's loss", "difference to offset 0"], rows)


def offsets_report(records: Sequence[Record]) -> str:
    """The table with its environment."""
    return _report("The target under offsets", offsets_headline(records), records)


def long_headline(records: Sequence[Record]) -> str:
    """One row per method and mark."""
    rows = of_kind(records, "long")
    plain = {_run_of(row): row["tokens_per_second"] for row in rows if row["method"] == PLAIN}
    near: dict[str, dict[Any, float]] = {HF: {}, PLAIN: {}}
    for row in of_kind(records, "baseline"):
        near[row["method"]][_run_of(row)] = row["tokens_per_second"]
    header = ["mode", "penalty", "method", "tokens", "tokens/s", "x plain", "tokens/s near", "x plain near"]
    header += ["x `generate` near", "tau", "alpha", "beta"]
    lines = [
        [
            row["mode"],
            "yes" if row["penalised"] else "no",
            row["method"],
            str(row["mark"]),
            f"{row['tokens_per_second']:.1f}",
            _times(row["tokens_per_second"], plain.get(_run_of(row))),
            f"{row['tokens_per_second_near']:.1f}",
            *(_times(row["tokens_per_second_near"], near[name].get(_run_of(row))) for name in (PLAIN, HF)),
            *(f"{row[name]:.2f}" for name in ("tau", "alpha", "beta")),
            *(f"{windowed:.2f} / {whole:.2f}" for windowed, whole in row["distinct"]),
        ]
        for row in rows
    ]
    return markdown_table([*header, *(f"Distinct-{n}" for n in (1, 2, 3, 4))], lines)


def _run_of(row: Record) -> tuple[str, bool, int]:
    return row["mode"], row["penalised"], row["mark"]


def _times(speed: float, base: float | None) -> str:
    return f"{speed / base:.2f}" if base else ""


def long_report(records: Sequence[Record]) -> str:
    """The table with its environment."""
    return _report("Long generation", long_headline(records), records)


def _report(title: str, table: str, records: Sequence[Record]) -> str:
    """One table with everything that belongs to it."""
    parts = [f"# {title}", environment_line(records), note(records), table]
    return "\n\n".join([*parts, *left_out(records)]) + "\n"


# What documents quote of each benchmark: title and table.
HEADLINES: dict[str, tuple[str, Callable[[Sequence[Record]], str]]] = {
    "engine": ("Decoding speed", engine_headline),
    "verification": ("One verification behind a long prefix", verification_headline),
    "draft_state": ("State of a LongSpec draft", draft_state_headline),
    "offsets": ("The target under offsets", offsets_headline),
    "long": ("Long generation", long_headline),
    "ngram": ("N-grams and prompt lookup", ngram_headline),
    "gpu": ("On a GPU", gpu_headline),
    "memory": ("Extra memory", memory_headline),
    "acceptance": ("Tokens per verification (tau)", acceptance_headline),
}
