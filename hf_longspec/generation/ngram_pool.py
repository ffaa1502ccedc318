"""An n-gram pool: earlier continuations of the last tokens of a text, ranked by frequency."""

from collections import Counter

from .text_index import TextIndex

# The most recent occurrences of one key that are counted. This bounds the time of a query.
MAX_OCCURRENCES = 32


class NgramPool:
    """Propose the most frequent continuations of the last committed tokens of one row.

    Args:
        index ([`TextIndex`]): The text of the row.

    >>> index = TextIndex(longest_key=2, capacity=64)
    >>> index.extend([1, 2, 3, 9, 2, 3, 8, 2, 3, 9, 2])
    >>> NgramPool(index).paths(length=2, count=3)
    [(3, 8), (3, 9)]
    """

    def __init__(self, index: TextIndex):
        self.index = index

    def paths(self, length: int, count: int) -> list[tuple[int, ...]]:
        """Return at least `count` different continuations of `length` tokens, or all if there are fewer, best first.

        Continuations are ordered by the length of their key, then by frequency, then by recency.
        """
        found: dict[tuple[int, ...], None] = {}
        for key_length in range(self.index.longest_key, 0, -1):
            positions = self.index.occurrences(key_length, MAX_OCCURRENCES)
            counts = Counter(self.index.after(position, length) for position in positions)
            # most_common keeps the order of equal counts, so the most recent comes first
            found.update(dict.fromkeys(path for path, _ in counts.most_common()))
            if len(found) >= count:
                break
        return list(found)
