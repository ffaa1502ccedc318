"""The peak memory of a call of `generate` at small sizes, and checks that the measurement detects extra memory."""

import numpy as np
import pytest
import torch

from benchmarks.memory import MemoryBenchmark, Peak, make_drafts, peak_memory
from benchmarks.random_inputs import Shape, cache_bytes, random_target
from benchmarks.runner import Run
from hf_longspec.cli.measuring import HF, PLAIN

SMALL = Shape(layers=6, hidden=32, intermediate=48, heads=8, kv_heads=4, head_dim=32, vocab=64)
# longer than what the torch backend computes in one masked call, whose mask grows up to there, and long enough that
# SpecAttn reads its share of 7 %, not its fewest entries
CONTEXTS = [3840, 7680]
CHUNK = 16
MIB = 2**20
# Memory of Python itself in any call: frames, caches of the interpreter, the profiler's own objects.
PYTHON_NOISE = 2**18


# Bytes per token of context: ids, positions and masks as int64, a few of each; n-grams also keep two arrays of int32 of
# up to twice the length, and the text.
TEXT_BYTES, INDEX_BYTES = 80, 192
# Share of the keys and values that SpecAttn's scores may take.
SCORE_SHARE = 0.008


def test_the_measurement_counts_tensors_and_numpy_from_the_beginning_of_the_call():
    peak, result = peak_memory(lambda: torch.zeros(MIB // 4).add(1.0).sum().item())
    assert result == MIB // 4
    assert 2 * MIB <= peak.torch_bytes < 2 * MIB + 1024  # the zeros and the sum of them with 1
    assert peak.python_bytes < PYTHON_NOISE
    peak, _ = peak_memory(lambda: np.zeros(MIB, np.uint8).sum())
    assert peak.torch_bytes == 0 and MIB <= peak.python_bytes < MIB + PYTHON_NOISE
    assert Peak(3, 4).total == 7


@pytest.mark.soak
def test_only_specattn_grows_with_the_context(tmp_path):
    torch.manual_seed(0)
    model = random_target(SMALL, max(CONTEXTS) + 64, torch.device("cpu"), torch.float32)
    drafts = make_drafts(model, budget=256)
    with Run(tmp_path / "memory.jsonl", "memory", 600, quiet=True) as results:
        MemoryBenchmark(model, SMALL, drafts, CHUNK).run(CONTEXTS, results)
    rows = [record for record in results.records if record["kind"] == "memory"]
    extra = {(row["part"], row["method"], row["context"]): row["extra_bytes"] for row in rows}
    grown, kv = CONTEXTS[1] - CONTEXTS[0], cache_bytes(SMALL, 1, CONTEXTS[1] - CONTEXTS[0], torch.float32)
    for name, draft in drafts.items():
        growth = extra["decode", name, CONTEXTS[1]] - extra["decode", name, CONTEXTS[0]]
        if name.startswith("SpecAttn"):
            selected = draft.setting("sparse_ratio") * kv
            assert 0.9 * selected < growth < selected * (1 + 1 / SMALL.layers) + (SCORE_SHARE + 0.01) * kv
        else:
            assert growth <= (TEXT_BYTES + (INDEX_BYTES if name == "n-grams" else 0)) * grown
    for context in CONTEXTS:
        assert extra["prefill", PLAIN, context] <= extra["prefill", HF, context] + TEXT_BYTES * context
