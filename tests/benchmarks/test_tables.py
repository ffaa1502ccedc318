"""Tables of result files: reports and pages follow from them, and pages keep what is around a table."""

import re
from functools import cache
from pathlib import Path

import pytest

from benchmarks import figure_report, gpu_chart, tables
from benchmarks.gpu_report import without_draft
from benchmarks.records import read_records
from benchmarks.tables import BLOCK, main, page_of, refreshed, section, settings_table
from hf_longspec.modeling.register_draft import DRAFTS

PROJECT = Path(__file__).resolve().parents[2]
RESULTS = PROJECT / "benchmarks" / "results"
PAGE = "# Title\n\nbefore\n\n<!-- bench:start memory batching -->\nold table\n<!-- bench:end -->\n\nafter\n"
BEFORE, AFTER = PAGE.split("old table\n")


@pytest.fixture(scope="module", autouse=True)
def computed_once():
    """Most pages quote the same large file, whose rows take seconds."""
    compute, computed = figure_report.rows, {}

    def rows(records):
        if id(records) not in computed:
            computed[id(records)] = records, compute(records)  # kept, so that no others get its id
        return list(computed[id(records)][1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "read_records", cache(read_records))
        patch.setattr(figure_report, "rows", rows)
        yield


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    return path


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.jsonl")), ids=lambda path: path.stem)
def test_the_report_beside_a_result_file_is_made_of_it(file):
    """`make tables` writes them."""
    records = tables.read_records(file)
    assert page_of(records).report(records) == file.with_suffix(".md").read_text(encoding="utf-8")


def test_a_page_gets_the_tables_that_it_names_and_keeps_the_rest(page, capsys):
    main([str(page)])
    text = page.read_text()
    assert text.startswith(BEFORE) and text.endswith(AFTER) and "old table" not in text
    places = [text.index(section(read_records(RESULTS / f"{name}.jsonl"))) for name in ("memory", "batching")]
    assert places == sorted(places) and str(page) in capsys.readouterr().out
    main([str(page)])
    assert page.read_text() == text and not capsys.readouterr().out


PAGES_WITH_BLOCKS = [
    path
    for path in (PROJECT / "README.md", *sorted((PROJECT / "docs").glob("*.md")))
    if "<!-- bench:start" in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("path", PAGES_WITH_BLOCKS, ids=lambda path: path.stem)
def test_the_committed_pages_are_those_of_the_result_files(path):
    """`make tables` mends them."""
    assert refreshed(path) == path.read_text(encoding="utf-8")


def test_a_table_of_settings_says_what_the_class_declares():
    """Each draft with settings of its own has one on a page, but for one with `tree_widths` alone."""
    texts = [path.read_text(encoding="utf-8") for path in PAGES_WITH_BLOCKS]
    shown = {name for text in texts for name in re.findall(r"bench:start settings:(\w+)", text)}
    assert shown == {
        draft.model.__name__ for draft in DRAFTS.values() if settings_table(draft.model.__name__).count("\n") > 2
    }
    for draft in DRAFTS.values():
        assert all(setting.meaning.endswith(".") for setting in draft.model.declared.values()), draft
    lines = settings_table("LongSpecDraftModel").splitlines()
    assert lines[2].startswith("| `tree_widths` | `[4, 4, 4, 3]`, on a CPU `[1, 1, 1, 1]` | Number of nodes")
    assert [line.split("`")[1] for line in lines[2:]] == ["tree_widths", "cross_attention_window"]


def test_measured_numbers_stand_in_blocks_alone():
    """No interval and no speed elsewhere in README and docs; printed output of a command is an example."""
    for path in (PROJECT / "README.md", *sorted((PROJECT / "docs").glob("*.md"))):
        prose = re.sub(
            r"^```.*?^```", "", BLOCK.sub("", path.read_text(encoding="utf-8")), flags=re.MULTILINE | re.DOTALL
        )
        assert not re.search(r"±|[0-9] tokens/s", prose), path


def test_pages_name_results_that_exist():
    """In documents, comments and docstrings; a report names the file that it was written to, which may be gone."""
    sources = [*PROJECT.glob("*.md"), PROJECT / "Makefile"]
    for folder in ("docs", "benchmarks", "examples", "recipes", "hf_longspec", "hub_cards"):
        sources += [path for path in (PROJECT / folder).rglob("*") if path.suffix in (".md", ".py", ".mk")]
    sources = [path for path in sources if path.parent != RESULTS]
    names = [
        name for path in sources for name in re.findall(r"benchmarks/results/([\w-]+\.(?:md|jsonl))", path.read_text())
    ]
    assert len(names) > 10 and {name for name in names if not (RESULTS / name).is_file()} == set()


def test_bars_of_the_chart_are_those_of_the_table_and_the_rest_says_what_it_assumes(tmp_path):
    records = tables.read_records(RESULTS / "gpu.jsonl")
    shown = gpu_chart.bars(records, 32768)
    cells = [float(line.split("|")[2]) for line in without_draft(records).splitlines() if "ms per token" in line]
    assert cells == pytest.approx([ms for _, ms, _, is_measured in shown if is_measured], abs=0.05)
    iterations = {label: round(ms * int(label[-1]), 2) for label, ms, _, is_measured in shown if not is_measured}
    expected = {f"LongSpec, if tau is {tau}": 15.76 for tau in (2, 3, 4)}  # of the report
    assert iterations == expected | {f"SpecAttn, if tau is {tau}": 51.0 for tau in (4, 6)}
    gpu_chart.draw(records, tmp_path / "gpu.svg")
    assert (tmp_path / "gpu.svg").stat().st_size > 1000
