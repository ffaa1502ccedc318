"""Write what result files and classes say into the pages, between `<!-- bench:start NAME -->` and `<!-- bench:end -->`.

NAME says which result files: `figure` is the part of its report that documents quote, with a note and its environment,
`figure:LongSpec` the systems whose names begin so, alone. `figure:fill` and `gpu-more:fill` fill columns of the block's
table. `settings:NgramDraftModel` is the table of a draft's own settings, by what its class declares.

    python -m benchmarks.tables                    # README.md and all pages of docs/
    python -m benchmarks.tables --reports          # and the report of each result file
"""

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hf_longspec
from benchmarks import figure_report, gpu_report
from benchmarks.acceptance_card import with_defaults
from benchmarks.pages import PAGES, Page
from benchmarks.records import of_kind, read_records
from benchmarks.report import table
from hf_longspec.cli.files import Record
from hf_longspec.modeling.settings import COMMON, NGRAMS

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
# Settings that a table begins with: how much is drafted.
FIRST = ("num_assistant_tokens", "tree_widths", "tree_branching", "num_tree_nodes")
BLOCK = re.compile(r"(<!-- bench:start (?P<what>[^>]+) -->)(?P<old>.*?)(<!-- bench:end -->)", re.DOTALL)


def page_of(records: Sequence[Record]) -> Page:
    """How the results of a benchmark are shown; ValueError for those of no known benchmark."""
    environments = of_kind(records, "environment")
    name = environments[0].get("benchmark") if environments else None
    if name not in PAGES:
        raise ValueError(f"benchmark {name!r}: expected one of {', '.join(PAGES)}. Is this a result file?")
    return PAGES[name]


def section(records: Sequence[Record]) -> str:
    """The headline table of a benchmark with its title, and a note and the environment below it."""
    page = page_of(records)
    parts = [f"### {page.title}", page.headline(records), with_defaults(page.note, records), page.environment(records)]
    return "\n\n".join(parts)


def settings_table(draft: str) -> str:
    """The settings of a class of drafts, without those of all drafts and of n-grams that join them."""
    cls = getattr(hf_longspec, draft)
    shared = COMMON | (NGRAMS if cls.takes_ngrams else {})
    names = sorted(cls.declared.keys() - shared.keys(), key=[*FIRST, *cls.declared].index)

    def code(value: Any) -> str:
        return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"

    rows = []
    for name in names:
        setting = cls.declared[name]
        on_cpu = "" if setting.on_cpu is None else f", on a CPU {code(setting.on_cpu)}"
        rows.append({"name": name, "default": code(setting.default) + on_cpu, "meaning": setting.meaning})
    return table(rows, {"setting": "`{name}`", "default": "default", "meaning": "meaning"})


def refreshed(path: Path, results: Path = RESULTS) -> str:
    """The text of a page with all its blocks regenerated; ValueError for a block that is not as documented."""

    def block(match: re.Match[str]) -> str:
        parts, filled = [], match["old"]
        for name in match["what"].split():
            file, colon, part = name.partition(":")
            if file == "settings":
                parts.append(settings_table(part))
                continue
            records = read_records(results / f"{file}.jsonl")
            link = os.path.relpath(results / f"{file}.md", path.parent)
            if not colon:
                parts.append(section(records))
            elif part == "fill":
                filled = (gpu_report if file.startswith("gpu") else figure_report).fill(records, filled)
                parts = [filled]
            else:
                page = page_of(records)
                shown = page.about(records, part.replace("_", " ")) if page.about else page.headline(records)
                parts += [shown, f"All numbers: [{file}.md]({link})."]
        return "\n\n".join([match[1], *parts, match[4]])

    text = path.read_text(encoding="utf-8")
    if not len(BLOCK.findall(text)) == text.count("<!-- bench:start") == text.count("<!-- bench:end"):
        raise ValueError(f"{path}: a block begins with <!-- bench:start NAME --> and ends with <!-- bench:end -->.")
    return BLOCK.sub(block, text)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    parser.add_argument("pages", type=Path, nargs="*", default=pages, help="Markdown files (default: README and docs)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    parser.add_argument("--reports", action="store_true", help="also regenerate the report of each result file")
    args = parser.parse_args(arguments)
    try:
        written = {path: refreshed(path, args.results) for path in args.pages}
        for path in args.results.glob("*.jsonl") if args.reports else ():
            records = read_records(path)
            written[path.with_suffix(".md")] = page_of(records).report(records)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    for path, text in written.items():
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(path)


if __name__ == "__main__":
    main()
