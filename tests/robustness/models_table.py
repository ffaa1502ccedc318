"""Run every draft on every decoder of transformers, and write what came of it into docs/models.md.

    python -m tests.robustness.models_table --page docs/models.md

`make models` does this in some minutes. Without `--page` it prints the summary of the installed transformers alone.
"""

import argparse
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.robustness.enumeration import DRAFTS, TYPES, Unbuildable, outcomes, quiet, stock_of

START, END = "<!-- models:start -->", "<!-- models:end -->"

# Column: the drafts that it is about.
COLUMNS = {
    "n-grams": ("tree", "ngram", "recycling"),
    "SpecAttn": ("specattn",),
    "Quest": ("quest",),
    "draft model": ("assistant",),
    "EAGLE-3": ("eagle3",),
    "LongSpec": ("longspec",),
    "TokenSwift": ("tokenswift", "partial"),
}


def outcomes_of(model_type: str) -> dict[str, Any]:
    """`{"unbuildable": reason}`, or for every draft the worst outcome of its batches: kind and detail.

    `one row` says that a draft runs on one prompt and is refused on prompts of different lengths.
    """
    try:
        stock = stock_of(model_type)
    except Unbuildable as error:
        return {"unbuildable": str(error)}
    worst: dict[str, tuple[str, str]] = {}
    for kind, _, outcome in outcomes(stock):
        if outcome.kind != "identical" or kind not in worst:
            found = "one row" if outcome.kind == "refused" and worst.get(kind) == ("identical", "") else outcome.kind
            worst[kind] = found, outcome.detail
    return worst


def status(row: dict[str, Any]) -> str:
    """`identical` (every draft), `in part` (some drafts), `refused`, `unbuildable` or `failed`."""
    if "unbuildable" in row:
        return "unbuildable"
    kinds = {row[draft][0] for draft in DRAFTS}
    if not kinds <= {"identical", "one row", "refused"}:
        return "failed"
    return "in part" if len(kinds) > 1 or "one row" in kinds else kinds.pop()


def summary(rows: dict[str, dict[str, Any]]) -> str:
    """One line: how many types of which status."""
    counts = Counter(map(status, rows.values()))
    failed = f", {counts['failed']} fail" if counts["failed"] else ""
    return (
        f"transformers {transformers.__version__}, {len(rows)} types: {counts['identical']} run under every draft, "
        f"{counts['in part']} under some, {counts['refused']} are refused, {counts['unbuildable']} cannot be built or "
        f"run by transformers itself{failed}."
    )


def table(rows: dict[str, dict[str, Any]]) -> str:
    """The types of which something is not possible, and the others in one paragraph."""
    whole = ", ".join(f"`{name}`" for name, row in rows.items() if status(row) == "identical")
    lines = [summary(rows), "", f"Every draft runs on: {whole}.", "", _line(["type", *COLUMNS, "reason"])]
    lines.append(_line(["---"] * (len(COLUMNS) + 2)))
    for name, row in rows.items():
        if status(row) != "identical":
            lines.append(_line([f"`{name}`", *_cells(row)]))
    return "\n".join(lines)


def _cells(row: dict[str, Any]) -> list[str]:
    if "unbuildable" in row:
        return [*[""] * len(COLUMNS), "transformers cannot build or run it by its default settings"]
    marks, reasons = [], []
    for drafts in COLUMNS.values():
        others = [row[draft] for draft in drafts if row[draft][0] != "identical"]
        mark = "one row" if {"one row"} == {kind for kind, _ in others} else {0: "yes", len(drafts): "no"}
        marks.append(mark if isinstance(mark, str) else mark.get(len(others), "in part"))
        reasons += [detail if kind in ("refused", "one row") else f"**{kind}**" for kind, detail in others]
    if marks[0] == "no":  # for one reason that holds for every draft
        del reasons[1:]
    return [*marks, "; ".join(dict.fromkeys(reasons))]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Run what is missing, print the summary, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", type=Path, help="page whose table between the marks is written anew")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with quiet():
        rows = {name: outcomes_of(name) for name in TYPES}
    print(summary(rows))
    if arguments.page is not None:
        text = arguments.page.read_text()
        before, after = text.split(START)[0], text.split(END)[1]
        arguments.page.write_text(f"{before}{START}\n{table(rows)}\n{END}{after}")


if __name__ == "__main__":
    main()
