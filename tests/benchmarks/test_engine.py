import pytest
import torch

import hf_longspec
from benchmarks import engine
from benchmarks.engine import measure_speed
from benchmarks.harness import Run
from hf_longspec.bench.calls import HF, PLAIN, HfMethod, endless
from hf_longspec.bench.prefill import Decoder
from hf_longspec.bench.results import read_records
from hf_longspec.testing import tiny_target
from tests.bench.conftest import make_drafts


def measure(target, prompts, tmp_path, make_drafts=make_drafts, seconds=60, **clock):
    sizes = {"contexts": [40], "batches": [2], "dtypes": ["float32"], "tokens": 9, "repeats": 2}
    with Run(tmp_path / "engine.jsonl", "engine", seconds, **clock) as results:
        measure_speed(results, {"float32": target}, make_drafts, prompts, **sizes)
    return read_records(tmp_path / "engine.jsonl")


def reasons(records, mode=None):
    return [r["reason"] for r in records if r["kind"] == "skipped" and mode in (None, r.get("mode"))]


@pytest.fixture(autouse=True)
def known_bandwidth(monkeypatch):
    """It takes a second to measure."""
    monkeypatch.setattr(engine, "read_gb_per_second", lambda: 10.0)


def test_every_method_is_measured_in_both_modes(target, prompts, tmp_path):
    """But for prompt lookup, which decodes single prompts."""

    def with_lookup(model):
        return make_drafts(model) | {"lookup": HfMethod({"prompt_lookup_num_tokens": 3}, max_batch=1)}

    records = measure(target, prompts, tmp_path, make_drafts=with_lookup)
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

    records = measure(
        target, prompts, tmp_path, make_drafts=lambda model: make_drafts(model) | {"wrong": Wrong.from_target(model)}
    )
    assert reasons(records, "greedy") == ["not timed: it emits another float32 text than hf generate"]
    rows = [record for record in records if record["kind"] == "decoding"]
    assert {row["method"] for row in rows} == {HF, PLAIN, "SpecAttn"}
    assert not [r for r in records if r.get("method") == "wrong" and r.get("decoding", {}) != {}]  # no further call


def test_what_does_not_fit_is_left_out(target, prompts, tmp_path):
    records = measure(target, prompts, tmp_path, seconds=0.0, now=lambda: 0.0)
    assert {record["kind"] for record in records} == {"environment", "ceilings", "skipped", "end"}
    assert set(reasons(records)) == {"no time left", "no float32 text of hf generate to compare with"}


def test_a_summary_is_of_all_turns(target, prompts, tmp_path, monkeypatch):
    """The clock of the run jumps to its end after the first turn."""
    seconds, write = [0.0], Run.write

    def late(self, kind, **values):
        seconds[0] = 100.0 if values.get("turn") == 1 else seconds[0]
        return write(self, kind, **values)

    monkeypatch.setattr(Run, "write", late)
    records = measure(target, prompts, tmp_path, now=lambda: seconds[0])
    assert [r["turn"] for r in records if r["kind"] == "run"] == [0, 0, 0, 1]
    assert not [r for r in records if r["kind"] == "decoding"]
    assert reasons(records, "greedy") == ["not timed: it, or what it is compared with, had no time for all turns"] * 3


def test_cells_begin_with_the_longest_context(target, prompts, tmp_path):
    """And other types with a look at the greedy float32 text."""
    half = {"float32": target, "bfloat16": endless(tiny_target("llama", dtype=torch.bfloat16))}
    sizes = {"contexts": [20, 40], "batches": [1], "dtypes": ["bfloat16"], "tokens": 4, "repeats": 2}
    with Run(tmp_path / "engine.jsonl", "engine", 60) as results:
        measure_speed(results, half, make_drafts, prompts, **sizes)
    runs = [(r["context"], r["dtype"], r["turn"]) for r in results.records if r["kind"] == "run" and r["method"] == HF]
    checked = [(context, "float32", 0) for context in (40, 20)]
    timed = [[(context, "bfloat16", turn) for turn in (0, 1)] * 2 for context in (40, 20)]
    assert runs == [checked[0], *timed[0], checked[1], *timed[1]]
    assert {r["dtype"] for r in results.records if r["kind"] == "decoding"} == {"bfloat16"}


def test_times_are_dropped_when_a_later_turn_emits_other_text(target, prompts, tmp_path, monkeypatch):
    run = Decoder.run

    def run_with_a_slip(self, draft, rows, context, mode, seed, tokens=None):
        result = run(self, draft, rows, context, mode, seed, tokens)
        if isinstance(draft, hf_longspec.SpecAttnDraftModel) and mode == "greedy" and seed == 1:  # the second turn only
            result.text[0, -1] += 1
        return result

    monkeypatch.setattr(Decoder, "run", run_with_a_slip)
    records = measure(target, prompts, tmp_path)
    assert reasons(records, "greedy") == ["not timed: it emits another float32 text than hf generate"]
    assert {r["method"] for r in records if r["kind"] == "decoding"} == {HF, PLAIN}
