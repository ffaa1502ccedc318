"""The ranking of an n-gram pool against a count in a double loop."""

from hypothesis import given
from hypothesis import strategies as st

from hf_longspec.modeling.ngram.generation_ngram import MAX_OCCURRENCES, TextIndex


def pool_of(text, longest=3, capacity=256):
    index = TextIndex(longest, capacity)
    index.extend(text)
    return index


def ranked(text, longest, length):
    """Return every continuation, sorted by key length, count and last place."""
    best = {}
    end = len(text)
    for size in range(1, longest + 1):  # longer keys overwrite the entries of shorter ones
        seen = {}
        for place in range(size, end):
            if text[place - size : place] == text[end - size :]:
                path = tuple((text[place:] * length)[:length])
                count, _ = seen.get(path, (0, 0))
                seen[path] = count + 1, place
        for path, (count, place) in seen.items():
            best[path] = (size, count, place)
    return sorted(best, key=best.get, reverse=True)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=MAX_OCCURRENCES), st.integers(1, 4), st.integers(1, 5))
def test_longest_key_then_count_then_recency(text, longest, length):
    """In texts this short all occurrences of a key are counted."""
    assert pool_of(text, longest).pool(length, count=1000) == ranked(text, longest, length)


@given(st.lists(st.integers(0, 1), min_size=1, max_size=60), st.integers(1, 6))
def test_fewer_paths_are_the_first_of_all(text, count):
    pool = pool_of(text)
    some, everything = pool.pool(2, count), pool.pool(2, 1000)
    assert some == everything[: len(some)]
    assert len(some) >= min(count, len(everything))


def test_only_recent_occurrences_are_counted():
    """A continuation that was frequent long ago is dropped."""
    old, new = [5, 1] * 100, [5, 2] * MAX_OCCURRENCES
    assert pool_of([*old, 9, *new, 5], longest=1).pool(1, count=9) == [(2,)]
    assert pool_of([*old, 9, *new[2:], 5], longest=1).pool(1, count=9) == [(2,), (1,)]


def test_nothing_is_found_in_a_text_without_repetition():
    assert pool_of(range(50)).pool(3, count=4) == []
    assert pool_of([]).pool(3, count=4) == []
