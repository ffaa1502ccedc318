"""Long texts with marks: the counts at a mark, the baselines after it, and the table."""

import pytest

import hf_longspec
from benchmarks.harness import Run
from benchmarks.long_generation import LongBenchmark, LongRow, Marks
from benchmarks.pages import long_headline
from hf_longspec.bench.calls import HF, MODES, PLAIN, Decoding, HfMethod
from hf_longspec.bench.results import read_records
from hf_longspec.generation.sequences import SpeculationStats

GREEDY = MODES["greedy"]


def test_a_clock_notes_time_and_counts_at_its_marks():
    stats, times = SpeculationStats(), iter([10.0, 12.0, 20.0])
    clock = Marks([1, 3, 5], lambda: stats, now=lambda: next(times))
    for number in range(6):
        stats.num_spec_steps = number
        clock(number + 1)
    assert clock.times == {1: 10.0, 3: 12.0, 5: 20.0}
    assert [clock.stats[mark].num_spec_steps for mark in (1, 3, 5)] == [0, 2, 4]  # copies of that moment
    assert clock.speed(1, 3) == 1.0 and clock.speed(3, 5) == 0.25


@pytest.fixture
def records(target, prompts, tmp_path):
    plain = hf_longspec.PlainDraftModel.from_target(target)
    ngram = hf_longspec.NgramDraftModel.from_target(target, num_assistant_tokens=3, ngram_candidates=1)
    benchmark = LongBenchmark(target, prompts.tokens[:1, :20], [15, 30])
    sampled = Decoding(temperature=1.0, min_p=0.05, penalty=1.3, window=9)
    baselines = {HF: HfMethod(), PLAIN: plain}
    with Run(tmp_path / "long.jsonl", "long", 60) as results:
        rows = (
            LongRow("mine", ngram, 30, sampled),
            LongRow(PLAIN, plain, 30, sampled),
            LongRow("mine", ngram, 15, GREEDY),
        )
        for row in rows:
            benchmark.measure(row, baselines if row.draft is plain else {}, 5, results)
    return read_records(tmp_path / "long.jsonl")


def test_every_row_has_its_marks(records):
    rows = [record for record in records if record["kind"] == "long"]
    assert [(row["method"], row["mode"], row["penalised"], row["mark"]) for row in rows] == [
        ("mine", "sample", True, 15),
        ("mine", "sample", True, 30),
        (PLAIN, "sample", True, 15),
        (PLAIN, "sample", True, 30),
        ("mine", "greedy", False, 15),
    ]
    assert all(row["tau"] == 1.0 and row["alpha"] == row["beta"] == 0.0 for row in rows if row["method"] == PLAIN)
    assert all(row["tokens_per_second"] > 0 for row in rows)
    baselines = [(row["method"], row["mark"]) for row in records if row["kind"] == "baseline"]
    assert baselines == [(HF, 30), (PLAIN, 30), (HF, 15), (PLAIN, 15)]


def test_ratios_are_those_of_the_same_mark(records):
    rows = [record for record in records if record["kind"] == "long"]
    lines = [line.split(" | ") for line in long_headline(records).splitlines() if line.startswith("| sample")]
    for row, base, line in zip(rows[:2], rows[2:4], lines[:2], strict=True):
        assert line[5] == f"{row['tokens_per_second'] / base['tokens_per_second']:.2f}"
        theirs = next(at for at in records if at.get("method") == HF and at["mark"] == row["mark"])
        assert line[8] == f"{row['tokens_per_second_near'] / theirs['tokens_per_second']:.2f}"
