"""Distinct-n against a double loop, on texts of any length."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.distinct_ngrams import ORDERS, distinct


def share(tokens, n):
    seen, count = set(), 0
    for start in range(len(tokens)):
        if start + n <= len(tokens):
            gram = ""
            for place in range(n):
                gram += f"{tokens[start + place]},"
            seen.add(gram)
            count += 1
    return len(seen) / count


def by_hand(tokens, n, window):
    windows = []
    while len(tokens) >= (len(windows) + 1) * window:
        windows.append(tokens[len(windows) * window : (len(windows) + 1) * window])
    shares = [share(part, n) for part in windows or [tokens]]
    return {"windowed": sum(shares) / len(shares), "corpus": share(tokens, n)}


@given(st.lists(st.integers(0, 5), min_size=4, max_size=60), st.integers(4, 25))
def test_equals_a_double_loop(tokens, window):
    for n in ORDERS:
        assert distinct(tokens, n, window) == pytest.approx(by_hand(tokens, n, window))


@pytest.mark.parametrize(("tokens", "n", "window"), [([1, 2], 3, 10), ([1, 2], 0, 10), ([1, 2, 3], 2, 1), ([], 1, 10)])
def test_no_ngram_is_refused(tokens, n, window):
    with pytest.raises(ValueError, match=rf"n={n}, window={window} and {len(tokens)} tokens.*at least n tokens"):
        distinct(tokens, n, window)
