"""Long texts with marks: the counts at a mark, the baselines after it, and the table."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import hf_longspec
from benchmarks.harness import Run
from benchmarks.long_generation import LongBenchmark, LongRow, Marks
from benchmarks.pages import long_headline
from hf_longspec.bench.calls import HF, MODES, PLAIN, Decoding, HfMethod, endless
from hf_longspec.bench.results import read_records
from hf_longspec.generation import compiled_steps as compiled
from hf_longspec.generation.stats import SpeculationStats
from hf_longspec.testing import tiny_target
from tests.rounding import rounding

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


def test_graphs_are_built_before_the_clock_starts(prompts, tmp_path, monkeypatch):
    """All of them, the baseline's as well: none is built while a text is written.

    The text of three layers soon has steps of every kind.
    """
    target = endless(tiny_target("llama", num_hidden_layers=3, attn_implementation="sdpa"))
    torch._dynamo.reset()
    graphs, built = CompileCounterWithBackend("eager"), []
    monkeypatch.setattr(compiled, "BACKEND", graphs)
    run = LongBenchmark.run

    def watched(self, *args):
        built.append(graphs.frame_count)
        return run(self, *args)

    monkeypatch.setattr(LongBenchmark, "run", watched)
    drafts = hf_longspec.PlainDraftModel.from_target(target), hf_longspec.NgramDraftModel.from_target(target)
    for draft in drafts:
        draft.generation_config.compile = "compile"
    benchmark = LongBenchmark(target, prompts.tokens[:1, :20], [30])
    with Run(tmp_path / "long.jsonl", "long", 60) as results:
        benchmark.measure(LongRow("mine", drafts[1], 30, GREEDY), {HF: HfMethod(), PLAIN: drafts[0]}, 5, results)
    assert built == [graphs.frame_count] and built[0] >= 2
    torch._dynamo.reset()


def test_going_on_after_a_mark_keeps_the_text_before_it(target, prompts, tmp_path):
    """The text that a baseline writes after a mark is that of a fresh call, so the keys before it are the text's."""
    plain = hf_longspec.PlainDraftModel.from_target(target)
    benchmark = LongBenchmark(target, prompts.tokens[:1, :20], [8, 16])
    with Run(tmp_path / "long.jsonl", "long", 60) as results:
        text, cache = benchmark.run(LongRow("mine", plain, 16, GREEDY), results)
    fresh = target(text[:, :27], use_cache=True).past_key_values
    benchmark.speed_at(16, plain, LongRow("mine", plain, 16, GREEDY), text, cache, 6)
    benchmark.speed_at(8, plain, LongRow("mine", plain, 16, GREEDY), text, cache, 6)
    for ours, theirs in zip(cache.layers, fresh.layers, strict=True):
        torch.testing.assert_close(ours.keys[:, :, :27], theirs.keys, **rounding(theirs.keys, layers=2))
