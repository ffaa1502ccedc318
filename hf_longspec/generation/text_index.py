"""Hash chains over the committed tokens of one batch row, which find earlier occurrences of its last tokens.

This is how zlib finds matches (https://www.rfc-editor.org/rfc/rfc1951, section 4), with tokens instead of bytes and one
chain per key length. Keys contain committed tokens only. Tables have a fixed size: a new position replaces the oldest.
"""

from array import array
from collections.abc import Iterable

BYTES_PER_ENTRY = array("i").itemsize


class TextIndex:
    """Keep the text of one row, and for each key length the positions that follow each key.

    Appending a token takes constant time per key length, and the tables do not grow. The text itself takes 4 bytes per
    token.

    Args:
        longest_key (`int`): Tokens of the longest key. Keys of 1 to `longest_key` tokens are indexed.
        capacity (`int`): Number of positions that are kept, rounded up to a power of two.

    >>> index = TextIndex(longest_key=2, capacity=8)
    >>> index.extend([5, 7, 5, 8, 5])
    >>> index.occurrences(1, limit=9), index.after(3, 4)
    ([3, 1], (8, 5, 8, 5))
    """

    def __init__(self, longest_key: int, capacity: int):
        self.longest_key = longest_key
        self.text = array("i")
        self.size = 1 << (capacity - 1).bit_length()
        # for key length i + 1: _heads[i] maps the hash of a key to the last position after it, _previous[i] maps each
        # position to the one before it in the chain
        self._heads = [self._table() for _ in range(longest_key)]
        self._previous = [self._table() for _ in range(longest_key)]

    @property
    def nbytes(self) -> int:
        """Size of tables and text in bytes."""
        return BYTES_PER_ENTRY * (2 * self.longest_key * self.size + len(self.text))

    def extend(self, tokens: Iterable[int], indexed: bool = True) -> None:
        """Append committed tokens.

        Args:
            tokens (iterable of `int`): Tokens in order.
            indexed (`bool`, *optional*, defaults to `True`): Whether their positions can be found. Other tokens are
                only part of the keys of later positions.
        """
        for token in tokens:
            if indexed:
                self._remember(len(self.text))
            self.text.append(token)

    def occurrences(self, length: int, limit: int) -> list[int]:
        """Return at most `limit` positions after earlier occurrences of the last `length` tokens, latest first."""
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
        """Return `count` tokens from `position` on. If the text ends earlier, the copied tokens are repeated."""
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
        """Return the slots of the keys of 1, 2, ..., `longest` tokens before `end`."""
        code, slots = 0, []
        for length in range(1, longest + 1):
            code = hash((code, self.text[end - length]))
            slots.append(code % self.size)
        return slots

    def _table(self) -> array:
        return array("i", bytes(BYTES_PER_ENTRY * self.size))  # position 0 follows no key, so 0 marks an empty slot
