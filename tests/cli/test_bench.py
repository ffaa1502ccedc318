"""`hf-longspec bench` on the tiny target, at sizes that take seconds."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.records import of_kind, read_records
from hf_longspec import NgramDraftModel
from hf_longspec.cli import bench
from hf_longspec.cli.measuring import HF, PLAIN, STATIC
from tests.cli.conftest import HUB_CARDS, run_command
from tests.watching import after, before

TEXT = str(HUB_CARDS.parent / "README.md")
SMALL = ["--data", TEXT, "--context", "64", "--max-new-tokens", "8", "--repeats", "1", "--output", "bench.jsonl"]


@pytest.fixture
def invoke(tiny, tmp_path, monkeypatch):
    """Run in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: run_command("bench", "--target", tiny.target, *SMALL, *arguments)


def test_drafts_are_measured_beside_both_baselines(invoke, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/somewhere/bin/hf-longspec", "bench", "--target", str(tiny.target)])
    options = f"--draft {tiny.longspec} --draft ngram --repeats 2 --batch 2 --context 64,80 --static --json".split()
    result = invoke(*options)
    assert result.exit_code == 0, result.output
    found, methods = json.loads(result.stdout), [HF, STATIC, PLAIN, "tiny-longspec", "ngram"]
    assert [(row["context"], row["method"]) for row in found["rows"]] == [(n, m) for n in (64, 80) for m in methods]
    for row in found["rows"]:
        assert row["text"] == ("reference" if row["method"] == HF else "identical")
        assert row["tokens_per_second"]["count"] == row["ratio_to_no_draft"]["count"] == 2 and row["tau"] >= 1
    records = read_records(Path("bench.jsonl"))
    assert records[0] == found["environment"] and records[0]["command"] == "hf-longspec bench --target tiny-target"
    assert len(of_kind(records, "run")) == len(records) - 1 == 20
    text = Path("bench.jsonl").read_text(encoding="utf-8")
    assert str(tiny.target.parent) not in text and str(tmp_path) not in text and "/somewhere" not in text


def test_sampled_texts_are_those_of_the_loop_for_the_seed(invoke):
    """`generate` draws other numbers."""
    result = invoke("--draft", "ngram", "--temperature", "1")
    found = [(run["method"], run["text"]) for run in of_kind(read_records(Path("bench.jsonl")), "run")]
    assert result.exit_code == 0 and "│ reference" in result.output
    assert result.output.rstrip().endswith("After 64 tokens one turn shows no clear difference.")
    assert found == [(HF, "not compared"), (PLAIN, "reference"), ("ngram", "identical")]


def test_prompts_are_continued_as_they_are(invoke, monkeypatch):
    """Each of another length; the first, middle and last third of the texts are one turn each."""
    texts = ["abc " * count for count in (3, 9, 5, 6, 7, 4)]
    Path("texts.jsonl").write_text("".join(json.dumps({"question": text}) + "\n" for text in texts))
    prompts = []
    before(monkeypatch, bench, "run_call", lambda model, method, prompt, **_: prompts.append(prompt[0].shape[1]))
    options = ["--data", "texts.jsonl", "--column", "question", "--context", "whole", "--repeats", "3", "--json"]
    result = invoke(*options)
    assert result.exit_code == 0, result.output
    assert prompts[-6:] == [20] * 3 + [28] * 3 and set(prompts) == {12, 20, 28}  # bytes
    assert {row["context"] for row in json.loads(result.stdout)["rows"]} == {20}
    result = invoke(*options, "--batch", "2", "--overwrite")
    assert result.exit_code == 2 and "prompts have different lengths. Drop --batch." in result.output


def test_no_column_vanishes_in_a_narrow_terminal(capsys):
    names = HF, PLAIN, "a-draft"
    rows = bench.rows_of([call(name, turn, 8, 1.0 + turn * len(name)) for name in names for turn in (0, 1)])
    bench.show(rows)
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("generate", "no draft", "a-draft")) and "(1.00-1.50)" in shown
    rows[-1]["method"] = "a-draft-of-a-long-name"
    bench.show(rows)
    assert all(line.endswith(("┓", "┃", "┩", "│", "┘")) for line in capsys.readouterr().out.splitlines())


def call(method, turn, tokens, seconds, text="identical"):
    return {
        "kind": "run", "context": 64, "method": method, "turn": turn, "tokens": tokens, "steps": 4, "seconds": seconds,
        "text": text,
    }  # fmt: skip


def test_ratios_are_medians_over_turns_and_a_wrong_text_has_no_speed():
    """The machine is twice as slow in the second turn: a ratio of medians would be 2.5."""
    runs = [call(HF, 0, 8, 1.0), call(HF, 1, 8, 2.0), call(HF, 2, 8, 1.0)]
    runs += [call("a", 0, 8, 0.5), call("a", 1, 8, 1.0), call("a", 2, 8, 0.2), call("b", 0, 8, 0.1)]
    rows = {row["method"]: row for row in bench.rows_of([*runs, call("b", 1, 8, 0.1, "differs")])}
    assert rows["a"]["ratio_to_generate"] == {"median": 2.0, "low": 2.0, "high": 5.0, "count": 3}
    assert rows["a"]["ratio_to_no_draft"] is None and rows["a"]["tau"] == 2.0
    assert rows["b"]["text"] == "differs" and "tokens_per_second" not in rows["b"]


def row(context, method, low, high, count=3):
    """A draft whose ratio to the loop without a draft is in this range, and twice that to `generate`."""
    ratio = {"median": (low + high) / 2, "low": low, "high": high, "count": count}
    twice = {name: value * 2 for name, value in ratio.items()}
    return {"context": context, "method": method, "ratio_to_no_draft": ratio, "ratio_to_generate": twice}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([row(64, "a", 1.5, 1.6), row(64, "b", 1.1, 1.4)], "After 64 tokens use a."),
        (
            [row(64, "a", 1.5, 1.6), row(8192, "a", 1.2, 1.3), row(128, "a", 0.8, 1.0)],
            "After 64 and 8,192 tokens use a; after 128 tokens no draft pays.",
        ),
        (
            [row(64, "a", 1.5, 1.6), row(64, "b", 1.1, 1.5)],
            "After 64 tokens there is no clear difference between a and b.",
        ),
        ([row(64, "a", 0.9, 1.2)], "After 64 tokens there is no clear difference between a and no draft."),
        ([row(64, "a", 1.5, 1.5, count=1)], "After 64 tokens one turn shows no clear difference."),
        ([row(64, HF, 1.5, 1.6), row(64, STATIC, 1.5, 1.6)], "After 64 tokens no draft has a speed."),
    ],
)
def test_the_advice_follows_from_the_ranges(rows, said):
    assert bench.advice(rows) == said


def test_an_interrupted_run_keeps_the_turns_that_ended(invoke, monkeypatch):
    calls = []

    def interrupt(*_, **__):
        calls.append(None)
        if len(calls) == 3 * 2 + 2:  # after a turn with warm-ups, in the second one
            raise KeyboardInterrupt

    before(monkeypatch, bench, "run_call", interrupt)
    result = invoke("--repeats", "3")
    assert result.exit_code == 130 and "│ generate" in result.output
    assert [run["turn"] for run in of_kind(read_records(Path("bench.jsonl")), "run")] == [0, 0, 0]
    again = invoke()
    assert again.exit_code == 2 and "already there: bench.jsonl. Pass --overwrite" in again.output


def test_a_method_that_is_refused_or_out_of_memory_is_left_out_with_the_reason(invoke, monkeypatch):
    def refuse(model, method, *_, **__):
        if isinstance(method, NgramDraftModel):
            raise torch.OutOfMemoryError

    before(monkeypatch, bench, "run_call", refuse)
    result = invoke("--draft", "ngram", "--repeats", "2")
    assert result.exit_code == 0 and "ngram: out of memory" in result.stderr
    records = read_records(Path("bench.jsonl"))
    assert [record["method"] for record in of_kind(records, "skipped")] == ["ngram"]
    assert len(of_kind(records, "run")) == 4


def test_a_wrong_text_is_the_exit_status(invoke, monkeypatch):
    def spoil(call, model, method, *_, **__):
        if isinstance(method, NgramDraftModel):
            call.text[0, -1] ^= 1

    after(monkeypatch, bench, "run_call", spoil)
    result = invoke("--draft", "ngram")
    assert result.exit_code == 1 and "differs" in result.output
