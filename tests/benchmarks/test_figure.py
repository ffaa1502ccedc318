"""Comparison of all drafts: what is measured, what is compared, and what the report makes of it."""

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
    records = measure(target, prompts, path, resume=True, **sizes)
    at = [(call["system"], call["turn"]) for call in of_kind(records, "call")]
    assert len(at) == len(set(at)) == 4 * len(prompts.tokens)
    assert json.loads(lines[2]) in records


def test_a_run_without_time_is_finished_by_the_next(target, prompts, tmp_path):
    path = tmp_path / "figure.jsonl"
    records = measure(target, prompts, path, seconds=0)
    assert not of_kind(records, "call") and of_kind(records, "skipped")
    records = measure(target, prompts, path, resume=True)
    assert {call["turn"] for call in of_kind(records, "call", batch=1)} == set(range(len(prompts.tokens)))
    assert not of_kind(records, "skipped")


def test_prompts_are_finished_one_after_another(target, prompts, tmp_path):
    records = measure(target, prompts, tmp_path / "figure.jsonl", contexts=[16, 24])
    order = [(call["turn"] + 1) * call["batch"] for call in of_kind(records, "call")]
    assert order == sorted(order) and len(set(order)) == len(prompts.tokens)


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
    assert row["wrong"] and "to_plain" not in row and "another text" in figure_report.headline(records)


def test_cost_times_speed_up_is_tau():
    records = [call(HF, 1024, 1.0, seconds=3.0), call(PLAIN, 1024, 1.0, seconds=2.0), call("SpecAttn", 1024, 2.5)]
    row = next(row for row in figure_report.rows(records) if row["system"] == "SpecAttn")
    assert row["to_plain"]["mean"] == 2.0 and row["to_generate"]["mean"] == 3.0
    assert row["cost"]["mean"] * row["to_plain"]["mean"] == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("last", "verdict"),
    [
        ([3.0, 3.01, 2.99, 3.0], "agrees"),
        ([2.0, 2.1, 1.9, 2.0], "does not agree"),
        ([1.5, 4.0, 3.0, 2.5], "cannot be told"),
    ],
)
def test_claims_follow_from_the_interval(last, verdict):
    """LongSpec has tau 3 at the shortest context in all turns; its claim is that tau does not fall."""
    records = [call("LongSpec", 1024, 3.0, turn) for turn in range(4)]
    records += [call("LongSpec", 16128, tau, turn) for turn, tau in enumerate(last)]
    claim = figure_report.CLAIMS[0]
    assert claim.verdict(figure_report.cells(records), "greedy")["verdict"] == verdict
    assert claim.verdict(figure_report.cells(records), "sample") is None
    assert verdict in figure_report.claims(records)


def test_drafts_that_are_missing_are_left_out(target, tmp_path):
    assert not {"LongSpec", "small model", "hf assisted"} & figure.systems(target, tmp_path).keys()
