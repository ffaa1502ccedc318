"""Rows, tables and plots from the records of one measured matrix."""

import re
import statistics
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from hf_longspec.bench.calls import HF, PLAIN
from hf_longspec.bench.plots import plot_all
from hf_longspec.bench.report import matrix_report, rows_of
from hf_longspec.bench.results import of_kind
from hf_longspec.modeling.register_draft import weightless_drafts

ROOT = Path(__file__).resolve().parents[2]
PNG = b"\x89PNG\r\n\x1a\n"
TWO_ROWS, WINDOW = "specattn, selection=two_rows", "specattn, selection=window"


def calls_of(records, row):
    """The calls of a row, by turn, found without it."""
    own = of_kind(records, "run", method=row["method"], context=row["context"])
    return sorted(own, key=lambda run: run["turn"])


def speeds_of(records, row):
    return [run["tokens"] / run["decode_seconds"] for run in calls_of(records, row)]


def test_rows_are_medians_over_turns_and_ratios_within_them(records):
    for number, record in enumerate(of_kind(records, "run")):
        record["decode_seconds"] = 1.0 + number % 7  # turns of different speed
    rows = rows_of(records)
    assert [row["method"] for row in rows][:2] == [HF, PLAIN] and len(rows) == 9
    assert {row["text"] for row in rows} == {"reference", "identical"}
    for row in rows:
        own, speeds = calls_of(records, row), speeds_of(records, row)
        assert row["tokens_per_second"]["median"] == pytest.approx(statistics.median(speeds), rel=1e-3)
        assert row["tau"] == pytest.approx(sum(r["tokens"] for r in own) / sum(r["steps"] for r in own), rel=1e-3)
        base = next(r for r in rows if r["method"] == PLAIN and r["context"] == row["context"])
        ratios = [a / b for a, b in zip(speeds, speeds_of(records, base), strict=True)]
        found = row["ratio_to_plain"]
        assert (found["low"], found["high"]) == (
            pytest.approx(min(ratios), rel=1e-3),
            pytest.approx(max(ratios), rel=1e-3),
        )


def test_settings_are_rows_with_differences_turn_by_turn(records):
    rows = {row["method"]: row for row in rows_of(records) if row["context"] == 40}
    pairs = zip(calls_of(records, rows[TWO_ROWS]), calls_of(records, rows[WINDOW]), strict=True)
    gaps = [b["tokens"] / b["steps"] - a["tokens"] / a["steps"] for a, b in pairs]
    assert rows[WINDOW]["tau_difference"]["mean"] == pytest.approx(statistics.fmean(gaps), abs=1e-3)
    assert rows[TWO_ROWS]["tau_difference"] is None and "tau_difference" not in rows[PLAIN]
    assert "## Settings: 40 tokens, batch 1, float32, greedy" in matrix_report(records)


def test_the_options_that_run_the_methods_of_the_papers_exist():
    page, drafts = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8"), weightless_drafts()
    commands = re.findall("`(--(?:draft|assistant) [^`]+)`", page.partition("## Systems of the papers")[2])
    assert len(commands) > 6
    for command in commands:
        words = command.split()
        options = dict(zip(words[::2], words[1::2], strict=True))
        name, setting = options.get("--draft", "FOLDER"), options.get("--sweep")
        assert name == "FOLDER" or name in drafts
        assert setting is None or setting.partition("=")[0] in drafts[name].settings


LONG_NAME = "specattn, selection=last_accepted, num_assistant_tokens=6, sparse_ratio=0.15"


def test_plots_are_pictures_with_labels_inside(records, tmp_path, monkeypatch):
    for record in records:
        if record.get("method") == WINDOW:
            record["method"] = LONG_NAME
    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k)))
    paths = plot_all(records, tmp_path / "b")
    assert [path.name for path in paths] == ["b-speed.png", "b-tau.png", "b-depth.png"]
    assert all(path.read_bytes().startswith(PNG) and path.stat().st_size > 10_000 for path in paths)
    for figure in figures:
        box, legend = figure.get_tightbbox().transformed(figure.dpi_scale_trans), figure.legends[0].get_window_extent()
        assert box.x0 <= legend.x0 and legend.x1 <= box.x1 and box.y0 <= legend.y0
        axes = figure.axes[0]
        assert axes.get_xlabel() and axes.get_ylabel() and axes.get_title()
        assert legend.y1 < axes.xaxis.label.get_window_extent().y0
        names = {text.get_text() for text in figure.legends[0].get_texts()}
        assert names == {name for panel in figure.axes for name in panel.get_legend_handles_labels()[1]}
    assert plot_all(records[:1], tmp_path / "none") == []
