# Published with a draft by hf_longspec, Apache-2.0.
"""Which continuations the last tokens of a text had before, by how often."""

from collections import Counter

from .generation_text_index import TextIndex

# Occurrences of one key that are counted, the most recent ones: bounds the time of a query.
MAX_OCCURRENCES = 32


class NgramPool:
    """The n-grams of one row: keys are its last confirmed tokens, values what followed them, with counts.

    Args:
        index ([`TextIndex`]): The row's text.

    >>> index = TextIndex(longest_key=2, capacity=64)
    >>> index.extend([1, 2, 3, 9, 2, 3, 8, 2, 3, 9, 2])
    >>> NgramPool(index).paths(length=2, count=3)
    [(3, 8), (3, 9)]
    """

    def __init__(self, index: TextIndex):
        self.index = index

    def paths(self, length: int, count: int) -> list[tuple[int, ...]]:
        """At least `count` different continuations of `length` tokens, as far as there are any, best first.

        Those of longer keys come first; of one key, the more frequent ones, and of equally frequent ones the later.
        """
        found: dict[tuple[int, ...], None] = {}
        for key_length in range(self.index.longest_key, 0, -1):
            positions = self.index.occurrences(key_length, MAX_OCCURRENCES)
            counts = Counter(self.index.after(position, length) for position in positions)
            # most_common keeps the order of equal counts: the most recent first
            found.update(dict.fromkeys(path for path, _ in counts.most_common()))
            if len(found) >= count:
                break
        return list(found)
