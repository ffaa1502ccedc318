"""Comparison of all drafts: one run, one that goes on, wrong texts, and verdicts against scipy."""

import json
import random
from itertools import product

import numpy as np
import pytest
from scipy import stats

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


LENGTHS = (1024, 4096, 16128)


def made_up(systems, turns=6, mode="greedy", spread=0.03):
    """Calls with taus of `systems`: by name, a factor for each length; taus scatter by `spread`."""
    source = random.Random(0)
    records = []
    for turn, context in product(range(turns), LENGTHS):
        common = source.uniform(2, 3)  # of the prompt, whichever the system
        for name, factors in systems.items():
            scatter = source.uniform(1 - spread, 1 + spread)
            tau = 1.0 if name in (HF, PLAIN) else common * factors[LENGTHS.index(context)] * scatter
            seconds = {HF: 3.0, PLAIN: 2.0}.get(name, 1.0) * source.uniform(0.9, 1.1)
            records.append(call(name, context, tau, turn, seconds=seconds) | {"mode": mode})
    return records


def taus(records, system):
    """Log tau, a line per turn and a column per length."""
    own = sorted(of_kind(records, "call", system=system), key=lambda call: (call["turn"], call["context"]))
    return np.log([call["taus"][0] for call in own]).reshape(-1, len(LENGTHS))


@pytest.mark.parametrize(
    ("factor", "verdict"), [(1.1, "agrees"), (1.0, "not significant"), (0.9, "does not agree")], ids=str
)
def test_verdicts_are_those_of_the_corrected_test(factor, verdict):
    """Of two claims, the second one is about equal drafts: the p of the first is doubled."""
    systems = {"SpecAttn": (factor,) * 3, "Quest": (1, 1, 1), "SpecAttn, window": (factor,) * 3}
    records = made_up(systems)
    first = next(line for line in figure_report.claims(records).splitlines() if "Quest" in line).split(" | ")
    own, other = (taus(records, name).mean(axis=1) for name in ("SpecAttn", "Quest"))
    p = stats.ttest_rel(own, other).pvalue
    assert first[5] == f"{verdict} |"
    if factor == 1.0:
        assert first[4] == f"{min(1, 2 * p):.3f}"
