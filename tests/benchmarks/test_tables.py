"""Tables of result files: committed reports and pages follow from them, and pages keep what is around the tables."""

import json
import shutil
from pathlib import Path

import pytest

from benchmarks.harness import Run
from benchmarks.pages import PAGES
from benchmarks.tables import main, replace_between, section
from hf_longspec.bench.markdown import environment_line, markdown_table
from hf_longspec.bench.results import read_records

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
README = "# Title\n\nbefore\n\n<!-- bench:start -->\nold table\n<!-- bench:end -->\n\nafter\n"


@pytest.fixture
def readme(tmp_path):
    path = tmp_path / "README.md"
    path.write_text(README)
    return path


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.jsonl")), ids=lambda path: path.stem)
def test_the_report_beside_a_result_file_is_made_of_it(file):
    """`python -m benchmarks.tables benchmarks/results/*.jsonl --reports` writes them."""
    records = read_records(file)
    assert PAGES[records[0]["benchmark"]].report(records) == file.with_suffix(".md").read_text(encoding="utf-8")


def test_a_page_gets_all_tables_in_their_order_and_keeps_the_rest(readme, capsys):
    files = [str(RESULTS / f"{name}.jsonl") for name in ("memory", "long", "acceptance", "engine")]
    main([*files, "--readme", str(readme)])
    text = readme.read_text()
    assert text.startswith("# Title\n\nbefore\n\n<!-- bench:start -->\n")
    assert text.endswith("<!-- bench:end -->\n\nafter\n") and "old table" not in text
    order = [name for name in PAGES if name in ("memory", "long", "acceptance", "engine")]
    places = [text.index(section(read_records(RESULTS / f"{name}.jsonl"))[1]) for name in order]
    assert places == sorted(places)
    assert ", ".join(order) in capsys.readouterr().out
    main([*files, "--readme", str(readme)])
    assert readme.read_text() == text


def test_reports_are_written_anew(tmp_path):
    shutil.copy(RESULTS / "offsets.jsonl", tmp_path)
    main([str(tmp_path / "offsets.jsonl"), "--reports"])
    assert (tmp_path / "offsets.md").read_bytes() == (RESULTS / "offsets.md").read_bytes()


@pytest.mark.parametrize("text", ["no markers", "<!-- bench:end --> <!-- bench:start -->"])
def test_missing_markers_are_refused(text):
    with pytest.raises(ValueError, match="bench:start"):
        replace_between(text, "new")


def test_a_file_of_something_else_is_refused(readme, tmp_path, capsys):
    (tmp_path / "other.jsonl").write_text('{"kind": "environment", "benchmark": "kitchen"}\n')
    with pytest.raises(SystemExit):
        main([str(tmp_path / "other.jsonl"), "--readme", str(readme)])
    assert "benchmark 'kitchen': expected one of engine" in capsys.readouterr().err
    assert readme.read_text() == README


def test_a_line_that_was_cut_off_is_dropped(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"kind": "environment"}) + '\n{"kind": "accep')
    assert read_records(path) == [{"kind": "environment"}]


def test_an_interrupted_run_leaves_its_records_and_no_end(tmp_path):
    path = tmp_path / "e.jsonl"

    def run():
        with Run(path, "engine", 60, {"tokens": 4}) as results:
            results.write("ceilings", read_gb_per_second=12.0)
            assert len(read_records(path)) == 2  # flushed line by line
            results.skip("no time", context=2048)
            results.skip("no time", context=8192)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert [record["kind"] for record in read_records(path)] == ["environment", "ceilings", "skipped", "skipped"]
    report = path.with_suffix(".md").read_text()
    assert "The run was not finished" in report
    assert "- no time: 2048; 8192" in report
    assert "12.0 GB/s" in environment_line(read_records(path))


def test_tables_have_one_separator_per_column():
    assert markdown_table(["a", "b", "c"], []).splitlines()[1] == "|---|---|---|"
