"""Write the tables of result files into a page, between `<!-- bench:start -->` and `<!-- bench:end -->`.

python -m benchmarks.tables benchmarks/results/longspec.jsonl --page docs/longspec.md
python -m benchmarks.tables benchmarks/results/engine.jsonl --summary README.md --figure docs/images/speed.svg
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages import COMPILED, PAGES, Page, best_of_cells, kinds_of
from hf_longspec.bench.calls import HF, PLAIN
from hf_longspec.bench.markdown import environment_line, table, with_defaults
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


def write_between(page: Path, content: str) -> None:
    """Replace the text between the markers of a file."""
    page.write_text(replace_between(page.read_text(encoding="utf-8"), content), encoding="utf-8")


def engine_records(results: Sequence[Path]) -> list[Record]:
    """The records of the one file of decoding speeds among `results`.

    Raises:
        ValueError: If there is none, or more than one.
    """
    found = [records for records in map(read_records, results) if section(records)[0] == "engine"]
    if len(found) != 1:
        raise ValueError(f"{len(found)} results of engine.py: expected one for --summary and --figure. Pass its file.")
    return found[0]


CONTEXTS = 2  # of the table: the longest
MODES = {"greedy": "greedy", "sample": "sampled"}
DTYPES = {"bfloat16": "bf16", "float32": "fp32"}
# Methods of this package, for README; the others are in the long table.
OURS = (PLAIN, "SpecAttn", "LongSpec", "TokenSwift", "n-grams")
COLOURS = {HF: "black", PLAIN: "tab:gray", "SpecAttn": "tab:blue", "LongSpec": "tab:orange"}
COLOURS |= {"TokenSwift": "tab:green", "n-grams": "tab:purple"}


def summary(records: Sequence[Record]) -> str:
    """Table of the longest contexts at the smallest batch, with its note."""
    kinds = [kind for kind in kinds_of(records) if kind.removesuffix(COMPILED) in OURS]
    columns: dict[str, Any] = {
        "prompt": lambda row: f"{row['at'][1]:,}",
        "dtype": lambda row: DTYPES.get(row["at"][0], row["at"][0]),
        "text": lambda row: MODES[row["at"][3]],
        "`generate`, tokens/s": lambda row: f"{row[HF]['tokens_per_second']['median']:.0f}" if HF in row else "",
    }
    columns |= {kind: lambda row, kind=kind: _ratio(row, kind, kinds) for kind in kinds}
    rows: list[Record] = [{"at": at, **best} for at, best in _shown(records).items()]
    return "\n\n".join([table(rows, columns), _reading(records)])


def _ratio(row: Record, kind: str, kinds: Sequence[str]) -> str:
    """The ratio of a kind to `generate`; bold if it is the highest of the row."""
    ratios = {name: row[name]["ratio_to_hf"]["median"] for name in kinds if name in row}
    shown = f"{ratios[kind]:.2f}x" if kind in ratios else ""
    return f"**{shown}**" if shown and ratios[kind] == max(ratios.values()) else shown


def _reading(records: Sequence[Record]) -> str:
    found = of_kind(records, "environment")[0]
    settings = found["settings"]
    return (
        "Ratios are to `generate`, taken within a repeat; plain loop: this package without a draft. "
        f"{settings['target']}, batch "
        f"{_smallest_batch(records)}, {settings['tokens']} tokens, medians of {settings['repeats']} interleaved "
        f"repeats, each draft with its fastest setting, the fastest ratio of a row in bold. "
        f"{found['cpu']}, {found['threads']} thread{'s' * (found['threads'] > 1)}, load average "
        f"{found['load_average']} at the start, torch {found['torch']}, transformers {found['transformers']}, commit "
        f"{found['commit']}, {found['date']}."
    )


def _shown(records: Sequence[Record]) -> dict[Any, dict[str, Record]]:
    """The cells of the table: shorter context first, then by dtype and by way to choose tokens."""
    cells = best_of_cells(records)
    contexts = sorted({cell[1] for cell in cells})[-CONTEXTS:]
    kept = [cell for cell in cells if cell[1] in contexts and cell[2] == _smallest_batch(records)]
    return {cell: cells[cell] for cell in sorted(kept, key=lambda cell: (cell[1], cell[0], cell[3]))}


def _smallest_batch(records: Sequence[Record]) -> int:
    return min(row["batch"] for row in of_kind(records, "decoding"))


def speed_figure(records: Sequence[Record], path: Path) -> None:
    """Draw decoding speed versus context, one panel per dtype and way to choose tokens, to `path` (.svg or .png).

    The file's metadata names the environment of the results; the same results give the same file.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cells = {cell: best for cell, best in best_of_cells(records).items() if cell[2] == _smallest_batch(records)}
    dtypes = sorted({cell[0] for cell in cells})
    modes = [mode for mode in MODES if any(cell[3] == mode for cell in cells)]
    figure = Figure(figsize=(4.3 * len(modes), 2.9 * len(dtypes) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(dtypes), len(modes), squeeze=False, sharey="row")
    for line, dtype in zip(panels, dtypes, strict=True):
        for panel, mode in zip(line, modes, strict=True):
            _panel(panel, {cell[1]: best for cell, best in cells.items() if (cell[0], cell[3]) == (dtype, mode)})
            panel.set_title(f"{dtype}, {MODES[mode]}", fontsize=10)
        line[0].set_ylabel("tokens/s")
    labelled = {
        name: handle for panel in panels.flat for handle, name in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(labelled.values(), labelled.keys(), loc="outside lower center", ncols=4, fontsize=9)
    # a fixed salt and no date: the same results give the same file
    with matplotlib.rc_context({"svg.hashsalt": "hf_longspec", "svg.fonttype": "path"}):
        described = {"Title": "Decoding speed", "Description": environment_line(records)}
        figure.savefig(path, dpi=110, metadata=described | ({"Date": None} if path.suffix == ".svg" else {}))


def _panel(panel: Any, by_context: dict[int, dict[str, Record]]) -> None:
    kinds = dict.fromkeys(kind for best in by_context.values() for kind in best)
    for kind in kinds:
        if kind != HF and kind.removesuffix(COMPILED) not in OURS:
            continue
        places = sorted(context for context, best in by_context.items() if kind in best)
        speeds = [by_context[context][kind]["tokens_per_second"]["median"] for context in places]
        colour = COLOURS[kind.removesuffix(COMPILED)]
        compiled = kind.endswith(COMPILED)
        style = {"linestyle": "-" if compiled or kind == HF else "--", "marker": "o" if compiled else "s"}
        label = "generate" if kind == HF else kind
        panel.plot(places, speeds, label=label, color=colour, markersize=4, **style)
    panel.set_xscale("log", base=2)
    panel.set_xticks(sorted(by_context), [f"{context:,}" for context in sorted(by_context)])
    panel.minorticks_off()
    panel.margins(x=0.08)
    panel.set_ylim(bottom=0)
    panel.set_xlabel("prompt, tokens")
    panel.grid(alpha=0.3)


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="result files, .jsonl")
    parser.add_argument("--page", "--readme", type=Path, help="Markdown file that gets the tables of all results")
    parser.add_argument("--summary", type=Path, help="Markdown file that gets a compact table of decoding speeds")
    parser.add_argument("--reports", action="store_true", help="write the report beside each result file anew")
    parser.add_argument("--figure", type=Path, help="picture of decoding speeds, .svg or .png; needs matplotlib")
    args = parser.parse_args(arguments)
    if not (args.page or args.summary or args.figure or args.reports):
        parser.error("nothing to write. Pass --page, --summary, --figure or --reports.")
    try:
        for path in args.results if args.reports else ():
            records = read_records(path)
            path.with_suffix(".md").write_text(page_of(records)[1].report(records), encoding="utf-8")
        if args.page:
            sections = [section(read_records(path)) for path in args.results]
            sections.sort(key=lambda found: list(PAGES).index(found[0]))
            write_between(args.page, "\n\n".join(text for _, text in sections))
            print(f"{args.page}: {', '.join(name for name, _ in sections)}")
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
