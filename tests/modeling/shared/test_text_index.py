"""Text indexes against searches through all positions: occurrences, the pool's ranking, suffix lookup."""

from hypothesis import given
from hypothesis import strategies as st

from hf_longspec.modeling.shared.ngrams import MAX_OCCURRENCES, MAX_SUFFIX, TextIndex, TextMemory


def index_of(text, longest=3, capacity=2**12):
    index = TextIndex(longest, capacity)
    index.extend(text)
    return index


TEXTS = st.lists(st.integers(3, 6), max_size=90)


@given(TEXTS, TEXTS, st.integers(1, 4), st.integers(1, 40), st.integers(1, 9))
def test_occurrences_match_a_search(unindexed, indexed, longest, capacity, limit):
    index = TextIndex(longest, capacity)
    index.extend(unindexed, indexed=False)
    for token in indexed:  # one by one, as in decoding
        index.extend([token])
    text = unindexed + indexed
    end, size = len(text), 1 << (capacity - 1).bit_length()
    for length in range(1, longest + 1):
        found = [
            position
            for position in range(end - 1, max(len(unindexed), length, end - size) - 1, -1)
            if end >= length and text[position - length : position] == text[end - length :]
        ]
        assert index.occurrences(length, limit) == found[:limit]


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
    assert list(index_of(text, longest).pool(length, count=1000)) == ranked(text, longest, length)


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
    paths = list(index_of(text, longest).lookup(length))
    if best is None or not lengths[best]:
        assert paths == []
    else:
        assert paths[0] == tuple((text[best:] * length)[:length])
        found = index_of(text, longest).lookup(length)
        assert found[paths[0]] == min(lengths[best], MAX_SUFFIX)


def test_the_time_of_a_query_is_bounded():
    """The number of compared occurrences and the length of a match are bounded."""
    looks = []

    class Counting(TextIndex):
        def _suffix_length(self, position, end):
            looks.append(len(end))
            return super()._suffix_length(position, end)

    index = Counting(3, 2**12)
    index.extend([4] * 3000)
    assert list(index.lookup(5)) == [(4,) * 5]
    assert len(looks) == MAX_OCCURRENCES and set(looks) == {MAX_SUFFIX}


SHORT = st.lists(st.integers(3, 6), max_size=10)


@given(st.lists(SHORT, min_size=1, max_size=3), SHORT.filter(len), st.integers(1, 4), st.integers(1, 9))
def test_a_memory_is_searched_text_by_text(texts, text, longest, length):
    """The path after the longest match in any text comes first, and no path leads from one text into the next."""
    memory = TextMemory(longest, 2**12)
    memory.remember(texts)
    index = TextIndex(longest, 2**12, memory.index)
    index.extend(text)
    found = []
    for old in texts:
        for place in range(1, len(old)):
            most = min(place, len(text))
            match = next((n for n in range(most) if old[place - 1 - n] != text[-1 - n]), most)
            found.append((match, tuple(old[place : place + length])))
    best, own = max((match for match, _ in found), default=0), max(suffix_lengths(text).values(), default=0)
    first = list(index.lookup(length))[:1]
    if best > own:
        assert first[0] in [path for match, path in found if match == best]
    else:
        assert first == list(index_of(text, longest).lookup(length))[:1]


def test_a_memory_keeps_the_last_tokens():
    memory = TextMemory(2, 64)
    for start in range(0, 600, 6):
        memory.remember([range(start, start + 6)])
    assert len(memory.index.text) <= 2 * 64 and memory.index.text[-7:].tolist() == [*range(594, 600), -1]
    index = TextIndex(2, 64, memory.index)
    index.extend([590, 591])
    assert list(index.lookup(9)) == [(592, 593)]
    index.extend([6, 7])
    assert list(index.lookup(9)) == []
