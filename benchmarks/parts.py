"""What only the benchmarks of the repository share: the page of a report, ratios within turns, batches of prompts."""

from collections.abc import Sequence

from hf_longspec.bench.markdown import environment_line, with_defaults
from hf_longspec.bench.results import Record, of_kind
from hf_longspec.bench.summaries import summarize


def report_page(title: str, note: str, parts: Sequence[str], records: Sequence[Record]) -> str:
    """A whole report: the environment, how to read the numbers, the parts, what was left out."""
    head = [f"# {title}", environment_line(records), with_defaults(note, records)]
    return "\n\n".join([*head, *parts, *left_out(records)]) + "\n"


def left_out(records: Sequence[Record]) -> list[str]:
    """List what was not measured, one line per reason."""
    reasons: dict[str, list[str]] = {}
    for record in of_kind(records, "skipped"):
        values = [value for name, value in record.items() if name not in ("kind", "reason", "options")]
        values += [f"{name}={value}" for name, value in record.get("options", {}).items()]
        reasons.setdefault(record["reason"], []).append(" ".join(map(str, values)))
    lines = [f"- {reason}: {'; '.join(what)}" for reason, what in reasons.items()]
    return ["Left out:\n\n" + "\n".join(lines)] if lines else []


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> dict[str, float]:
    """Summary of the ratios of values that were measured side by side.

    >>> ratios([2.0, 4.0, 9.0], [1.0, 2.0, 3.0])["median"]
    2.0
    """
    return summarize([a / b for a, b in zip(numerators, denominators, strict=True)])


def row_windows(num_prompts: int, batch: int, repeats: int) -> Sequence[slice]:
    """Choose the prompts that make up the batch of each repeat: all of them in turn.

    >>> row_windows(4, 3, repeats=3)
    [slice(0, 3, None), slice(1, 4, None), slice(0, 3, None)]
    """
    starts = [(repeat * batch) % (num_prompts - batch + 1) for repeat in range(repeats)]
    return [slice(start, start + batch) for start in starts]
