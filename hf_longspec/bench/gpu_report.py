"""The GPU run as Markdown: predictions first, then one table per kind of line."""

from collections.abc import Sequence

from .report_parts import environment_line, left_out, markdown_table, note, of_kind, range_of
from .results import Record

# Kind of line: title, and the columns beside time and floor.
TABLES = {
    "forward": ("One forward of the target", ("side", "backend", "mode", "batch", "context", "nodes", "error")),
    "iteration": (
        "One iteration of a drafter",
        ("draft", "compiled", "batch", "context", "nodes", "c", "c_floor", "tau_of_paper", "c_times_tau"),
    ),
    "kernel": ("Attention of one layer", ("backend", "batch", "context", "nodes", "tb_per_second", "error")),
    "baseline": ("Other ways to compute it", ("baseline", "batch", "context", "nodes", "error")),
    "score_rows": ("With SpecAttn's score rows", ("backend", "batch", "context", "nodes", "overhead")),
    "commit": ("Commit of an accepted path, all layers", ("nodes", "context")),
    "batch": ("Larger batches", ("backend", "batch", "context", "nodes")),
    "fp8": ("Matrix products in FP8", ("backend", "batch", "context", "nodes")),
}


def gpu_headline(records: Sequence[Record]) -> str:
    """Forwards and iterations."""
    return "\n\n".join(part for kind in ("forward", "iteration") for part in _table(records, kind, "####"))


def gpu_report(records: Sequence[Record]) -> str:
    """Everything that was measured, refused and left out."""
    parts = ["# GPU", environment_line(records), *_ceilings(records), note(records), *_predictions(records)]
    parts += [part for kind in TABLES for part in _table(records, kind)]
    return (
        "\n\n".join([*parts, *_correctness(records), *_profiles(records), *_failed(records), *left_out(records)]) + "\n"
    )


def _ceilings(records: Sequence[Record]) -> list[str]:
    return [
        f"{found.get('gpu', found['device'])}: {found['tb_per_second']} TB/s copied, {found['tflops']} TFLOP/s in "
        f"bfloat16 matrix products, measured in this run; CUDA {found['cuda']}, triton {found['triton']}."
        for found in of_kind(records, "gpu_ceilings")
    ]


def _predictions(records: Sequence[Record]) -> list[str]:
    outcomes = {record["name"]: record for record in of_kind(records, "outcome")}
    rows = []
    for predicted in of_kind(records, "prediction"):
        found = outcomes.get(predicted["name"], {"holds": None, "values": []})
        verdict = {True: "held", False: "did not hold", None: "not measured"}[found["holds"]]
        rows.append(
            [predicted["name"], predicted["text"], verdict, ", ".join(f"{value:g}" for value in found["values"])]
        )
    return ["## Predictions", markdown_table(["", "predicted", "outcome", "measured"], rows)] if rows else []


def _table(records: Sequence[Record], kind: str, heading: str = "##") -> list[str]:
    title, columns = TABLES[kind]
    rows = [
        [*(_cell(record.get(name)) for name in columns), *_times(record), record["how"]]
        for record in of_kind(records, kind)
    ]
    if not rows:
        return []
    return [f"{heading} {title}", markdown_table([*columns, "ms", "floor, ms", "times floor", "timed by"], rows)]


def _times(record: Record) -> list[str]:
    return [range_of(record["ms"], 3), f"{record['floor_ms']:g}", _cell(record["times_floor"])]


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _correctness(records: Sequence[Record]) -> list[str]:
    rows = []
    for name in dict.fromkeys(record["backend"] for record in of_kind(records, "correctness")):
        own = [record for record in of_kind(records, "correctness") if record["backend"] == name]
        wrong = [f"{record['lengths']} x {record['nodes']}: {record['error']}" for record in own if not record["right"]]
        rows.append([name, str(len(own)), "; ".join(wrong) or "none"])
    return ["## Against float64", markdown_table(["backend", "cases", "wrong"], rows)] if rows else []


def _profiles(records: Sequence[Record]) -> list[str]:
    parts = []
    for found in of_kind(records, "profile"):
        rows = [[top["name"], str(top["calls"]), f"{top['ms']:g}"] for top in found["top"]]
        what = f"{found['nodes']} nodes behind {found['context']}, {found['launches']} launches"
        parts += [f"## Profile of {found['side']}: {what}", markdown_table(["operation", "calls", "ms"], rows)]
    return parts


def _failed(records: Sequence[Record]) -> list[str]:
    lines = [
        f"- {', '.join(f'{name}={value}' for name, value in record.items() if name not in ('kind', 'reason'))}: "
        f"{record['reason']}"
        for record in of_kind(records, "failed")
    ]
    return ["Failed:\n\n" + "\n".join(lines)] if lines else []
