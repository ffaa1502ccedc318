"""Peak memory that a call needs beyond what was there before it, from the allocators' own books.

On a CPU every tensor's memory comes from torch's allocator, which tells the profiler (`profile_memory`) the size of
each block that it hands out or takes back. That includes the scratch buffers inside an operation, which no hook on
operations sees, and excludes what `malloc` keeps for later, which the resident size of the process would show. Only
blocks handed out under the profiler are followed to their end, so what a call may replace is made under it: `prepare`.

What is not torch's, numpy's buffers and Python's own objects, is counted by `tracemalloc`; numpy reports to it. The two
peaks need not coincide, so their sum is an upper bound. Pages of zeros count in full, touched or not.
"""

import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

MEASURED = "hf_longspec: measured"


@dataclass(frozen=True)
class Peak:
    """Highest number of bytes beyond the state before the call, per allocator.

    Args:
        torch_bytes (`int`): Tensors and the scratch buffers of operations.
        python_bytes (`int`): numpy's buffers and Python's objects.
    """

    torch_bytes: int
    python_bytes: int

    @property
    def total(self) -> int:
        """Never less than what both had at the same time."""
        return self.torch_bytes + self.python_bytes


def peak_memory(function: Callable[..., Any], prepare: Callable[[], tuple[Any, ...]] = tuple) -> tuple[Peak, Any]:
    """Peak of one call on the CPU, and what the call returned.

    Args:
        function (`Callable`): What is measured.
        prepare (`Callable`, *optional*): Gives the arguments of `function`. They are there before the call and do not
            count; where the call gives one back and takes the same size again, nothing is added. No other reference to
            them is kept.
    """
    with _traced(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        arguments = list(prepare())
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        with record_function(MEASURED):
            result = function(*(arguments.pop(0) for _ in range(len(arguments))))
        python = tracemalloc.get_traced_memory()[1] - before
    return Peak(_highest(profiler), max(0, python)), result


def highest_sum(changes: Sequence[int]) -> int:
    """The highest value that a running sum from 0 reaches.

    >>> highest_sum([4, -1, 3, -6, 2])
    6
    """
    level = highest = 0
    for change in changes:
        level += change
        highest = max(highest, level)
    return highest


def _highest(profiler: Any) -> int:
    """Bytes of torch's allocator at the highest point of what was measured, above its beginning."""
    events = profiler.profiler.kineto_results.events()
    (measured,) = [event for event in events if event.name() == MEASURED]
    found = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return highest_sum([size for moment, size in found if measured.start_ns() <= moment <= measured.end_ns()])


@contextmanager
def _traced() -> Iterator[None]:
    if tracemalloc.is_tracing():
        yield
        return
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()
