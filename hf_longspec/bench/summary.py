"""The results of `engine.py` in a few lines, for README: one compact table, one figure."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .engine import COMPILED, HF, PLAIN
from .engine_best import best_of_cells, kinds_of
from .report_parts import environment_line, markdown_table, of_kind
from .results import Record

CONTEXTS = 2  # of the table: the longest
MODES = {"greedy": "greedy", "sample": "sampled"}
DTYPES = {"bfloat16": "bf16", "float32": "fp32"}
# Methods of this package, which are what README is about; the others are in the long table.
OURS = (PLAIN, "SpecAttn", "LongSpec", "TokenSwift", "n-grams")
COLOURS = {HF: "black", PLAIN: "tab:gray", "SpecAttn": "tab:blue", "LongSpec": "tab:orange"}
COLOURS |= {"TokenSwift": "tab:green", "n-grams": "tab:purple"}


def summary(records: Sequence[Record]) -> str:
    """Table of the longest contexts at the smallest batch, with what it needs to be read."""
    shown = _shown(records)
    kinds = [kind for kind in kinds_of(records) if _family(kind) in OURS]
    lines = []
    for (dtype, context, _, mode), best in shown.items():
        ratios = {kind: best[kind]["ratio_to_hf"]["median"] for kind in kinds if kind in best}
        cells = [
            ("**%.2fx**" if ratios[kind] == max(ratios.values()) else "%.2fx") % ratios[kind] if kind in ratios else ""
            for kind in kinds
        ]
        speed = f"{best[HF]['tokens_per_second']['median']:.0f}" if HF in best else ""
        lines.append([f"{context:,}", DTYPES.get(dtype, dtype), MODES[mode], speed, *cells])
    header = ["prompt", "dtype", "text", "`generate`, tokens/s", *kinds]
    return "\n\n".join([markdown_table(header, lines), _reading(records)])


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


def _family(kind: str) -> str:
    return kind.removesuffix(COMPILED)


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
    labelled = {name: handle for panel in panels.flat for handle, name in _legend(panel)}
    figure.legend(labelled.values(), labelled.keys(), loc="outside lower center", ncols=4, fontsize=9)
    # a fixed salt and no date: the same results give the same file
    with matplotlib.rc_context({"svg.hashsalt": "hf_longspec", "svg.fonttype": "path"}):
        described = {"Title": "Decoding speed", "Description": environment_line(records)}
        figure.savefig(path, dpi=110, metadata=described | ({"Date": None} if path.suffix == ".svg" else {}))


def _panel(panel: Any, by_context: dict[int, dict[str, Record]]) -> None:
    kinds = dict.fromkeys(kind for best in by_context.values() for kind in best)
    for kind in kinds:
        if kind != HF and _family(kind) not in OURS:
            continue
        places = sorted(context for context, best in by_context.items() if kind in best)
        speeds = [by_context[context][kind]["tokens_per_second"]["median"] for context in places]
        colour = COLOURS[_family(kind)]
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


def _legend(panel: Any) -> list[tuple[Any, str]]:
    return list(zip(*panel.get_legend_handles_labels(), strict=True))
