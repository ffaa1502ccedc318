"""Write the tables of result files into a page, between `<!-- bench:start -->` and `<!-- bench:end -->`.

python -m benchmarks.tables benchmarks/results/figure.jsonl --page docs/results.md
python -m benchmarks.tables benchmarks/results/*.jsonl --reports
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.pages import PAGES, Page
from hf_longspec.bench.markdown import environment_line, with_defaults
from hf_longspec.bench.results import Record, of_kind, read_records

START, END = "<!-- bench:start -->", "<!-- bench:end -->"


def page_of(records: Sequence[Record]) -> tuple[str, Page]:
    """Name of the benchmark, and how its results are shown.

    Raises:
        ValueError: If the records are of no known benchmark.
    """
    found = of_kind(records, "environment")
    name = found[0].get("benchmark") if found else None
    if name not in PAGES:
        raise ValueError(f"benchmark {name!r}: expected one of {', '.join(PAGES)}. Is this a result file?")
    return name, PAGES[name]


def section(records: Sequence[Record]) -> tuple[str, str]:
    """Name of the benchmark, and its headline table with a note and the environment below it."""
    name, page = page_of(records)
    parts = [f"### {page.title}", page.headline(records), with_defaults(page.note, records), environment_line(records)]
    return name, "\n\n".join(parts)


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


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="result files, .jsonl")
    parser.add_argument("--page", "--readme", type=Path, help="Markdown file that gets the tables of all results")
    parser.add_argument("--reports", action="store_true", help="write the report beside each result file anew")
    args = parser.parse_args(arguments)
    if not (args.page or args.reports):
        parser.error("nothing to write. Pass --page or --reports.")
    try:
        for path in args.results if args.reports else ():
            records = read_records(path)
            path.with_suffix(".md").write_text(page_of(records)[1].report(records), encoding="utf-8")
        if args.page:
            sections = [section(read_records(path)) for path in args.results]
            sections.sort(key=lambda found: list(PAGES).index(found[0]))
            page = args.page.read_text(encoding="utf-8")
            content = "\n\n".join(text for _, text in sections)
            args.page.write_text(replace_between(page, content), encoding="utf-8")
            print(f"{args.page}: {', '.join(name for name, _ in sections)}")
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
