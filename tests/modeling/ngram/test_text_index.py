"""Hash chains over a text against a search through all positions."""

from hypothesis import given
from hypothesis import strategies as st

from hf_longspec.modeling.ngram.generation_ngram import TextIndex

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


@given(TEXTS.filter(len), st.data())
def test_a_copy_past_the_end_of_the_text_repeats(text, data):
    index = TextIndex(1, 64)
    index.extend(text)
    position, count = data.draw(st.integers(0, len(text) - 1)), data.draw(st.integers(0, 30))
    expected = text[position:]
    while len(expected) < count:
        expected = expected + text[position:]
    assert index.after(position, count) == tuple(expected[:count])


def test_tables_keep_their_size_and_drop_the_oldest():
    index = TextIndex(longest_key=3, capacity=1000)
    before = index.nbytes
    index.extend(token % 5000 for token in range(20_000))
    assert index.nbytes - before == 4 * 20_000  # 4 bytes per token of the text
    index.extend([3976, 3977])  # last seen 1022 and more positions ago
    assert index.occurrences(2, limit=9) == [20_000 - 1022]
    index.extend([9, 3974, 3975])  # 1027 positions ago
    assert index.occurrences(2, limit=9) == []


def test_memory_of_100_thousand_tokens():
    index = TextIndex(longest_key=3, capacity=2**17)
    index.extend((token * token) % 4093 for token in range(100_000))
    assert index.nbytes < 2**22
    assert index.occurrences(3, limit=32)
