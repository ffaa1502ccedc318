"""Run `benchmarks/gpu.py` on a simulated CUDA device, in the sizes of `--smoke`.

    python tests/benchmarks/simulated_gpu.py --sections iterations --output gpu.jsonl

Every path of the command is that of a GPU: captured steps, pinned copies, graphs that are timed. Kernels are replaced
by the reference, and nothing is compiled, so the numbers mean nothing. It runs in a process of its own: the command is
started as a file, from a checkout, and nothing has to be installed.
"""

import os
import runpy
import sys
import time
from pathlib import Path
from unittest import mock

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported
ROOT = Path(__file__).resolve().parents[2]
REPEATS = 3
# Context, nodes and drafts of `--smoke`, in place of those of a target of 8B parameters.
SIZES = (64, 64, 5, 9, ("LongSpec, 2+2", "SpecAttn, gamma 2"))


def bench(function, **options):
    """`triton.testing.do_bench`, which needs a driver: milliseconds of a few calls."""
    import torch

    found = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        function()
        torch.cuda.synchronize()
        found.append(1e3 * (time.perf_counter() - started))
    return found


def bench_graph(function, **options):
    """`triton.testing.do_bench_cudagraph`: milliseconds of a few replays."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return bench(graph.replay)


def main():
    sys.path[0] = str(ROOT)
    import torch
    import triton.testing

    from benchmarks import gpu_goals, gpu_run
    from tests.generation.test_on_simulated_cuda import simulated

    torch.compile = lambda function, **options: function  # the simulation is a mode of torch, which dynamo skips
    replaced = {"do_bench": bench, "do_bench_cudagraph": bench_graph}
    with simulated(), mock.patch.multiple(triton.testing, **replaced):
        gpu_run.PLANS[gpu_run.GPU_PLAN] = gpu_run.SMOKE  # what a run without `--smoke` takes
        gpu_goals.SIZES = gpu_goals.Sizes(*SIZES)
        sys.argv[0] = str(ROOT / "benchmarks" / "gpu.py")
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
