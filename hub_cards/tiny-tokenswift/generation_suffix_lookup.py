# Published with a draft by hf_longspec, Apache-2.0.
"""What followed where the text ended as it ends now: prompt lookup by the longest suffix, not by the first match."""

from collections.abc import Sequence

from .generation_text_index import TextIndex

# Occurrences of the longest key that are compared, and tokens to which a match is followed back: bound a query's time.
MAX_OCCURRENCES = 32
MAX_SUFFIX = 32


class SuffixLookup:
    """Looks for the longest suffix of one row's text that occurred before.

    Prompt lookup decoding (https://github.com/apoorvumang/prompt-lookup-decoding) copies what follows the first place
    that matches a few tokens; the longest match, and of equally long ones the most recent, tells more.

    Args:
        index ([`TextIndex`]): The row's text.

    >>> index = TextIndex(longest_key=1, capacity=64)
    >>> index.extend([1, 2, 7, 7, 5, 2, 8, 8, 1, 2])
    >>> SuffixLookup(index).paths(length=2)
    [(7, 7), (8, 8)]
    """

    def __init__(self, index: TextIndex):
        self.index = index

    def paths(self, length: int) -> list[tuple[int, ...]]:
        """Different continuations of `length` tokens, that of the longest suffix first."""
        for key_length in range(self.index.longest_key, 0, -1):
            positions = self.index.occurrences(key_length, MAX_OCCURRENCES)
            if positions:
                end = self.index.text[-MAX_SUFFIX:]
                # sorting is stable also in reverse: of equally long matches, the most recent first
                positions.sort(key=lambda position: self._suffix_length(position, end), reverse=True)
                return list(dict.fromkeys(self.index.after(position, length) for position in positions))
        return []

    def _suffix_length(self, position: int, end: Sequence[int]) -> int:
        """How many of the tokens before `position` are those at the `end` of the text."""
        before = self.index.text[max(0, position - len(end)) : position]
        if before == end:
            return len(end)
        pairs = zip(reversed(before), reversed(end), strict=False)
        return next((length for length, (token, last) in enumerate(pairs) if token != last), len(before))
