"""Plots of the results of `hf-longspec bench`: speed and tau versus context, acceptance by depth."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .calls import HF, PLAIN
from .report import Row, grouped, rows_of, title_of
from .results import Record

PANEL_INCHES = (5.2, 3.9)
COLUMNS = 3
# Sizes in the legend: of a letter, of a line, and of a handle with its margins.
LEGEND_POINTS, LETTER_INCHES, LINE_INCHES, HANDLE_INCHES = 9, 0.078, 0.2, 0.65
# Points of one context lie this factor apart, so that their spreads do not overlap.
SPACING = 1.012


def plot_all(records: Sequence[Record], stem: Path) -> list[Path]:
    """Write `<stem>-speed.png`, `<stem>-tau.png` and `<stem>-depth.png`, those that have something to show.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    rows = [row for row in rows_of(records) if not row.failed]
    written = [_versus_context(rows, stem, kind) for kind in ("speed", "tau")]
    return [path for path in (*written, _by_depth(rows, stem)) if path is not None]


def _versus_context(rows: Sequence[Row], stem: Path, kind: str) -> Path | None:
    """One panel per dtype, batch and way to choose tokens; a point per context with its spread or interval."""
    kept = [row for row in rows if kind == "speed" or row.method not in (HF, PLAIN)]
    kept = [row for row in kept if row.to_dict().get("tokens_per_second")]
    groups = grouped(
        kept, lambda row: title_of({**row.cell, "context": 0}).removeprefix("prompts of their own length, ")
    )
    if not groups:
        return None
    colours = _colours(rows)
    figure, panels = _figure(len(groups))
    for panel, (title, members) in zip(panels, groups.items(), strict=False):
        lines = grouped(members, lambda row: row.method)
        for index, (method, points) in enumerate(lines.items()):
            aside = SPACING ** (index - (len(lines) - 1) / 2)
            _line(panel, method, colours[method], [row.to_dict() for row in points], kind, aside)
        ticks = sorted({row.to_dict()["prompt_tokens"] for row in members})
        panel.set_xscale("log", base=2)
        panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        panel.minorticks_off()
        panel.set(title=title, xlabel="prompt, tokens", ylabel=_LABELS[kind])
        panel.set_ylim(bottom=0 if kind == "speed" else 1)
        panel.grid(alpha=0.3)
    return _save(figure, panels, len(groups), stem, kind)


_LABELS = {
    "speed": "decoding, tokens/s (all rows)",
    "tau": "tau, tokens per verification",
}


def _line(panel: Any, method: str, colour: Any, points: list[dict[str, Any]], kind: str, aside: float) -> None:
    points = sorted(points, key=lambda values: values["prompt_tokens"])
    spread = [values["tokens_per_second"] if kind == "speed" else values["tau_interval"] for values in points]
    middle = [part["median"] if kind == "speed" else part["mean"] for part in spread]
    below = [value - part["low"] for value, part in zip(middle, spread, strict=True)]
    above = [part["high"] - value for value, part in zip(middle, spread, strict=True)]
    style = {"linestyle": "--"} if method in (HF, PLAIN) else {}
    places = [values["prompt_tokens"] * aside for values in points]
    panel.errorbar(
        places, middle, [below, above], label=method, color=colour, marker="o", markersize=4, capsize=3, **style
    )


def _by_depth(rows: Sequence[Row], stem: Path) -> Path | None:
    """One panel per cell: the share of drafted tokens that is accepted at a depth that was reached."""
    kept = [row for row in rows if row.accepted_by_depth]
    groups = grouped(kept, lambda row: title_of(row.cell))
    if not groups:
        return None
    colours = _colours(rows)
    figure, panels = _figure(len(groups))
    for panel, (title, members) in zip(panels, groups.items(), strict=False):
        deepest = 1
        for row in members:
            shares = row.accepted_by_depth
            deepest = max(deepest, len(shares))
            panel.plot(
                range(1, len(shares) + 1), shares, label=row.method, color=colours[row.method], marker="o", markersize=4
            )
        panel.set_xticks(range(1, deepest + 1, math.ceil(deepest / 10)))
        panel.set(title=title, xlabel="depth of the drafted token", ylabel="accepted, of those reached", ylim=(0, 1.03))
        panel.grid(alpha=0.3)
    return _save(figure, panels, len(groups), stem, "depth")


def _colours(rows: Sequence[Row]) -> dict[str, Any]:
    """One colour per method, the same in all plots."""
    import matplotlib

    names = list(dict.fromkeys(row.method for row in rows))
    palette = matplotlib.colormaps["tab10" if len(names) <= 10 else "tab20"]
    return {name: palette(index % palette.N) for index, name in enumerate(names)}


def _figure(count: int) -> tuple[Any, list[Any]]:
    # no pyplot: it keeps figures, and may look for a display
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = 2 if count == 4 else min(COLUMNS, count)
    lines = math.ceil(count / columns)
    figure = Figure(figsize=(PANEL_INCHES[0] * columns, PANEL_INCHES[1] * lines + 0.3), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(lines, columns, squeeze=False).flat)


def _save(figure: Any, panels: Sequence[Any], used: int, stem: Path, kind: str) -> Path:
    for panel in panels[used:]:
        panel.set_axis_off()
    labelled = {
        label: handle
        for panel in panels[:used]
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    width, height = figure.get_size_inches()
    entry = max(map(len, labelled)) * LETTER_INCHES + HANDLE_INCHES
    width = max(width, entry)
    columns = min(len(labelled), int(width / entry))
    # the legend takes its lines below the panels, not from them
    figure.set_size_inches(width, height + math.ceil(len(labelled) / columns) * LINE_INCHES)
    figure.legend(labelled.values(), labelled.keys(), loc="outside lower center", ncols=columns, fontsize=LEGEND_POINTS)
    path = stem.with_name(f"{stem.name}-{kind}.png")
    figure.savefig(path, dpi=110)
    return path
