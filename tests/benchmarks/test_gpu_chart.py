"""The chart of a GPU: measured bars are those of the table, the others are labelled by the tau that they assume."""

from pathlib import Path

import pytest

from benchmarks import gpu_chart
from benchmarks.gpu_report import without_draft
from hf_longspec.cli.files import read_records

PROJECT = Path(__file__).resolve().parents[2]
RECORDS = read_records(PROJECT / "benchmarks" / "results" / "gpu.jsonl")


def test_bars_are_those_of_the_table_and_the_rest_says_what_it_assumes(tmp_path):
    shown = gpu_chart.bars(RECORDS, 32768)
    lines = without_draft(RECORDS).splitlines()
    cells = [float(line.split("|")[2]) for line in lines if "ms per token" in line]
    assert cells == pytest.approx([ms for _, ms, _, is_measured in shown if is_measured], abs=0.05)
    assumed = {label: ms for label, ms, _, is_measured in shown if not is_measured}
    iterations = {label: round(ms * int(label[-1]), 2) for label, ms in assumed.items()}
    expected = {f"LongSpec, if tau is {tau}": 15.76 for tau in (2, 3, 4)}  # of the report
    assert iterations == expected | {f"SpecAttn, if tau is {tau}": 51.0 for tau in (4, 6)}
    other = (PROJECT / "docs" / "images" / "drafts.svg").read_text()
    colours = {label.split(",")[0]: colour for label, _, colour, is_measured in shown if not is_measured}
    assert colours.keys() == set(gpu_chart.ASSUMED) and all(
        f"stroke: {one.lower()}" in other for one in colours.values()
    )
    gpu_chart.draw(RECORDS, tmp_path / "gpu.svg")
    assert (tmp_path / "gpu.svg").stat().st_size > 1000
