"""Whether captures work on this GPU, before anything is timed."""

from collections.abc import Callable

import torch

from benchmarks.gpu_run import GpuRun
from benchmarks.harness import Skip
from hf_longspec.generation.compiled.cuda_graphs import WARM_UP, capture


def captures(run: GpuRun) -> None:
    """Capture, fail, capture again, let all graphs end and capture, and capture for two targets."""
    if not run.is_cuda:
        raise Skip("steps are captured as CUDA graphs, and there is no CUDA device")
    numbers = torch.randn(64, 64, device=run.device)
    expected = numbers @ numbers
    one, other = torch.nn.Module(), torch.nn.Module()
    alive: list[Callable[[], None]] = []
    calls: list[int] = []

    def product(target: torch.nn.Module) -> None:
        (found,), replay = capture(lambda: [numbers @ numbers], run.device, target)
        alive.append(replay)
        for again in alive:  # earlier graphs, too
            again()
        if not torch.equal(found, expected):
            raise RuntimeError("a replay computed something else")

    def reads_in_the_capture() -> list[torch.Tensor]:
        calls.append(len(calls))
        return [numbers * numbers.sum().item()] if len(calls) > WARM_UP else [numbers]

    def fail() -> None:
        try:
            capture(reads_in_the_capture, run.device, one)
        except RuntimeError:
            return
        raise AssertionError("a read during a capture did not fail")

    def drop() -> None:
        alive.clear()
        product(one)

    steps = {"first": lambda: product(one), "failure": fail, "after a failure": lambda: product(one)}
    steps |= {"after the end of all graphs": drop, "another target": lambda: product(other)}
    for name, step in steps.items():
        with run.attempt(step=name):
            step()
            run.write("capture", step=name)
