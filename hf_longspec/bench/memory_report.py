"""Memory as Markdown."""

from collections.abc import Sequence

from .report_parts import environment_line, left_out, markdown_table, note, of_kind
from .results import Record

TITLES = {"decode": "Decoding behind a full cache", "prefill": "The last chunk of a prompt"}


def memory_headline(records: Sequence[Record]) -> str:
    """One row per method of either part, one column per context."""
    rows = of_kind(records, "memory")
    contexts = sorted({row["context"] for row in rows})
    found = {(row["part"], row["method"], row["context"]): row for row in rows}
    lines = [
        [part, method, *(_cell(found.get((part, method, context))) for context in contexts)]
        for part, method in dict.fromkeys((row["part"], row["method"]) for row in rows)
    ]
    return markdown_table(["part", "method", *(f"{context} tokens" for context in contexts)], lines)


def memory_report(records: Sequence[Record]) -> str:
    """Everything, with the bounds."""
    parts = ["# Extra memory", environment_line(records), note(records), memory_headline(records)]
    header = ["method", "context", "extra, MiB", "of it torch", "bound, MiB", "within", "keys and values, MiB"]
    for part, title in TITLES.items():
        rows = [
            [
                row["method"],
                str(row["context"]),
                *(_mib(row.get(name)) for name in ("extra_bytes", "torch_bytes", "bound_bytes")),
                {True: "yes", False: "NO", None: ""}[row.get("within")],
                _mib(row["kv_bytes"]),
            ]
            for row in of_kind(records, "memory")
            if row["part"] == part
        ]
        if rows:
            parts += [f"## {title}", markdown_table(header, rows)]
    return "\n\n".join([*parts, *left_out(records)]) + "\n"


def _cell(row: Record | None) -> str:
    if row is None:
        return ""
    return f"{_mib(row['extra_bytes'])} MiB, {row['extra_bytes'] / row['kv_bytes']:.2%}"


def _mib(value: int | None) -> str:
    return "" if value is None else f"{value / 2**20:.2f}"
