"""Write the tables of result files into README, between `<!-- bench:start -->` and `<!-- bench:end -->`.

python -m hf_longspec.bench.tables benchmarks/results/*.jsonl --readme README.md
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from .report_parts import environment_line, note, of_kind
from .reports import HEADLINES
from .results import Record, read_records

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


def write_tables(results: Sequence[Path], readme: Path) -> list[str]:
    """Put the tables of the result files into `readme`, in the order of `HEADLINES`; returns what was written."""
    order = list(HEADLINES)
    sections = sorted((section(read_records(path)) for path in results), key=lambda found: order.index(found[0]))
    text = replace_between(readme.read_text(encoding="utf-8"), "\n\n".join(text for _, text in sections))
    readme.write_text(text, encoding="utf-8")
    return [name for name, _ in sections]


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="result files, .jsonl")
    parser.add_argument("--readme", type=Path, default=Path("README.md"), help="default: %(default)s")
    args = parser.parse_args(arguments)
    try:
        names = write_tables(args.results, args.readme)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(f"{args.readme}: {', '.join(names)}")


if __name__ == "__main__":
    main()
