"""Prompt lookup by the longest matching suffix instead of the first match."""

from collections.abc import Sequence

from .text_index import TextIndex

# Occurrences of a key that are compared, and tokens to which a match is followed back. Both bound the time of a query.
MAX_OCCURRENCES = 32
MAX_SUFFIX = 32


class SuffixLookup:
    """Propose the tokens that followed earlier occurrences of the longest suffix of one row's text.

    Prompt lookup decoding (https://github.com/apoorvumang/prompt-lookup-decoding) copies the tokens after the first
    match of a few tokens. Here the longest match comes first, and the most recent of equally long matches.

    Args:
        index ([`TextIndex`]): The text of the row.

    >>> index = TextIndex(longest_key=1, capacity=64)
    >>> index.extend([1, 2, 7, 7, 5, 2, 8, 8, 1, 2])
    >>> SuffixLookup(index).paths(length=2)
    [(7, 7), (8, 8)]
    """

    def __init__(self, index: TextIndex):
        self.index = index

    def paths(self, length: int) -> list[tuple[int, ...]]:
        """Return different continuations of `length` tokens, the one of the longest suffix first."""
        for key_length in range(self.index.longest_key, 0, -1):
            positions = self.index.occurrences(key_length, MAX_OCCURRENCES)
            if positions:
                end = self.index.text[-MAX_SUFFIX:]
                # sorting is stable also in reverse, so the most recent of equally long matches comes first
                positions.sort(key=lambda position: self._suffix_length(position, end), reverse=True)
                return list(dict.fromkeys(self.index.after(position, length) for position in positions))
        return []

    def _suffix_length(self, position: int, end: Sequence[int]) -> int:
        """Return the number of tokens before `position` that match the `end` of the text."""
        before = self.index.text[max(0, position - len(end)) : position]
        if before == end:
            return len(end)
        pairs = zip(reversed(before), reversed(end), strict=False)
        return next((length for length, (token, last) in enumerate(pairs) if token != last), len(before))
