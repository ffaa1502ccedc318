"""Tables of result files: reports and pages follow from them, and pages keep what is around a table."""

import shutil
from pathlib import Path

import pytest

from benchmarks.harness import Run
from benchmarks.pages import PAGES
from benchmarks.tables import main, replace_between, section
from hf_longspec.bench.markdown import environment_line
from hf_longspec.bench.report import matrix_report
from hf_longspec.bench.results import read_records

PROJECT = Path(__file__).resolve().parents[2]
RESULTS = PROJECT / "benchmarks" / "results"
PAGE = "# Title\n\nbefore\n\n<!-- bench:start -->\nold table\n<!-- bench:end -->\n\nafter\n"
BEFORE, AFTER = PAGE.split("old table\n")


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    return path


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.jsonl")), ids=lambda path: path.stem)
def test_the_report_beside_a_result_file_is_made_of_it(file):
    """`python -m benchmarks.tables benchmarks/results/*.jsonl --reports` writes them."""
    records = read_records(file)
    name = records[0]["benchmark"]
    report = matrix_report if name == "bench" else PAGES[name].report  # `bench`: of the command line
    assert report(records) == file.with_suffix(".md").read_text(encoding="utf-8")


def test_a_page_gets_all_tables_in_their_order_and_keeps_the_rest(page, capsys):
    files = [str(RESULTS / f"{name}.jsonl") for name in ("memory", "long", "acceptance", "figure")]
    main([*files, "--readme", str(page)])
    text = page.read_text()
    assert text.startswith(BEFORE) and text.endswith(AFTER) and "old table" not in text
    order = [name for name in PAGES if name in ("memory", "long", "acceptance", "figure")]
    places = [text.index(section(read_records(RESULTS / f"{name}.jsonl"))[1]) for name in order]
    assert places == sorted(places)
    assert ", ".join(order) in capsys.readouterr().out
    main([*files, "--readme", str(page)])
    assert page.read_text() == text


def test_reports_are_written_anew(tmp_path):
    shutil.copy(RESULTS / "offsets.jsonl", tmp_path)
    main([str(tmp_path / "offsets.jsonl"), "--reports"])
    assert (tmp_path / "offsets.md").read_bytes() == (RESULTS / "offsets.md").read_bytes()


@pytest.mark.parametrize("text", ["no markers", "<!-- bench:end --> <!-- bench:start -->"])
def test_missing_markers_are_refused(text):
    with pytest.raises(ValueError, match="bench:start"):
        replace_between(text, "new")


def test_an_interrupted_run_leaves_its_records_and_no_end(tmp_path):
    path = tmp_path / "e.jsonl"

    def run():
        with Run(path, "verification", 60, {"tokens": 4}) as results:
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


@pytest.mark.parametrize(
    ("file", "options", "message"),
    [
        (RESULTS / "memory.jsonl", [], "nothing to write"),
        ("{folder}/other.jsonl", ["--page", "{page}"], "benchmark 'kitchen': expected one of figure, verification"),
    ],
    ids=["nothing to write", "something else"],
)
def test_what_cannot_be_written_is_refused(file, options, message, page, tmp_path, capsys):
    (tmp_path / "other.jsonl").write_text('{"kind": "environment", "benchmark": "kitchen"}\n')
    with pytest.raises(SystemExit):
        main([str(file).format(folder=tmp_path), *(option.format(page=page) for option in options)])
    assert message in capsys.readouterr().err
    assert page.read_text() == PAGE


def test_the_committed_page_is_that_of_the_result_files():
    """`make tables` mends it."""
    text = (PROJECT / "docs" / "results.md").read_text(encoding="utf-8")
    written = [section(read_records(RESULTS / f"{name}.jsonl"))[1] for name in ("figure", "verification", "memory")]
    assert replace_between(text, "\n\n".join(written)) == text
