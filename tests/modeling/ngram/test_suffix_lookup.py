"""Suffix lookup against a comparison of every position with the end of the text, token by token."""

from hypothesis import given
from hypothesis import strategies as st

from hf_longspec.modeling.ngram.generation_ngram import MAX_OCCURRENCES, MAX_SUFFIX, TextIndex


def paths_of(text, length, longest=3):
    index = TextIndex(longest, 2**12)
    index.extend(text)
    return index.lookup(length)


def suffix_lengths(text):
    """Return for each earlier position how many tokens before it match the end of the text, by a double loop."""
    found = {}
    for place in range(1, len(text)):
        length = 0
        while length < place and text[place - 1 - length] == text[len(text) - 1 - length]:
            length += 1
        found[place] = length
    return found


@given(st.lists(st.integers(0, 2), min_size=1, max_size=MAX_SUFFIX), st.integers(1, 4), st.integers(1, 6))
def test_the_best_path_follows_the_longest_suffix(text, longest, length):
    """Texts are too short for the bounds of a query. The most recent of equally long suffixes comes first."""
    lengths = suffix_lengths(text)
    best = max(lengths, key=lambda place: (lengths[place], place), default=None)
    paths = paths_of(text, length, longest)
    if best is None or not lengths[best]:
        assert paths == []
    else:
        assert paths[0] == tuple((text[best:] * length)[:length])


@given(st.lists(st.integers(0, 2), min_size=1, max_size=MAX_SUFFIX), st.integers(1, 5))
def test_the_other_paths_follow_shorter_suffixes(text, length):
    lengths = {place: found for place, found in suffix_lengths(text).items() if found}
    order = sorted(lengths, key=lambda place: (lengths[place], place), reverse=True)
    expected = list(dict.fromkeys(tuple((text[place:] * length)[:length]) for place in order))
    assert paths_of(text, length, longest=1) == expected


def test_the_longest_match_comes_before_the_first_and_the_last():
    text = [1, 2, 50, 7, 8, 9, 1, 2, 60, 4, 9, 1, 2, 70, 6, 8, 9, 1, 2]
    assert paths_of(text, 1) == [(60,), (70,)]


def test_the_time_of_a_query_is_bounded():
    """The number of compared occurrences and the length of a match are bounded."""
    looks = []

    class Counting(TextIndex):
        def _suffix_length(self, position, end):
            looks.append(len(end))
            return super()._suffix_length(position, end)

    index = Counting(3, 2**12)
    index.extend([4] * 3000)
    assert index.lookup(5) == [(4,) * 5]
    assert len(looks) == MAX_OCCURRENCES and set(looks) == {MAX_SUFFIX}
