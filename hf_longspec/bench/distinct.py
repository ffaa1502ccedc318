"""Distinct-n: how little a text repeats itself."""

from collections.abc import Sequence

# Sizes of the n-grams that are reported.
SIZES = (1, 2, 3, 4)


def distinct(tokens: Sequence[int], window: int = 1000) -> list[tuple[float, float]]:
    """Different n-grams over all n-grams for n = 1 to 4: mean over whole windows of a text, and over the text at once.

    Over a long text the second number falls with the length whatever is written, as a vocabulary is finite. The metric
    is that of Li et al. 2016 (https://huggingface.co/papers/1510.03055); TokenSwift reports it for 100,000 tokens
    without saying how it is averaged, so its numbers cannot be compared with either.

    Args:
        tokens (`Sequence[int]`): At least 4.
        window (`int`, *optional*, defaults to 1000): Tokens per window; a shorter text is one window.

    Raises:
        ValueError: If the text or the window is too short for the longest n-grams.

    >>> distinct([7, 7, 7, 7, 8])[:2]
    [(0.4, 0.4), (0.5, 0.5)]
    """
    if min(len(tokens), window) < SIZES[-1]:
        raise ValueError(
            f"{len(tokens)} tokens in windows of {window}: expected at least {SIZES[-1]} of both, the largest n."
        )
    starts = range(0, len(tokens) - window + 1, window) or [0]
    windows = [tokens[start : start + window] for start in starts]
    return [(sum(_share(part, n) for part in windows) / len(windows), _share(tokens, n)) for n in SIZES]


def _share(tokens: Sequence[int], n: int) -> float:
    grams = list(zip(*(tokens[start:] for start in range(n)), strict=False))
    return len(set(grams)) / len(grams)
