"""What steps of one kind take and give, as measured."""

from collections import deque

# Steps over which tokens and times are taken.
TOKENS_WINDOW, SECONDS_WINDOW = 128, 16
# Imagined row-steps in which everything was accepted. They alone speak for a draft of which nothing was accepted yet,
# so that refuting it costs about OPTIMISM x depth plain steps whatever a step costs.
OPTIMISM = 2


class Pace:
    """Steps of one kind: tokens per row over `TOKENS_WINDOW` steps, time over `SECONDS_WINDOW`."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget everything."""
        self.count = self.row_steps = 0
        self._tokens: deque[float] = deque(maxlen=TOKENS_WINDOW)
        self._seconds: deque[float] = deque(maxlen=SECONDS_WINDOW)

    def add(self, tokens: int, rows: int, seconds: float) -> None:
        """Count a step in which `rows` growing rows emitted `tokens`."""
        self.count += 1
        self.row_steps += rows
        self._tokens.append(tokens / rows)
        self._seconds.append(seconds)

    @property
    def seconds(self) -> float:
        """Lower quartile, the fastest of three: a step may be disturbed, and is never helped."""
        return sorted(self._seconds)[(len(self._seconds) - 1) // 4]

    @property
    def tokens(self) -> float:
        """Mean per step and row."""
        return sum(self._tokens) / len(self._tokens)

    @property
    def error(self) -> float:
        """Standard error of `tokens`."""
        mean, count = self.tokens, len(self._tokens)
        variance = sum((tokens - mean) ** 2 for tokens in self._tokens) / max(1, count - 1)
        return (variance / count) ** 0.5

    @property
    def speed(self) -> float:
        """Tokens per second and row."""
        return self.tokens / max(self.seconds, 1e-9)

    def hoped_tokens(self, most: int) -> float:
        """The mean, its standard error and, fading, the hope that `most` tokens are emitted."""
        hope = OPTIMISM * (most - self.tokens) / (self.row_steps + OPTIMISM)
        return self.tokens + self.error + hope

    def lost(self, steps: int, plain_seconds: float) -> float:
        """Time that so many steps take longer than plain steps would, or 0."""
        return max(0.0, steps * (self.seconds - self.tokens * plain_seconds))
