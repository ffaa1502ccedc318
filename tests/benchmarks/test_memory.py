"""The measurement of peak memory counts what a call allocates."""

import numpy as np
import torch

from benchmarks.memory import Peak, peak_memory

MIB = 2**20
# Memory of Python itself in any call: frames, caches of the interpreter, the profiler's own objects.
PYTHON_NOISE = 2**18


def test_the_measurement_counts_tensors_and_numpy_from_the_beginning_of_the_call():
    peak, result = peak_memory(lambda: torch.zeros(MIB // 4).add(1.0).sum().item())
    assert result == MIB // 4
    assert 2 * MIB <= peak.torch_bytes < 2 * MIB + 1024  # the zeros and the sum of them with 1
    assert peak.python_bytes < PYTHON_NOISE
    peak, _ = peak_memory(lambda: np.zeros(MIB, np.uint8).sum())
    assert peak.torch_bytes == 0 and MIB <= peak.python_bytes < MIB + PYTHON_NOISE
    assert Peak(3, 4).total == 7
