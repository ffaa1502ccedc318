"""Distinct-n: how much of a text is not a repetition of itself."""

from collections.abc import Sequence

# Orders of n-grams that Distinct-n is reported for.
ORDERS = (1, 2, 3, 4)
# Tokens over which a text of any length is looked at. Divides the lengths at which long texts are compared.
WINDOW = 1000


def distinct(tokens: Sequence[int], n: int, window: int = WINDOW) -> dict[str, float]:
    """Distinct-n: how much of a text is not a repetition of itself, over the whole text and averaged over windows.

    Distinct-n counts the different n-grams and divides by the number of all (after Li et al., 2016,
    https://huggingface.co/papers/1510.03055). The value of a whole text falls with its length, because its vocabulary
    is finite: texts of different lengths cannot be compared by it. TokenSwift
    (https://huggingface.co/papers/2502.18890) reports values up to 0.95 for texts of 100,000 tokens, which have fewer
    different words than that, and does not name what it averaged over. So both are given here: `corpus` is that of the
    whole text; `windowed` is the mean over successive windows of fixed length, n-grams across their borders not
    counted, and does not depend on the length.

    Args:
        tokens (`Sequence[int]`): The text. The rest after the last whole window counts for `corpus` only, but a
            text that is shorter than a window is one.
        n (`int`): Length of the n-grams; usual are 1 to 4.
        window (`int`, *optional*, defaults to 1000): Tokens per window, at least `n`.

    Returns:
        `dict[str, float]` with `windowed` and `corpus`, each in (0, 1].

    Raises:
        ValueError: If the text or the window has no n-gram.

    >>> distinct([1, 2, 1, 2, 3, 4], n=1, window=2)
    {'windowed': 1.0, 'corpus': 0.6666666666666666}
    """
    if n < 1 or min(window, len(tokens)) < n:
        raise ValueError(
            f"n={n}, window={window} and {len(tokens)} tokens: there must be an n-gram in the text and in a window. "
            "Pass n of at least 1, and at least n tokens."
        )
    starts = range(0, max(len(tokens) - window, 0) + 1, window)
    shares = [_share(tokens[start : start + window], n) for start in starts]
    return {"windowed": sum(shares) / len(shares), "corpus": _share(tokens, n)}


def _share(tokens: Sequence[int], n: int) -> float:
    """Different n-grams per n-gram."""
    ngrams = zip(*(tokens[start:] for start in range(n)), strict=False)  # the shortest of them ends it
    return len(set(ngrams)) / (len(tokens) - n + 1)
