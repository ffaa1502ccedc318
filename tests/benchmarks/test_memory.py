"""The peak memory of a call of `generate` at small sizes, and checks that the measurement detects extra memory."""

import numpy as np
import pytest
import torch

from benchmarks import memory
from benchmarks.harness import Run
from benchmarks.memory import (
    SCORE_SHARE,
    TEXT_BYTES,
    MeasuredDraft,
    MemoryBenchmark,
    Peak,
    peak_memory,
)
from benchmarks.random_inputs import Shape, cache_bytes, full_cache, random_target
from hf_longspec.bench.calls import HF, PLAIN
from hf_longspec.bench.results import read_records
from hf_longspec.generation.cache import SpeculativeLayer

SMALL = Shape(layers=6, hidden=32, intermediate=48, heads=8, kv_heads=4, head_dim=32, vocab=64)
# longer than what the torch backend computes in one masked call, whose mask grows up to there, and long enough that
# SpecAttn reads its share of 7 %, not its fewest entries
CONTEXTS = [3840, 7680]
CHUNK = 16
MIB = 2**20
# Memory of Python itself in any call: frames, caches of the interpreter, the profiler's own objects.
PYTHON_NOISE = 2**18


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return random_target(SMALL, max(CONTEXTS) + 64, torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def drafts(model):
    return memory.make_drafts(model, budget=256)


@pytest.fixture(scope="module")
def records(model, drafts, tmp_path_factory):
    output = tmp_path_factory.mktemp("memory") / "memory.jsonl"
    with Run(output, "memory", 600, quiet=True) as results:
        MemoryBenchmark(model, SMALL, drafts, chunk=CHUNK, results=results).run(CONTEXTS)
    return read_records(output)


def row(records, part, method, context):
    found = [
        r
        for r in records
        if r["kind"] == "memory" and (r["part"], r["method"], r["context"]) == (part, method, context)
    ]
    assert len(found) == 1
    return found[0]


def test_the_measurement_counts_tensors_and_numpy_from_the_beginning_of_the_call():
    peak, result = peak_memory(lambda: torch.zeros(MIB // 4).add(1.0).sum().item())
    assert result == MIB // 4
    assert 2 * MIB <= peak.torch_bytes < 2 * MIB + 1024  # the zeros and the sum of them with 1
    assert peak.python_bytes < PYTHON_NOISE
    peak, _ = peak_memory(lambda: np.zeros(MIB, np.uint8).sum())
    assert peak.torch_bytes == 0 and MIB <= peak.python_bytes < MIB + PYTHON_NOISE
    assert Peak(3, 4).total == 7


def test_what_was_there_before_does_not_count_and_replacing_it_counts_once():
    def replace(holder):
        for _ in range(3):
            holder[0] = holder[0].clone()

    peak, _ = peak_memory(replace, lambda: ([torch.zeros(MIB // 4)],))
    assert peak.torch_bytes == MIB


def test_buffers_inside_an_operation_are_seen():
    # the CPU op keeps partial results of every thread, and on some processors a rearranged copy of the keys
    query = torch.randn(1, 1, 64, 64).bfloat16()
    keys = torch.randn(1, 1, 8192, 64).bfloat16()
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output = flash(query, keys, keys)[0].nbytes
    peak, _ = peak_memory(lambda: flash(query, keys, keys))
    assert peak.torch_bytes > 4 * output


def test_bounds_hold(records):
    assert not [record for record in records if not record.get("within", True)]
    bounded = {(r["part"], r["method"]) for r in records if "within" in r and r["context"] == max(CONTEXTS)}
    assert len(bounded) == 7  # six drafts and the prefill


def test_only_specattn_grows_with_the_context(records, drafts):
    first, last = CONTEXTS
    grown = last - first
    for name, measured in drafts.items():
        extra = [row(records, "decode", name, context)["extra_bytes"] for context in CONTEXTS]
        kv = cache_bytes(SMALL, 1, grown, torch.float32)
        if measured.ratio:
            selected = measured.ratio * kv
            assert 0.9 * selected < extra[1] - extra[0] < selected * (1 + 1 / SMALL.layers) + (SCORE_SHARE + 0.01) * kv
        else:
            assert extra[1] - extra[0] <= measured.bytes_per_token * grown
    # a copy of the whole cache, or even of one layer's keys, would be far beyond
    assert TEXT_BYTES * grown < kv / SMALL.layers / 2


def test_plain_generate_is_charged_for_its_copies_but_not_for_the_cache(records):
    kv = row(records, "decode", HF, CONTEXTS[0])["kv_bytes"]
    layer = kv / SMALL.layers
    extra = row(records, "decode", HF, CONTEXTS[0])["extra_bytes"]
    assert layer / 2 < extra < 1.5 * layer  # keys are copied, the old ones freed, then the values


def test_a_clone_of_the_cache_is_seen(model, drafts, tmp_path, monkeypatch):
    honest = SpeculativeLayer._stage

    def careless(self, keys, values, count):
        stored = honest(self, keys, values, count)
        self.kept = [part.clone() for part in stored]
        return stored

    monkeypatch.setattr(SpeculativeLayer, "_stage", careless)
    with Run(tmp_path / "clone.jsonl", "memory", 600, quiet=True) as results:
        benchmark = MemoryBenchmark(model, SMALL, drafts, chunk=CHUNK, results=results)
        for context in CONTEXTS:
            benchmark.decoding("LongSpec, 4+4+4+3", context)
    record = results.records[-2]  # before the end
    assert record["within"] is False and record["extra_bytes"] > record["kv_bytes"]
    assert "| NO |" in (tmp_path / "clone.md").read_text()


def test_the_last_chunk_has_the_peak_of_a_whole_prefill(model, drafts):
    context, plain = 3 * 768 + 1, drafts[PLAIN].draft
    benchmark = MemoryBenchmark(model, SMALL, drafts, chunk=768, results=None)
    options = {"max_new_tokens": 1, "prefill_chunk_size": 768}
    whole, last = (
        benchmark._ours(plain, full_cache(model, 1, context, 1, 1), context, stored, options).torch_bytes
        for stored in (0, 2 * 768)
    )
    assert whole == pytest.approx(last, rel=0.01)


def test_no_time_left_is_said(model, drafts, tmp_path):
    with Run(tmp_path / "m.jsonl", "memory", 0) as results:
        MemoryBenchmark(model, SMALL, {PLAIN: drafts[PLAIN]}, chunk=CHUNK, results=results).run([64])
    skipped = [record["reason"] for record in results.records if record["kind"] == "skipped"]
    assert skipped == ["no time left"] * 4  # two ways, decoding and prefill


def test_what_a_draft_may_copy():
    specattn = MeasuredDraft(None, ratio=0.125, floor=256)
    # 1,000 entries of 1,000 bytes, 10 layers: the floor, twice 5 nodes, one layer twice, and the scores
    assert specattn.copied(1000, 1_000_000, 5, 10) == 266 * 1.1 * 1000 + 8000
    assert specattn.copied(10_000, 10_000_000, 5, 10) == int(1260 * 1.1 * 1000 + 80_000)
    assert MeasuredDraft(None, index=True).bytes_per_token > TEXT_BYTES == MeasuredDraft(None).bytes_per_token
