"""Write the tables of result files into a page, between `<!-- bench:start -->` and `<!-- bench:end -->`.

python -m hf_longspec.bench.tables benchmarks/results/longspec.jsonl --page docs/longspec.md
python -m hf_longspec.bench.tables benchmarks/results/engine.jsonl --summary README.md --figure docs/images/speed.svg
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from .report_parts import environment_line, note, of_kind
from .reports import HEADLINES
from .results import Record, read_records
from .summary import speed_figure, summary

START, END = "<!-- bench:start -->", "<!-- bench:end -->"


def section(records: Sequence[Record]) -> tuple[str, str]:
    """Name of the benchmark, and its headline table with a note and the environment below it.

    Raises:
        ValueError: If the records are of no known benchmark.
    """
    found = of_kind(records, "environment")
    name = found[0].get("benchmark") if found else None
    if name not in HEADLINES:
        raise ValueError(f"benchmark {name!r}: expected one of {', '.join(HEADLINES)}. Is this a result file?")
    title, table = HEADLINES[name]
    return name, "\n\n".join([f"### {title}", table(records), note(records), environment_line(records)])


def replace_between(text: str, content: str) -> str:
    """`text` with everything between the two markers replaced.

    Raises:
        ValueError: If a marker is missing or they are in the wrong order.

    >>> print(replace_between("a <!-- bench:start --> old <!-- bench:end --> z", "new"))
    a <!-- bench:start -->
    <BLANKLINE>
    new
    <BLANKLINE>
    <!-- bench:end --> z
    """
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"the text has no {START} followed by {END}. Put both on lines of their own.")
    return f"{before}{START}\n\n{content}\n\n{END}{after}"


def write_between(page: Path, content: str) -> None:
    """Replace what stands between the markers of a file."""
    page.write_text(replace_between(page.read_text(encoding="utf-8"), content), encoding="utf-8")


def write_tables(results: Sequence[Path], page: Path) -> list[str]:
    """Put the tables of the result files into `page`, in the order of `HEADLINES`; returns what was written."""
    order = list(HEADLINES)
    sections = sorted((section(read_records(path)) for path in results), key=lambda found: order.index(found[0]))
    write_between(page, "\n\n".join(text for _, text in sections))
    return [name for name, _ in sections]


def engine_records(results: Sequence[Path]) -> list[Record]:
    """The records of the one file of decoding speeds among `results`.

    Raises:
        ValueError: If there is none, or more than one.
    """
    found = [records for records in map(read_records, results) if section(records)[0] == "engine"]
    if len(found) != 1:
        raise ValueError(f"{len(found)} results of engine.py: expected one for --summary and --figure. Pass its file.")
    return found[0]


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="result files, .jsonl")
    parser.add_argument("--page", "--readme", type=Path, help="Markdown file that gets the tables of all results")
    parser.add_argument("--summary", type=Path, help="Markdown file that gets a compact table of decoding speeds")
    parser.add_argument("--figure", type=Path, help="picture of decoding speeds, .svg or .png; needs matplotlib")
    args = parser.parse_args(arguments)
    if not (args.page or args.summary or args.figure):
        parser.error("nothing to write. Pass --page, --summary or --figure.")
    try:
        if args.page:
            print(f"{args.page}: {', '.join(write_tables(args.results, args.page))}")
        if args.summary:
            write_between(args.summary, summary(engine_records(args.results)))
            print(f"{args.summary}: summary")
        if args.figure:
            speed_figure(engine_records(args.results), args.figure)
            print(args.figure)
    except (ImportError, OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
