"""Comparison of all drafts: one run, one that goes on, and wrong texts."""

import hashlib

import pytest
import torch

import hf_longspec
from benchmarks import figure, figure_report
from benchmarks.decoder import Method
from benchmarks.records import of_kind, read_records
from benchmarks.runner import Run
from hf_longspec.cli.measuring import HF, PLAIN, HfMethod, endless
from tests.benchmarks.conftest import make_drafts
from tests.tiny_targets import tiny_target

SINGLE = figure.Part((24,), prompts=3)
# The calls of the first part are also of the second.
PARTS = figure.Part((24,), prompts=2, systems=("SpecAttn",)), SINGLE
PARTS += figure.Part((24,), prompts=2, batch=2, systems=("SpecAttn",)), figure.Part((30,), 1, "bfloat16")


def measure(target, prompts, path, seconds=100, resume=None, modes=("greedy",), parts=(SINGLE,)):
    targets = {}
    for dtype in ("float32", "bfloat16"):
        model = target if dtype == "float32" else tiny_target("llama", dtype=torch.bfloat16)
        methods = {HF: HfMethod(), **make_drafts(model)}
        methods["hf prompt lookup"] = HfMethod({"prompt_lookup_num_tokens": 3})
        targets[dtype] = endless(model), [Method(*each) for each in methods.items()]
    with Run(path, "figure", seconds, resume=resume, quiet=True) as results:
        figure.compare(results, parts, targets, prompts.tokens, modes=modes, tokens=9)
    return read_records(path)


def test_all_systems_continue_the_same_prompts(target, prompts, tmp_path):
    records = measure(target, prompts, tmp_path / "figure.jsonl", parts=PARTS)
    calls, count = of_kind(records, "call"), len(prompts.tokens)
    reduced = [call for call in calls if call["dtype"] == "bfloat16"]
    assert {call["context"] for call in reduced} == {30} and len(reduced) == 4
    calls = [call for call in calls if call["dtype"] == "float32"]
    singles = [call for call in calls if call["batch"] == 1]
    assert len(singles) == 4 * count  # systems, prompts
    assert {call["system"] for call in calls if call["batch"] == 2} == {HF, PLAIN, "SpecAttn"}
    texts = {(call["context"], call["batch"], call["turn"], call["text"]) for call in calls}
    assert len(texts) == count + 1  # one per prompts, whichever the system
    for call in calls:
        assert len(call["taus"]) == call["batch"] and call["tokens"] == 8 * call["batch"]
        assert sum(8 / tau for tau in call["taus"]) == pytest.approx(call["steps"], rel=1e-3)
    text_of = {call["turn"]: call["text"] for call in singles}
    ids = target.generate(prompts.tokens[2:, :24], max_new_tokens=9, do_sample=False)[:, 24:]
    assert text_of[2] == hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:16]  # each turn has a prompt of its own
    rows = figure_report.rows(records)
    assert all(not row["wrong"] and row["to_plain"]["mean"] > 0 for row in rows)
    assert all(row["cost"]["mean"] == row["to_plain"]["mean"] == 1 for row in rows if row["system"] == PLAIN)
    text = (tmp_path / "figure.md").read_text()
    parts = ("| SpecAttn |", "Several rows together", "## bfloat16", "Draft, verification and rest")
    assert all(part in text for part in parts)
    figure_report.draw(records, tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").stat().st_size > 0


def test_the_suite_names_systems_that_exist_and_settings_of_their_drafts(target, tmp_path, monkeypatch):
    """Drafts that do not exist are named."""
    monkeypatch.setattr(figure, "VARIANTS", tmp_path)
    hf_longspec.LongSpecDraftModel.from_target(target).save_pretrained(tmp_path / "longspec-third")
    found, missing = figure.systems(target, tmp_path)
    assert {"LongSpec", "small model", "hf assisted"} <= set(missing)
    assert "LongSpec, a third" in {method.name for method in found}
    for method in found:
        assert isinstance(method.how, HfMethod) or set(dict(method.point)) <= set(method.how.settings)
    claimed = {name for claim in figure.SUITE["claims"] for name in (claim["system"], claim.get("other")) if name}
    named = {name for part in ("groups", "methods") for names in figure.SUITE[part].values() for name in names}
    assert claimed | named | {HF, PLAIN} <= {*missing, *(one.name for one in found)} == set(figure.SUITE["systems"])


def call(system, context, tau, turn=0, text="same", seconds=1.0, mode="greedy"):
    at = {"mode": mode, "batch": 1, "context": context, "system": system, "turn": turn, "text": text}
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
