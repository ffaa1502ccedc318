"""A hint for targets in half precision on a CPU that has no instructions for it."""

import time
from functools import cache
from typing import Any

import torch
from transformers.utils import logging

from ..call import HALF_PRECISION
from ..special_case import SpecialCase

logger = logging.get_logger(__name__)

# Rows and width of the products that are timed, as of a verification, and how often, after one that is not counted.
ROWS, WIDTH, SAMPLES = 8, 1024, 3
# How many times faster float32 must be for a hint.
FASTER = 1.5


class HalfPrecision(SpecialCase):
    """Calls on a CPU with a target in bfloat16 or float16 that is large enough for its speed to matter."""

    case = HALF_PRECISION

    def change(self, call: Any) -> None:
        """Say once that float32 is faster, if it is on this machine."""
        dtype = call.target.model.dtype
        if (ratio := slowdown(dtype)) >= FASTER:
            name = str(dtype).removeprefix("torch.")
            logger.warning_once(
                f"The target is in {name}, in which this CPU needs {ratio:.1f} times as long for a product as in "
                "float32. Load it with dtype='float32', which needs twice the memory."
            )


@cache
def slowdown(dtype: torch.dtype) -> float:
    """Return how many times as long as in float32 a product takes in `dtype` on this CPU, measured in one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # thread_time() counts this one, without what other programs do
    try:
        return _seconds(dtype) / _seconds(torch.float32)
    finally:
        torch.set_num_threads(threads)


def _seconds(dtype: torch.dtype) -> float:
    weight, rows = torch.ones(WIDTH, WIDTH, dtype=dtype), torch.ones(ROWS, WIDTH, dtype=dtype)
    samples = []
    for _ in range(SAMPLES + 1):
        started = time.thread_time()
        torch.nn.functional.linear(rows, weight)
        samples.append(time.thread_time() - started)
    return min(samples[1:])
