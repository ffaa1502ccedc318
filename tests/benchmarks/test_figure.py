"""Comparison of all drafts: one run, one that goes on, and wrong texts."""

import json

import pytest

from benchmarks import figure, figure_report
from benchmarks.harness import Run
from hf_longspec.bench.calls import HF, PLAIN, HfMethod
from hf_longspec.bench.results import of_kind, read_records
from tests.bench.conftest import make_drafts

SIZES = {"modes": ["greedy"], "contexts": [24], "batches": [1, 2]}


def measure(target, prompts, path, seconds=100, resume=None, **sizes):
    lookup = HfMethod({"prompt_lookup_num_tokens": 3}, max_batch=1)
    methods = {HF: HfMethod(), **make_drafts(target), "hf prompt lookup": lookup}
    with Run(path, "figure", seconds, resume=resume, quiet=True) as results:
        figure.compare(results, target, methods, prompts, tokens=9, **(SIZES | sizes))
    return read_records(path)


def test_all_systems_continue_the_same_prompts(target, prompts, tmp_path):
    records = measure(target, prompts, tmp_path / "figure.jsonl")
    calls, count = of_kind(records, "call"), len(prompts.tokens)
    singles = [call for call in calls if call["batch"] == 1]
    assert len(singles) == 4 * count  # systems, prompts
    assert {call["system"] for call in calls if call["batch"] == 2} == {HF, PLAIN, "SpecAttn"}
    texts = {(call["context"], call["batch"], call["turn"], call["text"]) for call in calls}
    assert len(texts) == count + count // 2  # one per prompts, whichever the system
    for call in calls:
        assert len(call["taus"]) == call["batch"] and call["tokens"] == 8 * call["batch"]
        assert sum(8 / tau for tau in call["taus"]) == pytest.approx(call["steps"], rel=1e-3)
    rows = figure_report.rows(records)
    assert all(not row["wrong"] and row["to_plain"]["mean"] > 0 for row in rows)
    assert all(row["cost"]["mean"] == row["to_plain"]["mean"] == 1 for row in rows if row["system"] == PLAIN)
    text = (tmp_path / "figure.md").read_text()
    assert "| SpecAttn |" in text and "Several rows together" in text
    figure_report.draw(records, tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").stat().st_size > 0


def test_an_interrupted_run_goes_on_where_it_stopped(target, prompts, tmp_path):
    path, sizes = tmp_path / "figure.jsonl", {"modes": ["sample"], "batches": [1]}
    measure(target, prompts, path, **sizes)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:-4]) + "\n")
    cut = measure(target, prompts, path, seconds=0, resume=True, **sizes)
    assert of_kind(cut, "skipped") and json.loads(lines[2]) in cut
    records = measure(target, prompts, path, resume=True, **sizes)
    at = [(call["system"], call["turn"]) for call in of_kind(records, "call")]
    assert len(at) == len(set(at)) == 4 * len(prompts.tokens) and not of_kind(records, "skipped")


def call(system, context, tau, turn=0, text="same", seconds=1.0):
    at = {"mode": "greedy", "batch": 1, "context": context, "system": system, "turn": turn, "text": text}
    return {
        "kind": "call",
        **at,
        "taus": [tau],
        "tokens": 80,
        "steps": 80 / tau,
        "seconds": seconds,
        "draft_state_bytes": 0,
    }


def test_a_wrong_text_has_no_speed():
    records = [call(HF, 1024, 1.0), call(PLAIN, 1024, 1.0), call("SpecAttn", 1024, 2.0, text="another", seconds=0.5)]
    row = next(row for row in figure_report.rows(records) if row["system"] == "SpecAttn")
    assert row["wrong"] and "to_plain" not in row and "another text" in figure_report.headline([row])
    records[-1] |= {"text": "same"}
    row = next(row for row in figure_report.rows(records) if row["system"] == "SpecAttn")
    assert row["cost"]["mean"] * row["to_plain"]["mean"] == pytest.approx(2.0)  # tau
