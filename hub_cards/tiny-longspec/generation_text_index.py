# Published with a draft by hf_longspec, Apache-2.0.
"""Where the last tokens of a text occurred before: hash chains over the confirmed tokens of one batch row.

The way zlib finds matches (https://www.rfc-editor.org/rfc/rfc1951, section 4), with tokens for bytes and one chain per
length of the key. A key is made of confirmed tokens only. Tables have a fixed size: the oldest position leaves when a
new one needs its place.
"""

from array import array
from collections.abc import Iterable

BYTES_PER_ENTRY = array("i").itemsize


class TextIndex:
    """The text of one row, and for each key length the earlier positions behind the same key.

    Appending a token takes constant time per key length, and the tables keep their size. The text itself takes 4 bytes
    per token.

    Args:
        longest_key (`int`): Tokens of the longest key; shorter ones are indexed too.
        capacity (`int`): Positions that are remembered, rounded up to a power of two.

    >>> index = TextIndex(longest_key=2, capacity=8)
    >>> index.extend([5, 7, 5, 8, 5])
    >>> index.occurrences(1, limit=9), index.after(3, 4)
    ([3, 1], (8, 5, 8, 5))
    """

    def __init__(self, longest_key: int, capacity: int):
        self.longest_key = longest_key
        self.text = array("i")
        self.size = 1 << (capacity - 1).bit_length()
        # of each length - 1: the last position behind a key by its hash, and before each position the one before it
        self._heads = [self._table() for _ in range(longest_key)]
        self._previous = [self._table() for _ in range(longest_key)]

    @property
    def nbytes(self) -> int:
        """Bytes of tables and text."""
        return BYTES_PER_ENTRY * (2 * self.longest_key * self.size + len(self.text))

    def extend(self, tokens: Iterable[int], indexed: bool = True) -> None:
        """Append confirmed tokens; those that are not `indexed` serve as keys for what follows and are never found."""
        for token in tokens:
            if indexed:
                self._remember(len(self.text))
            self.text.append(token)

    def occurrences(self, length: int, limit: int) -> list[int]:
        """Positions behind earlier occurrences of the last `length` tokens, at most `limit`, the most recent first."""
        end, found = len(self.text), list[int]()
        if length > end:
            return found
        key, previous = self.text[end - length :], self._previous[length - 1]
        position = self._heads[length - 1][self._slots(end, length)[-1]]
        oldest = max(1, end - self.size)
        while position >= oldest and len(found) < limit:
            if self.text[position - length : position] == key:  # another key may share the slot
                found.append(position)
            position = previous[position % self.size]
        return found

    def after(self, position: int, count: int) -> tuple[int, ...]:
        """The `count` tokens from an earlier `position` on; where the text ends, the copy goes on with itself."""
        copied = tuple(self.text[position : position + count])
        if len(copied) == count:
            return copied
        return tuple(copied[place % len(copied)] for place in range(count))

    def _remember(self, position: int) -> None:
        slots = self._slots(position, min(self.longest_key, position))
        for heads, previous, slot in zip(self._heads, self._previous, slots, strict=False):
            previous[position % self.size] = heads[slot]
            heads[slot] = position

    def _slots(self, end: int, longest: int) -> list[int]:
        """Where the keys of 1, 2, ... tokens before `end` are kept."""
        code, slots = 0, []
        for length in range(1, longest + 1):
            code = hash((code, self.text[end - length]))
            slots.append(code % self.size)
        return slots

    def _table(self) -> array:
        return array("i", bytes(BYTES_PER_ENTRY * self.size))  # zeros: nothing is found at position 0
