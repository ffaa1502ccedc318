"""Clocks, turns and time limits."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from transformers.generation.streamers import BaseStreamer

MIN_REPEATS = 5


class TokenClock(BaseStreamer):
    """A streamer that notes when tokens arrive: the same clock for `generate` and for our loop.

    `generate` hands it the prompt first, then the tokens of each step, or our loop one token after another. Decoding is
    what happens between the first arrival and the last, so neither prefill nor the preparation of inputs and caches is
    in it, nor the tokens that arrived first.

    Args:
        batch_size (`int`): Rows that are decoded together; a step of plain `generate` has one token of each.

    >>> clock = TokenClock(1, iter([0.0, 3.0, 3.5, 4.0]).__next__)
    >>> for value in ("prompt", torch.tensor([7]), torch.tensor([7, 8]), torch.tensor([9])):
    ...     clock.put(value)
    >>> clock.first_tokens, clock.num_tokens, clock.decode_seconds
    (1, 3, 1.0)
    """

    def __init__(self, batch_size: int = 1, now: Callable[[], float] = time.perf_counter):
        self.batch_size = batch_size
        self._now = now
        self._times: list[float] = []
        self._tokens: list[int] = []

    def put(self, value: object) -> None:
        """Note the time, and how many tokens per row came."""
        self._times.append(self._now())
        self._tokens.append(value.numel() // self.batch_size if isinstance(value, torch.Tensor) else 1)

    def end(self) -> None:
        """Nothing to close."""

    @property
    def first_tokens(self) -> int:
        """Tokens per row that came first."""
        return self._tokens[1] if len(self._tokens) > 1 else 0

    @property
    def num_tokens(self) -> int:
        """Tokens per row after those that came first."""
        return sum(self._tokens[2:])

    @property
    def decode_seconds(self) -> float:
        """From the first arrival to the last."""
        return self._times[-1] - self._times[1] if len(self._times) > 2 else 0.0


def in_turns(names: Sequence[str], repeats: int) -> Iterator[tuple[int, str]]:
    """`(repeat, name)` with all names in every repeat, each repeat beginning with another one.

    >>> [name for _, name in in_turns(["a", "b", "c"], 2)]
    ['a', 'b', 'c', 'b', 'c', 'a']
    """
    for repeat in range(repeats):
        first = repeat % len(names)
        for name in [*names[first:], *names[:first]]:
            yield repeat, name


def time_in_turns(functions: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Call functions that return seconds in turns; a list of seconds for each, one entry per repeat."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _, name in in_turns(list(functions), repeats):
        seconds[name].append(functions[name]())
    return seconds


def seconds_of(function: Callable[[], object]) -> float:
    """How long one call takes."""
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


class TimeGuard:
    """Keeps a benchmark within its minutes: a section that would not fit is left out, and the result says so.

    Args:
        minutes (`float`): From now on.
        now (`Callable`, *optional*): Clock in seconds.
    """

    def __init__(self, minutes: float, now: Callable[[], float] = time.perf_counter):
        self._now = now
        self._started = now()
        self._limit = minutes * 60

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._now() - self._started

    @property
    def left(self) -> float:
        """Seconds that remain, 0 at least."""
        return max(0.0, self._limit - self.elapsed)

    def fits(self, seconds: float) -> bool:
        """Whether a section of this length would end in time."""
        return seconds <= self.left
