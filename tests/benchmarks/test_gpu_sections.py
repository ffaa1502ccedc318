"""The GPU benchmark on a simulated CUDA device: sections that end badly end alone, and the table is printed."""

import os
import signal
import time
from dataclasses import replace

import pytest
import torch

from benchmarks import gpu, gpu_goals, gpu_run
from benchmarks.gpu_goals import GRAPH, NOT_MEASURED, TRITON
from benchmarks.gpu_run import SMOKE, Stop
from hf_longspec.cli.files import of_kind, read_records

pytest.importorskip("triton", reason="captured steps need Triton's kernels")
from tests.benchmarks import simulated_gpu
from tests.benchmarks.test_gpu_goals import verdicts
from tests.generation.test_on_simulated_cuda import simulated

SIZES = gpu_goals.Sizes(*simulated_gpu.SIZES)


def lost(run):
    run.write("capture", step="before it was lost")
    raise Stop("the device is lost: illegal access")


def without_memory(run):
    raise torch.OutOfMemoryError("no memory")


def cut_off(run):
    run._file.write('{"kind": "kern')
    run._file.flush()
    os._exit(3)


ENDS = {
    "lost": (lost, "the device is lost: illegal access: the rest of it"),
    "hangs": (lambda run: time.sleep(60), "killed after 0.5 s"),
    "killed": (lambda run: os.kill(os.getpid(), signal.SIGKILL), "its process ended with -9"),
    "without memory": (without_memory, "out of memory: no memory"),
    "cut off": (cut_off, "its process ended with 3"),
}


@pytest.fixture
def device(monkeypatch):
    """The simulated device, its clock, and the sizes of a smoke test in place of those of 8B parameters."""
    monkeypatch.setattr("triton.testing.do_bench", simulated_gpu.bench)
    monkeypatch.setattr("triton.testing.do_bench_cudagraph", simulated_gpu.bench_graph)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(gpu_goals, "SIZES", SIZES)
    plan = replace(SMOKE, contexts=(SIZES.context,), points=((1, SIZES.context), (2, 48)), patience=1.0)
    monkeypatch.setitem(gpu_run.PLANS, gpu_run.GPU_PLAN, plan)
    with simulated() as cuda:
        yield cuda


@pytest.mark.soak
def test_a_section_that_ends_badly_ends_alone(device, tmp_path, monkeypatch, capsys):
    """Before the last section of a run, whose every other section measures what it does alone."""
    wanted = list(gpu.SECTIONS)
    limits = {"hangs": 0.5}
    bad = {end: gpu.Section(measure, limits.get(end, 60)) for end, (measure, _) in ENDS.items()}
    *first, last = ((section, gpu.SECTIONS[section]._replace(seconds=300)) for section in wanted)
    monkeypatch.setattr(gpu, "SECTIONS", {**dict(first), **bad, last[0]: last[1]})
    output = tmp_path / "gpu.jsonl"
    gpu.main(["--quiet", "--threads", "1", "--dtype", "float32", "--backends", TRITON, "--output", str(output)])
    records, printed = read_records(output), capsys.readouterr().out
    for end, (_, reason) in ENDS.items():
        found = [row["reason"] for kind in ("failed", "skipped") for row in of_kind(records, kind, section=end)]
        assert found == [reason]
    assert {row["section"] for row in of_kind(records, "failed")} < set(ENDS)
    assert of_kind(records, "capture", step="before it was lost") and len(of_kind(records, "capture")) == 6
    for row in of_kind(records, "forward", forward="ours", mode=GRAPH):
        assert row["captures"] == 1 and row["replays"] and not row["warnings"]
    assert {row["section"] for row in of_kind(records, "section")} >= set(wanted) and records[-1]["kind"] == "end"
    table = verdicts(records)
    assert len(table) == 8 and not [goal for goal, measured, _ in table if measured == NOT_MEASURED]
    assert gpu_goals.judged(records) in printed and output.with_suffix(".md").read_text() in printed
