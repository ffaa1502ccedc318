"""Plots of the results of `hf-longspec bench`: speed and tau versus context, acceptance by depth."""

import io
import math
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from .calls import HF, PLAIN
from .report import FAILED, rows_of, title_of
from .results import Record, grouped, plot_beside, replace_file

PANEL_INCHES = (5.2, 3.9)
COLUMNS = 3
# In the legend below the panels; a handle with its margins is as wide as some letters.
LEGEND_POINTS, LETTERS_PER_INCH, HANDLE_LETTERS = 9, 13, 8
# Points of one context lie this factor apart, so that their spreads do not overlap.
SPACING = 1.012


def plot_all(records: Sequence[Record], results: Path) -> list[Path]:
    """Write the plots that have something to show; returns their files."""
    rows = [row for row in rows_of(records) if row["text"] not in FAILED]
    if not rows:
        return []
    timed = [row for row in rows if "tokens_per_second" in row]
    plotted = {
        "speed": timed,
        "tau": [row for row in timed if row["method"] not in (HF, PLAIN)],
        "depth": [row for row in rows if row["acceptance_by_depth"]],
    }
    colours = _colours(rows)
    return [_plot(kind, rows, colours, results) for kind, rows in plotted.items() if rows]


_LABELS = {
    "speed": ("prompt, tokens", "decoding, tokens/s (all rows)"),
    "tau": ("prompt, tokens", "tau, tokens per verification"),
    "depth": ("depth of the drafted token", "accepted, of those reached"),
}


def _plot(kind: str, rows: Sequence[Record], colours: Mapping[str, Any], results: Path) -> Path:
    """One line per method; a panel per cell, or, versus the context, per dtype, batch and way to choose tokens."""
    depth = kind == "depth"
    prefix = "prompts of their own length, "
    groups = grouped(rows, title_of if depth else lambda row: title_of(row | {"context": 0}).removeprefix(prefix))
    columns = 2 if len(groups) == 4 else min(COLUMNS, len(groups))
    lines = math.ceil(len(groups) / columns)
    figure, axes = make_panels(lines, columns, (PANEL_INCHES[0] * columns, PANEL_INCHES[1] * lines + 0.3))
    for panel, (title, members) in zip(axes.flat, groups.items(), strict=False):
        methods = grouped(members, lambda row: str(row["method"]))
        ticks: set[float] = set()
        for index, (method, own) in enumerate(methods.items()):
            points = _points(own, kind)
            places, middle = [place for place, *_ in points], [value for _, value, _ in points]
            ticks |= set(places)
            aside = 1.0 if depth else SPACING ** (index - (len(methods) - 1) / 2)
            bars = [
                [max(0.0, way * (part[end] - value)) if part else 0.0 for _, value, part in points]
                for end, way in (("low", -1), ("high", 1))
            ]
            style = {"linestyle": "--"} if method in (HF, PLAIN) else {}
            style |= {"label": method, "color": colours[method], "marker": "o"}
            panel.errorbar([place * aside for place in places], middle, bars, markersize=4, capsize=3, **style)
        if depth:
            panel.set_xticks(range(1, int(max(ticks)) + 1, math.ceil(max(ticks) / 10)))
            panel.set_ylim(0, 1.03)
        else:
            by_context(panel, {tick: f"{tick:g}" for tick in sorted(ticks)})
            panel.set_ylim(bottom=0 if kind == "speed" else 1)
        panel.set(title=title, xlabel=_LABELS[kind][0], ylabel=_LABELS[kind][1])
        panel.grid(alpha=0.3)
    return _save(figure, list(axes.flat), len(groups), plot_beside(results, kind))


def _points(rows: Sequence[Record], kind: str) -> list[tuple[Any, Any, Any]]:
    """Depths or lengths of the prompts, with the value there and its spread or interval, if there is one."""
    if kind == "depth":
        row = rows[0]
        return list(zip(count(1), row["acceptance_by_depth"], row["acceptance_intervals"], strict=False))
    spread, middle = ("tokens_per_second", "median") if kind == "speed" else ("tau_interval", "mean")
    return [
        (row["prompt_tokens"], row[spread][middle] if row[spread] else row["tau"], row[spread])
        for row in sorted(rows, key=lambda row: row["prompt_tokens"])
    ]


def _colours(rows: Sequence[Record]) -> dict[str, Any]:
    """One colour per method, the same in all plots."""
    import matplotlib

    names = list(dict.fromkeys(str(row["method"]) for row in rows))
    palette = matplotlib.colormaps["tab10" if len(names) <= 10 else "tab20"]
    return {name: palette(index % palette.N) for index, name in enumerate(names)}


def make_panels(lines: int, columns: int, inches: tuple[float, float]) -> tuple[Any, Any]:
    """A figure of this size, and its panels."""
    # no pyplot: it keeps figures, and may look for a display
    from matplotlib.figure import Figure

    figure = Figure(inches, layout="constrained")
    return figure, figure.subplots(lines, columns, squeeze=False)


def by_context(panel: Any, ticks: Mapping[float, str]) -> None:
    """Give a panel an axis of contexts, each place twice the one before it."""
    panel.set_xscale("log", base=2)
    panel.set_xticks(list(ticks), list(ticks.values()))
    panel.minorticks_off()


def _save(figure: Any, panels: Sequence[Any], used: int, path: Path) -> Path:
    for panel in panels[used:]:
        panel.set_axis_off()
    labelled = {
        label: handle
        for panel in panels[:used]
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    columns = max(1, int(LETTERS_PER_INCH * figure.get_figwidth() / (max(map(len, labelled)) + HANDLE_LETTERS)))
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "ncols": columns, "fontsize": LEGEND_POINTS}
    figure.legend(labelled.values(), labelled.keys(), **below)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=110, format="png", bbox_inches="tight")
    replace_file(path, picture.getvalue())
    return path
