"""The report of `gpu.py`, and the parts of it that documents quote."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import gpu_goals
from benchmarks.figure_report import CLASSES, fill_table
from benchmarks.gpu_goals import FUSED, ratio
from benchmarks.records import of_kind
from benchmarks.report import Column, range_of, table
from hf_longspec.cli.files import Record
from hf_longspec.cli.measuring import HF, PLAIN


def gpu_report(records: Sequence[Record]) -> str:
    parts = [record["text"] for record in of_kind(records, "note")]
    parts += [
        f"{record.get('gpu', record['device'])}: {record['tb_per_second']} TB/s copied, {record['tflops']} TFLOP/s in "
        f"bfloat16 matrix products, measured in this run; CUDA {record['cuda']}, triton {record['triton']}."
        for record in of_kind(records, "gpu_ceilings")
    ]
    more: dict[str, Mapping[str, Column]] = {
        "steps": {"plain steps": lambda row: _number(_steps(records, row))},
        "ms": {"ms": lambda row: _ms(row["ms"])},
        "floor": {name: name for name in ("floor_ms", "times_floor", "how")},
    }
    for kind, (title, names, times) in gpu_goals.SUITE["tables"].items():
        if rows := of_kind(records, kind):
            columns: dict[str, Column] = {name: name for name in names.split() if any(name in row for row in rows)}
            for name in times.split():
                columns |= {key: of for key, of in more[name].items() if callable(of) or any(of in row for row in rows)}
            parts += [f"## {title}", table(rows, columns)]
    for row in of_kind(records, "profile"):
        parts += [f"## Kernels of an iteration: {row['draft']}, {row['mode']}", profile_table(row)]
    failed = [
        f"- {', '.join(f'{name}={value}' for name, value in row.items() if name not in ('kind', 'reason'))}: "
        f"{row['reason']}"
        for row in of_kind(records, "failed")
    ]
    return "\n\n".join(parts + (["Failed:", "\n".join(failed)] if failed else []))


def profile_table(row: Record) -> str:
    included = f", with {row['includes']}" if "includes" in row else ""
    launches, iterations = f"{row['launches']:g} launches", f"{row['iterations']} iterations"
    head = f"After {row['context']:,} tokens: {launches} per iteration, over {iterations}{included}."
    kernels = [kernel | {"kernel": f"`{kernel['kernel'].replace('|', ' ')}`"} for kernel in row["kernels"]]
    return f"{head}\n\n{table(kernels, {'us': 'us', 'launches': 'launches', 'kernel': 'kernel'})}"


def goals(records: Sequence[Record]) -> str:
    """The goals, for a run that measured the ceilings, as every whole one does."""
    return f"## Goals\n\n{gpu_goals.judged(records)}" if of_kind(records, "gpu_ceilings") else ""


def gpu_environment(records: Sequence[Record]) -> str:
    """Card, versions, commit and date in one line, and the command if there is one for all."""
    facts, *_ = of_kind(records, "environment")
    state = "" if of_kind(records, "end") else " The run was not finished."
    return _where(records) + (f": `{facts['command']}`." if "command" in facts else ".") + state


def _where(records: Sequence[Record]) -> str:
    facts, *_ = of_kind(records, "environment")
    card = next((row["gpu"] for row in of_kind(records, "gpu_ceilings") if "gpu" in row), facts.get("gpu"))
    versions = [f"{name} {facts[name]}" for name in ("torch", "triton", "transformers") if facts.get(name)]
    parts = [card or facts["cpu"], *versions, f"package of commit {facts['commit']}", facts["date"]]
    return ", ".join(parts)


def part(records: Sequence[Record], name: str) -> str:
    """What documents quote, with card, versions and commit; KeyError for an unknown part."""
    return f"{PARTS[name](records)}\n\n{_where(records)}."


def without_draft(records: Sequence[Record]) -> str:
    """Steps of stock `generate` and of the loop without a draft, and their memory, one column per context."""
    rows = of_kind(records, "iteration", batch=1)
    stock, loop = (
        {row["context"]: row for row in rows if (row["draft"], row["mode"]) == what}
        for what in ((HF, "sdpa"), (PLAIN, FUSED))
    )
    named: dict[str, Callable[[int], Any]] = {
        "`generate` of transformers, ms per token": lambda at: stock[at]["ms"]["median"],
        "this package without a draft, ms per token": lambda at: loop[at]["ms"]["median"],
        "least time of a step at the measured bandwidth, ms": lambda at: loop[at]["floor_ms"],
        "peak memory of `generate`, GB": lambda at: stock[at]["peak_gb"],
        "peak memory of this package, GB": lambda at: loop[at]["peak_gb"],
    }
    contexts = sorted(set(stock) & set(loop))
    lines = [{"": name, **{f"after {at:,} tokens": f"{of(at):.1f}" for at in contexts}} for name, of in named.items()]
    return table(lines)


def with_drafts(records: Sequence[Record]) -> str:
    """Iterations of drafts in the default mode, and the tau from which each of them is faster."""
    rows = [row for row in of_kind(records, "iteration", mode=FUSED) if row["draft"] != PLAIN and _steps(records, row)]
    columns: dict[str, Column] = {
        "draft": "draft",
        "tokens before": lambda row: f"{row['context']:,}",
        "rows": "batch",
        "nodes": "nodes",
        "iteration, ms": lambda row: f"{row['ms']['median']:.1f}",
        "faster than no draft if tau is above": lambda row: _number(_steps(records, row)),
    }
    if of_kind(records, "iteration", draft=HF):
        columns["faster than `generate` if tau is above"] = lambda row: _number(_over(records, row, HF, "sdpa"))
    return table(rows, columns)


def fill(records: Sequence[Record], text: str) -> str:
    """Write the speeds on the bundled target into the columns of a table that begin with "H100"."""
    speeds = {row["method"]: row.get(FUSED, row.get("stock")) for row in of_kind(records, "pair")}
    over = {"x `generate`": speeds[HF], "x no draft": speeds[PLAIN]}

    def cell(kind: str, heading: str) -> str | None:
        base = next((base for end, base in over.items() if heading.startswith("H100") and heading.endswith(end)), None)
        speed = speeds.get(PLAIN if kind == "Plain" else CLASSES.get(kind, kind))
        return None if base is None else f"{speed / base:.2f}" if speed else ""

    return fill_table(text, cell)


PARTS: dict[str, Callable[[Sequence[Record]], str]] = {
    "without a draft": without_draft,
    "drafts": with_drafts,
    "floors": lambda records: table(
        [row for row in of_kind(records, "iteration") if "floor_steps" in row],
        {
            "draft": "draft",
            "iteration, ms": lambda row: f"{row['ms']['median']:.1f}",
            "plain steps": lambda row: _number(_steps(records, row)),
            "at least, plain steps": lambda row: _number(row["floor_steps"]),
        },
    ),
}


def _over(records: Sequence[Record], row: Record, draft: str, mode: str) -> float | None:
    """An iteration over one of another method at the same batch and context; None if that is not measured."""
    base = of_kind(records, "iteration", draft=draft, mode=mode, batch=row["batch"], context=row["context"])
    return ratio(row["ms"]["median"], base[0]["ms"]["median"]) if base else None


def _steps(records: Sequence[Record], row: Record) -> float | None:
    return _over(records, row, PLAIN, row["mode"])


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _ms(summary: dict[str, Any]) -> str:
    return range_of(summary, 3) if "low" in summary else f"{summary['median']:g}"
