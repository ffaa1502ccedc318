"""README's compact table and figure: what they show of a result file, and that the committed ones are not stale."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.pages import best_of_cells, kind_of
from benchmarks.tables import main, replace_between, section, speed_figure, summary
from hf_longspec.bench.markdown import environment_line
from hf_longspec.bench.results import read_records

PROJECT = Path(__file__).resolve().parents[2]
RESULTS = PROJECT / "benchmarks" / "results"
PAGE = "before\n\n<!-- bench:start -->\nold\n<!-- bench:end -->\n\nafter\n"


def speed(method, ratio, to_plain, context=8192, batch=1, mode="greedy", dtype="bfloat16"):
    """A record of `engine.py`; plain `generate` makes 50 tokens per second."""
    spread = {"low": 0.0, "high": 999.0, "count": 5}
    ratios = {"tokens_per_second": 50 * ratio, "ratio_to_hf": ratio, "ratio_to_plain": to_plain, "ratio_to_eager": 1.0}
    cell = {"context": context, "batch": batch, "mode": mode, "dtype": dtype, "method": method}
    return {
        "kind": "decoding",
        **cell,
        **{name: {"median": value} | spread for name, value in ratios.items()},
        "tau": 2,
    }


@pytest.fixture
def result(tmp_path):
    """A file with settings that lose, contexts and batches that are left out, and methods that are not ours."""
    head = {"kind": "environment", "benchmark": "engine", "settings": {"target": "t", "tokens": 48, "repeats": 5}}
    head |= {"cpu": "a processor", "cores": 2, "usable_cores": 1, "threads": 1, "native_bfloat16": True, "torch": "2"}
    head |= {"transformers": "5", "commit": "abc123", "load_average": 0.5, "date": "2026-11-21", "command": "run"}
    rows = [
        speed(method, ratio, to_plain, context, batch)
        for context in (2048, 16128, 8192)
        for batch in (4, 1)
        for method, ratio, to_plain in (
            ("hf generate", 1.0, 0.5),
            ("hf assisted", 9.0, 0.9),
            ("plain loop", 2.0, 1.0),
            ("LongSpec, 1+1", 1.25, 0.7),
            ("LongSpec, 4+4", 1.5, 0.8),
            ("LongSpec, 1+1, compiled", 3.0, 0.9),
        )
    ]
    rows.append(speed("plain loop", 7.0, 1.0, mode="sample"))
    path = tmp_path / "engine.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [head, *rows, {"kind": "end"}]))
    return path


def test_the_table_has_the_longest_contexts_of_one_batch_and_our_methods(result):
    table = summary(read_records(result)).splitlines()
    assert table[0] == "| prompt | dtype | text | `generate`, tokens/s | plain loop | LongSpec | LongSpec, compiled |"
    assert table[2:5] == [
        "| 8,192 | bf16 | greedy | 50 | 2.00x | 1.50x | **3.00x** |",
        "| 8,192 | bf16 | sampled |  | **7.00x** |  |  |",
        "| 16,128 | bf16 | greedy | 50 | 2.00x | 1.50x | **3.00x** |",
    ]
    assert "batch 1, 48 tokens, medians of 5" in table[-1] and "commit abc123" in table[-1]


def test_the_fastest_setting_is_taken_of_every_kind(result):
    best = best_of_cells(read_records(result))["bfloat16", 8192, 1, "greedy"]
    assert best["LongSpec"]["method"] == "LongSpec, 4+4"
    assert best["LongSpec, compiled"]["method"] == "LongSpec, 1+1, compiled"
    assert {kind_of(row["method"]) for row in best.values()} == set(best)


def test_the_figure_shows_every_context_and_is_reproducible(result, tmp_path):
    pytest.importorskip("matplotlib")
    records = read_records(result)
    speed_figure(records, tmp_path / "a.svg")
    speed_figure(records, tmp_path / "b.svg")
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text()
    # matplotlib puts every text that it draws into a comment
    assert "<!-- 2,048 -->" in text and "<!-- 8,192 -->" in text and "<!-- 16,128 -->" in text
    assert "<!-- LongSpec, compiled -->" in text and "<!-- generate -->" in text
    assert "assisted" not in text
    speed_figure(records, tmp_path / "c.png")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_one_command_writes_page_summary_and_figure(result, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    page, readme, figure = tmp_path / "results.md", tmp_path / "README.md", tmp_path / "speed.svg"
    page.write_text(PAGE)
    readme.write_text(PAGE)
    main([str(result), "--page", str(page), "--summary", str(readme), "--figure", str(figure)])
    assert "### Decoding speed" in page.read_text() and "###" not in readme.read_text()
    for written in (page, readme):
        assert written.read_text().startswith("before\n") and written.read_text().endswith("\nafter\n")
    assert figure.is_file()
    assert capsys.readouterr().out.count("\n") == 3


@pytest.mark.parametrize("options", [[], ["--summary", "{page}"]], ids=["nothing to write", "no speeds"])
def test_what_cannot_be_written_is_refused(options, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    with pytest.raises(SystemExit):
        main([str(RESULTS / "memory.jsonl"), *(option.format(page=page) for option in options)])
    assert ("0 results of engine.py" if options else "nothing to write") in capsys.readouterr().err
    assert page.read_text() == PAGE


def test_the_committed_summary_and_figure_are_those_of_the_result_file():
    """`make tables` mends it."""
    records = read_records(RESULTS / "engine.jsonl")
    readme = (PROJECT / "README.md").read_text(encoding="utf-8")
    assert replace_between(readme, summary(records)) == readme
    page = (PROJECT / "docs" / "results.md").read_text(encoding="utf-8")
    written = [section(read_records(RESULTS / f"{name}.jsonl"))[1] for name in ("engine", "verification", "memory")]
    assert replace_between(page, "\n\n".join(written)) == page
    figure = (PROJECT / "docs" / "images" / "speed.svg").read_text(encoding="utf-8")
    described = re.search(r"<dc:description>(.*?)</dc:description>", figure, re.DOTALL)
    assert described and described[1] == environment_line(records).replace("&", "&amp;")
