import json

import pytest

from benchmarks.engine import engine_report
from benchmarks.tables import HEADLINES, main, replace_between
from hf_longspec.bench.machine import environment
from hf_longspec.bench.markdown import environment_line, markdown_table
from hf_longspec.bench.results import ResultFile, TimeGuard, read_records

README = "# Title\n\nbefore\n\n<!-- bench:start -->\nold table\n<!-- bench:end -->\n\nafter\n"


def summary(value):
    return {"median": value, "low": value - 0.1, "high": value + 0.1, "count": 5}


def interval(value):
    return {"mean": value, "low": value - 0.05, "high": value + 0.05, "count": 24}


def decoding(method, mode, speed, tau=1.0):
    return {
        "kind": "decoding",
        "context": 2048,
        "batch": 1,
        "dtype": "float32",
        "mode": mode,
        "method": method,
        "tokens_per_second": summary(speed),
        "ratio_to_hf": summary(speed / 50),
        "ratio_to_plain": summary(speed / 60),
        "tau": tau,
        "shares": {"draft": 0.5, "verify": 0.4, "rest": 0.1},
        "draft_state_bytes": 2048,
        "share_of_floor": 0.25,
    }


def write(path, benchmark, records, finished=True):
    settings = {"defaults": {"num_assistant_tokens": 4}} if benchmark == "acceptance" else {}
    head = {"kind": "environment", "benchmark": benchmark, "settings": settings, **environment(), "commit": "abc123"}
    tail = [{"kind": "end", "seconds": 1.0}] if finished else []
    path.write_text("".join(json.dumps(record) + "\n" for record in [head, *records, *tail]))


@pytest.fixture
def results(tmp_path):
    modes = [
        record
        for mode in ("sample", "greedy")
        for record in (
            decoding("hf generate", mode, 50.0),
            decoding("plain loop", mode, 60.0),
            decoding("SpecAttn, gamma 4", mode, 75.0, tau=2.5),
        )
    ]
    verification = {"kind": "verification", "part": "attention", "dtype": "bfloat16", "nodes": 17, "context": 16384}
    verification |= {"hf_ms": summary(60.0), "ours_ms": summary(20.0), "ratio": summary(3.0)}
    verification |= {"error": 0.0016, "budget": 0.003, "floor_ms": 4.0}
    sampled = {"kind": "acceptance", "mode": "sample", "length": 8192, "tau": interval(2.5), "per_prompt": [2.5]}
    state = {"kind": "draft_state", "context": 65536, "draft_state_bytes": 139264, "target_cache_bytes": 2**25}
    moved = {"kind": "offsets", "offset": 8192, "anchors": 4, "loss": interval(4.5), "difference": interval(0.01)}
    write(tmp_path / "draft_state.jsonl", "draft_state", [state | {"draft_ms": 3.25}])
    write(tmp_path / "offsets.jsonl", "offsets", [moved])
    write(tmp_path / "engine.jsonl", "engine", [{"kind": "ceilings", "read_gb_per_second": 20.5}, *modes])
    write(tmp_path / "verification.jsonl", "verification", [verification])
    long = {
        "kind": "long",
        "mode": "sample",
        "penalised": True,
        "mark": 20000,
        "tau": 1.25,
        "alpha": 0.06,
        "beta": 0.01,
    }
    long |= {"tokens_per_second_near": 60.0, "distinct": [[0.4, 0.1]] * 4}
    behind = {"kind": "baseline", "mode": "sample", "penalised": True, "mark": 20000, "tokens_per_second": 20.0}
    texts = [
        {**long, "method": name, "tokens_per_second": speed} for name, speed in (("x", 90.0), ("plain loop", 60.0))
    ]
    write(tmp_path / "long.jsonl", "long", [*texts, {**behind, "method": "hf generate"}])
    copied = {**sampled, "options": {"draft": "hf prompt lookup"}, "tau": interval(1.25)}
    write(tmp_path / "ngram.jsonl", "ngram", [copied, decoding("n-grams", "greedy", 70.0, tau=1.5)])
    forward = {
        "kind": "forward",
        "side": "ours",
        "backend": "b",
        "mode": "eager",
        "batch": 1,
        "context": 96,
        "nodes": 5,
    }
    timed = {"ms": summary(7.0), "how": "wall", "floor_ms": 3.5, "times_floor": 2.0, "error": 0.01}
    write(tmp_path / "gpu.jsonl", "gpu", [forward | timed])
    extra = {"kind": "memory", "part": "decode", "method": "x", "context": 65536, "extra_bytes": 3 * 2**20}
    write(tmp_path / "memory.jsonl", "memory", [extra | {"torch_bytes": 2**20, "kv_bytes": 300 * 2**20}])
    write(
        tmp_path / "acceptance.jsonl",
        "acceptance",
        [
            {**sampled, "options": {"selection": "two_rows"}},
            {**sampled, "options": {"selection": "window"}, "tau": interval(2.4), "difference": interval(-0.1)},
        ],
        finished=False,
    )
    return sorted(tmp_path.glob("*.jsonl"))


def test_readme_gets_all_tables_and_keeps_the_rest(results, tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text(README)
    main([*map(str, results), "--readme", str(readme)])
    text = readme.read_text()
    assert text.startswith("# Title\n\nbefore\n\n<!-- bench:start -->\n")
    assert text.endswith("<!-- bench:end -->\n\nafter\n")
    assert "old table" not in text
    assert "| float32 | 2048 | 1 | sample | 50.0 | 1.20x | 1.50x; 1.25x plain, tau 2.50 (gamma 4) |" in text
    assert "| attention | bfloat16 | 17 | 60.0 | 20.0 | 3.00 (2.90-3.10) | 4.0 | 2e-03 |" in text
    assert "| sample | window | 2.40 ± 0.05 (-0.10 ± 0.05) |" in text
    assert "| 65536 | 136 | 32.0 | 3.25 |" in text
    assert "| 8192 | 4 | 4.500 ± 0.05 | +0.0100 ± 0.0500 |" in text
    assert "| sample | draft=hf prompt lookup | 1.25 ± 0.05 |" in text
    assert "1.40x; 1.17x plain, tau 1.50" in text
    assert "| x | 20000 | 90.0 | 1.50 | 60.0 |  | 3.00 | 1.25 | 0.06 | 0.01 | 0.40 / 0.10 |" in text
    assert "| ours | b | eager | 1 | 96 | 5 | 0.01 | 7.000 (6.900-7.100) | 3.5 | 2 | wall |" in text
    assert "| decode | x | 3.00 MiB, 1.00% |" in text
    assert text.count("commit abc123") == 9
    assert "Defaults: num_assistant_tokens=4." in text
    assert "20.5 GB/s" in text
    assert text.count("The run was not finished.") == 1
    assert [text.index(f"### {title}") for title, *_ in HEADLINES.values()] == sorted(
        text.index(f"### {title}") for title, *_ in HEADLINES.values()
    )
    assert "engine, verification, draft_state, offsets, long, ngram, gpu, memory, acceptance" in capsys.readouterr().out


def test_writing_twice_changes_nothing(results, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(README)
    main([*map(str, results), "--readme", str(readme)])
    first = readme.read_text()
    main([*map(str, results), "--readme", str(readme)])
    assert readme.read_text() == first


@pytest.mark.parametrize("text", ["no markers", "<!-- bench:end --> <!-- bench:start -->"])
def test_missing_markers_are_refused(text):
    with pytest.raises(ValueError, match="bench:start"):
        replace_between(text, "new")


def test_a_file_of_something_else_is_refused(results, tmp_path, capsys):
    (tmp_path / "other.jsonl").write_text('{"kind": "environment", "benchmark": "kitchen"}\n')
    (tmp_path / "README.md").write_text(README)
    with pytest.raises(SystemExit):
        main([str(tmp_path / "other.jsonl"), "--readme", str(tmp_path / "README.md")])
    assert "benchmark 'kitchen': expected one of engine" in capsys.readouterr().err
    assert (tmp_path / "README.md").read_text() == README


def test_a_line_that_was_cut_off_is_dropped(results):
    whole = read_records(results[0])
    with results[0].open("a") as file:
        file.write('{"kind": "accep')
    assert read_records(results[0]) == whole


def test_an_interrupted_run_leaves_its_records_and_no_end(tmp_path):
    path = tmp_path / "e.jsonl"

    def run():
        with ResultFile(path, "engine", engine_report, TimeGuard(1), {"tokens": 4}) as results:
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
