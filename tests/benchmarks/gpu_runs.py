"""For the tests of the GPU benchmark: the tiny plan, backends and runs that last for one test."""

import dataclasses
from contextlib import contextmanager

import torch

from benchmarks.floors import Machine
from benchmarks.gpu_device import Device
from benchmarks.gpu_report import gpu_report
from benchmarks.gpu_run import PLANS, GpuRun
from hf_longspec.attention_backends import registry
from hf_longspec.attention_backends.registry import register_backend
from hf_longspec.attention_backends.torch_backend import TORCH_BACKEND
from hf_longspec.bench.progress import Progress
from hf_longspec.bench.results import ResultFile, TimeGuard

CPU = torch.device("cpu")
PLAN = PLANS["tiny"]


def of(records, kind, **where):
    return [r for r in records if r["kind"] == kind and all(r.get(k) == v for k, v in where.items())]


@contextmanager
def runs_in(folder):
    """A function that makes runs; every line of the last one is in `run.results.records`."""
    opened = []

    def make(backends=("hf_longspec_torch",), minutes=5, plan=PLAN, dtype=torch.bfloat16, **device):
        results = ResultFile(folder / "run.jsonl", "gpu", gpu_report, TimeGuard(minutes), {})
        opened.append(results)
        target = Device(CPU, plan.repeats, **device)
        return GpuRun(plan, target, dtype, list(backends), results, Progress(1, quiet=True), Machine("m", 1.0, 1.0))

    yield make
    for results in opened:
        results.__exit__(None, None, None)


@contextmanager
def registered_backends():
    """A function that registers backends made from the torch backend."""
    names = []

    def register(name, **functions):
        names.append(name)
        return register_backend(dataclasses.replace(TORCH_BACKEND, name=name, hybrid_attention=None, **functions))

    yield register
    for name in names:
        del registry._backends[name], registry._priorities[name]
    registry._selected.clear()
