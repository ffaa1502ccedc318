import pytest

import hf_longspec
from benchmarks.engine import EngineBenchmark, order_of_cells
from benchmarks.harness import Run
from hf_longspec.bench.calls import HF, PLAIN, HfMethod
from hf_longspec.bench.matrix import Cell
from hf_longspec.bench.prefill import Decoder
from hf_longspec.bench.results import read_records
from hf_longspec.testing import tiny_target


def make_drafts(model):
    return {
        PLAIN: hf_longspec.PlainDraftModel.from_target(model),
        "SpecAttn": hf_longspec.SpecAttnDraftModel.from_target(model, num_assistant_tokens=3, sparse_min_tokens=8),
    }


def measure(target, prompts, tmp_path, make_drafts=make_drafts, seconds=60, **clock):
    benchmark = EngineBenchmark(
        models={"float32": target}, make_drafts=make_drafts, prompts=prompts, tokens=9, repeats=2, bandwidth=10.0
    )
    with Run(tmp_path / "engine.jsonl", "engine", seconds, **clock) as results:
        benchmark.measure(Cell("float32", 40, 2), results)
    return read_records(tmp_path / "engine.jsonl")


def test_methods_that_decode_single_prompts_are_left_out_of_batches(target, prompts, tmp_path):
    def with_lookup(model):
        return make_drafts(model) | {"lookup": HfMethod({"prompt_lookup_num_tokens": 3}, max_batch=1)}

    records = measure(target, prompts, tmp_path, make_drafts=with_lookup)
    assert {record["method"] for record in records if record["kind"] == "decoding"} == {HF, PLAIN, "SpecAttn"}


def test_every_method_is_measured_in_both_modes(target, prompts, tmp_path):
    records = measure(target, prompts, tmp_path)
    rows = [record for record in records if record["kind"] == "decoding"]
    assert {(row["mode"], row["method"]) for row in rows} == {
        (mode, method) for mode in ("sample", "greedy") for method in (HF, PLAIN, "SpecAttn")
    }
    for row in rows:
        assert row["tokens_per_second"]["count"] == 2
        assert 1 <= row["tau"] <= 4
        assert (row["tau"] == 1) or row["method"] == "SpecAttn"
        assert (row["draft_state_bytes"] > 0) == (row["method"] == "SpecAttn")
        assert row["method"] == HF or sum(row["shares"].values()) == pytest.approx(1, abs=1e-2)
    assert records[-1]["kind"] == "end"
    assert "| float32 | 40 | 2 | SpecAttn |" in (tmp_path / "engine.md").read_text()


def test_wrong_text_is_not_timed(target, prompts, tmp_path):
    other = tiny_target("llama", seed=1)

    class Wrong(hf_longspec.PlainDraftModel):
        """Decodes with other weights."""

        def longspec_decoding(self, model, input_ids, **kwargs):
            return super().longspec_decoding(other, input_ids, **kwargs)

    def wrong_drafts(model):
        return {PLAIN: Wrong.from_target(model)}

    records = measure(target, prompts, tmp_path, make_drafts=wrong_drafts)
    assert [record["kind"] for record in records] == ["environment", "skipped", "end"]
    assert "plain loop emits another float32 greedy text" in records[1]["reason"]


@pytest.mark.parametrize(("seconds", "reason"), [(0.0, "no time left"), (1e-6, "it would take")])
def test_what_does_not_fit_is_left_out(target, prompts, tmp_path, seconds, reason):
    records = measure(target, prompts, tmp_path, seconds=seconds, now=lambda: 0.0)
    assert [record["kind"] for record in records] == ["environment", "skipped", "end"]
    assert reason in records[1]["reason"]


def test_cells_begin_with_the_longest_context():
    cells = order_of_cells([16, 64], [1, 4], ["float32", "bfloat16"])
    assert [cell.place for cell in cells[:3]] == [
        "float32, 64 tokens, batch 1",
        "bfloat16, 64 tokens, batch 1",
        "float32, 16 tokens, batch 1",
    ]
    assert len(cells) == 8


def test_times_are_dropped_when_a_later_turn_emits_other_text(target, prompts, tmp_path, monkeypatch):
    run = Decoder.run

    def run_with_a_slip(self, draft, rows, context, mode, seed, tokens=None):
        result = run(self, draft, rows, context, mode, seed, tokens)
        if draft is not None and mode == "greedy" and seed == 1:  # in the second turn only
            result.text[0, -1] += 1
        return result

    monkeypatch.setattr(Decoder, "run", run_with_a_slip)
    records = measure(target, prompts, tmp_path)
    assert [record["kind"] for record in records] == ["environment", "skipped", "end"]
    assert "times dropped" in records[1]["reason"]
    assert "turn 1" in records[1]["reason"]
