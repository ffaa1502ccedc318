"""Comparison of all drafts: what is measured, what is compared, and what the report makes of it."""

import json
import math
import random
from itertools import combinations, product

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from scipy import stats

from benchmarks import figure, figure_report
from benchmarks.harness import Run
from hf_longspec.bench.calls import HF, PLAIN, HfMethod
from hf_longspec.bench.report import estimate
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


def test_a_claim_is_one_paired_test_over_all_lengths():
    records = made_up({"LongSpec": (1, 1.1, 0.9), "LongSpec, no noise": (0.6, 0.5, 0.7)}, spread=0.2)
    own, other = (taus(records, name).mean(axis=1) for name in ("LongSpec", "LongSpec, no noise"))
    shown = next(line for line in figure_report.claims(records).splitlines() if "Noisy" in line).split(" | ")
    assert shown[3].startswith(f"{np.exp((own - other).mean()) - 1:+.1%}") and shown[5] == "agrees |"
    low, high = np.exp(stats.ttest_rel(own, other).confidence_interval(0.95)) - 1
    assert f"[{low:+.1%}, {high:+.1%}]" in shown[3]
    p = stats.ttest_rel(own, other).pvalue
    assert shown[4] == ("< 0.001" if p < 1e-3 else f"{min(1, 2 * p):.3f}")


def test_a_change_with_the_context_is_that_of_a_line_through_all_lengths():
    records = made_up({"LongSpec": (1, 0.9, 0.7)})
    logs = figure_report.CLAIMS[0].log_ratios(figure_report.taus_of(records), "greedy")
    slopes = [stats.linregress(np.log(LENGTHS), line).slope for line in taus(records, "LongSpec")]
    assert logs == pytest.approx([slope * math.log(LENGTHS[-1] / LENGTHS[0]) for slope in slopes])
    assert "does not agree" in figure_report.claims(records)


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


ALL = {HF: (), PLAIN: (), "LongSpec": (1, 1, 1), "LongSpec, tree": (1, 1.2, 1.2), "TokenSwift": (1.5, 1, 1)}


def test_rows_are_students_intervals_of_ratios_within_turns():
    records = made_up(ALL)
    row = next(
        row for row in figure_report.rows(records) if row["system"] == "LongSpec, tree" and row["context"] == 4096
    )
    own, plain, stock = (
        [call["seconds"] for call in of_kind(records, "call", system=name, context=4096)]
        for name in ("LongSpec, tree", PLAIN, HF)
    )
    found = np.exp(taus(records, "LongSpec, tree")[:, 1])
    ratios = {"to_plain": np.divide(plain, own), "to_generate": np.divide(stock, own), "tau": found}
    for name, values in ratios.items():
        low, high = stats.t.interval(0.95, len(values) - 1, np.mean(values), stats.sem(values))
        measured = row[name]["low"], row[name]["mean"], row[name]["high"]
        assert measured == pytest.approx((low, np.mean(values), high), rel=1e-3)  # four significant digits


def test_every_table_with_a_speed_begins_with_no_draft():
    records = made_up(ALL)
    records += [record | {"batch": 4} for record in records]
    for part in figure_report.tables(records):
        for text in part.split("\n\n"):
            if "x `generate`" in text.partition("\n")[0] or "Speed-up" in part:
                first = text.splitlines()[2:3]
                assert not first or "no draft" in first[0], text


def test_pictures_have_at_most_six_curves_and_labels_that_do_not_touch(tmp_path, monkeypatch):
    names = {name for group in figure_report.SETTINGS.values() for name in group}
    systems = {HF: (), PLAIN: ()} | dict.fromkeys(sorted(names - {"SpecAttn, logits"}), (1, 1, 1))
    records = made_up(systems, turns=3) + made_up(systems, turns=3, mode="sample")
    drawn = {}
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: drawn.update({path.name: self}))
    figure_report.draw(records, tmp_path / "p.png")
    assert sorted(drawn) == ["p-settings-greedy.png", "p-settings-sample.png", "p.png"]
    for picture in drawn.values():
        assert picture.get_size_inches()[0] * picture.dpi == 800
        for axis in picture.axes:
            assert len(axis.get_lines()) <= 6
            looks = [(line.get_color(), str(line._dash_pattern)) for line in axis.get_lines()]
            assert len(set(looks)) == len(looks)
            labels = axis.texts
            assert len(labels) == len(axis.get_lines()) and len({label.get_text() for label in labels}) == len(labels)
            if "speed" in axis.get_ylabel():
                assert "no draft" in [label.get_text() for label in labels]
            boxes = [Text.get_window_extent(label) for label in labels]
            assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))
            assert all(picture.bbox.x1 >= box.x1 and axis.bbox.x1 < box.x0 for box in boxes)


def test_columns_of_speeds_are_filled_by_the_class_of_a_draft():
    head = "| draft | x `generate`, greedy | x `generate`, sampled | note |\n|---|---|---|---|\n"
    page = f"{head}| `PlainDraftModel` | old | | |\n| [`LongSpecDraftModel`](l.md) | | | a |\n| other | kept | | |"
    records = made_up(ALL)
    lines = figure_report.fill(records, page).splitlines()
    at = {row["system"]: row for row in figure_report.at_longest(figure_report.rows(records), "greedy")}
    fastest = max(("LongSpec", "LongSpec, tree"), key=lambda name: at[name]["to_plain"]["mean"])
    for line, system in ((lines[2], PLAIN), (lines[3], fastest)):
        assert line.split("|")[2].strip() == estimate(at[system]["to_generate"])
        assert not line.split("|")[3].strip()  # no sampled call
    assert lines[4] == "| other | kept | | |" and lines[3].endswith("| a |")
