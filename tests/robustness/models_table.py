"""Run every draft on every decoder of transformers, and write what came of it into docs/models.md.

    TRITON_INTERPRET=1 python -m tests.robustness.models_table --page docs/models.md

`make models` does this in some minutes. Without `--page` it prints the summary of the installed transformers alone.
With `--lists` it runs nothing, and writes only what follows from the code of the drafts.
"""

import argparse
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING

from hf_longspec import Eagle3DraftModel
from hf_longspec.modeling.mtp.convert_mtp import FAMILIES, REFUSED
from hf_longspec.modeling.register_draft import DRAFTS as REGISTERED
from hf_longspec.modeling.shared.aux_hidden_states import AuxDraftModel
from tests.robustness.enumeration import DRAFTS, TYPES, Unbuildable, outcomes, quiet, stock_of

MARKS = "<!-- {}:start -->", "<!-- {}:end -->"

# Column: the drafts that it is about.
COLUMNS = {
    "n-grams": ("tree", "ngram"),
    "SpecAttn": ("specattn",),
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
    """The types of which something is not possible: those that run under some drafts, and those that are refused."""
    some, refused, unbuildable = (
        {name: row for name, row in rows.items() if status(row) in kinds}
        for kinds in (("in part", "failed"), ("refused",), ("unbuildable",))
    )
    lines = [summary(rows), ""]
    lines += [_line(["types", *COLUMNS, "reason"]), _line(["---"] * (len(COLUMNS) + 2))]
    lines += [_line([names, *cells]) for cells, names in _grouped({name: _cells(some[name]) for name in some})]
    lines += ["", _line(["refused types", "reason"]), _line(["---"] * 2)]
    lines += [_line([names, cells[-1]]) for cells, names in _grouped({name: _cells(refused[name]) for name in refused})]
    if unbuildable:
        names = ", ".join(f"`{name}`" for name in unbuildable)
        lines += ["", f"transformers cannot build or run these by their default settings: {names}."]
    return "\n".join(lines)


def lists() -> str:
    """The types with MTP layers that are read, those that are refused, and where auxiliary hidden states are read."""
    lines = [_line(["MTP layers named as in", "types of published checkpoints"]), _line(["---"] * 2)]
    for name, family in FAMILIES.items():
        types = (f"`{kind}`" + ("" if kind in CONFIG_MAPPING else " (code of its own)") for kind in family.types)
        lines.append(_line([name, ", ".join(types)]))
    lines.append("")
    for reason in dict.fromkeys(REFUSED.values()):
        starts = " or ".join(f"`{start}`" for start, why in REFUSED.items() if why == reason)
        lines.append(f"A type that begins with {starts} is refused, as {reason}.")
    others = (draft.model for draft in REGISTERED.values() if issubclass(draft.model, AuxDraftModel))
    names = ", ".join(f"`{model.__name__}`" for model in others if model is not Eagle3DraftModel)
    lines += ["", f"{names} reads the inputs of layers as `Eagle3DraftModel` does: the column EAGLE-3 holds for both."]
    return "\n".join(lines)


def between(text: str, name: str) -> tuple[str, str, str]:
    """Split a page at the marks of this name: the part before the text between them, the text, and the part after."""
    start, end = (mark.format(name) for mark in MARKS)
    before, rest = text.split(f"{start}\n")
    found, after = rest.split(f"\n{end}")
    return f"{before}{start}\n", found, f"\n{end}{after}"


def _grouped(cells: dict[str, list[str]]) -> list[tuple[tuple[str, ...], str]]:
    """The different lines of cells, each with the types that have it."""
    types: dict[tuple[str, ...], list[str]] = {}
    for name, line in cells.items():
        types.setdefault(tuple(line), []).append(f"`{name}`")
    return [(line, ", ".join(names)) for line, names in types.items()]


def _cells(row: dict[str, Any]) -> list[str]:
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
    parser.add_argument("--page", type=Path, help="page whose parts between the marks are written anew")
    parser.add_argument("--lists", action="store_true", help="run nothing, and write the lists alone")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    parts = {"lists": lists()}
    if not arguments.lists:
        with quiet():
            rows = {name: outcomes_of(name) for name in TYPES}
        print(summary(rows))
        parts["models"] = table(rows)
    if arguments.page is not None:
        text = arguments.page.read_text()
        for name, part in parts.items():
            before, _, after = between(text, name)
            text = f"{before}{part}{after}"
        arguments.page.write_text(text)


if __name__ == "__main__":
    main()
