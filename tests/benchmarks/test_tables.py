"""Tables of result files: reports and pages follow from them, and pages keep what is around a table."""

import shutil
from pathlib import Path

import pytest

from benchmarks.harness import Run
from benchmarks.pages import PAGES, best_of_cells, kind_of
from benchmarks.tables import main, replace_between, section
from hf_longspec.bench.markdown import environment_line
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
    assert PAGES[records[0]["benchmark"]].report(records) == file.with_suffix(".md").read_text(encoding="utf-8")


def test_a_page_gets_all_tables_in_their_order_and_keeps_the_rest(page, capsys):
    files = [str(RESULTS / f"{name}.jsonl") for name in ("memory", "long", "acceptance", "engine")]
    main([*files, "--readme", str(page)])
    text = page.read_text()
    assert text.startswith(BEFORE) and text.endswith(AFTER) and "old table" not in text
    order = [name for name in PAGES if name in ("memory", "long", "acceptance", "engine")]
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


def test_the_fastest_setting_is_taken_of_every_kind():
    """The methods that are not ours have no settings, and compiled ones are a kind of their own."""
    cell = {"kind": "decoding", "dtype": "bfloat16", "context": 8192, "batch": 1, "mode": "greedy"}
    ratios = {"hf generate": 0.5, "plain loop": 1.0, "LongSpec, 1+1": 0.7, "LongSpec, 4+4": 0.8, "hf assisted": 0.9}
    ratios |= {"LongSpec, 2+2": 0.6, "LongSpec, 1+1, compiled": 0.9}
    rows = [cell | {"method": method, "ratio_to_plain": {"median": ratio}} for method, ratio in ratios.items()]
    rows += [row | {"context": 2048, "ratio_to_plain": {"median": 9.0}} for row in rows if "1+1" in row["method"]]
    best = best_of_cells(rows)["bfloat16", 8192, 1, "greedy"]
    assert best["LongSpec"]["method"] == "LongSpec, 4+4"
    assert best["LongSpec, compiled"]["method"] == "LongSpec, 1+1, compiled"
    assert {kind_of(row["method"]) for row in best.values()} == set(best) and len(best) == 5


@pytest.mark.parametrize(
    ("file", "options", "message"),
    [
        (RESULTS / "memory.jsonl", [], "nothing to write"),
        ("{folder}/other.jsonl", ["--page", "{page}"], "benchmark 'kitchen': expected one of figure, engine"),
    ],
    ids=["nothing to write", "something else"],
)
def test_what_cannot_be_written_is_refused(file, options, message, page, tmp_path, capsys):
    (tmp_path / "other.jsonl").write_text('{"kind": "environment", "benchmark": "kitchen"}\n')
    with pytest.raises(SystemExit):
        main([str(file).format(folder=tmp_path), *(option.format(page=page) for option in options)])
    assert message in capsys.readouterr().err
    assert page.read_text() == PAGE


@pytest.mark.parametrize(
    ("page", "results"), [("results", ["figure"]), ("earlier_results", ["engine", "verification", "memory"])]
)
def test_the_committed_pages_are_those_of_the_result_files(page, results):
    """`make tables` mends them."""
    text = (PROJECT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    written = [section(read_records(RESULTS / f"{name}.jsonl"))[1] for name in results]
    assert replace_between(text, "\n\n".join(written)) == text
