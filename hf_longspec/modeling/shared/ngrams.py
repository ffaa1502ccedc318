"""N-grams: continuations of earlier occurrences of the current suffix, proposed as one trie, alone or with a draft.

[`TextIndex`] finds earlier occurrences of the last tokens of a row by hash chains, as zlib finds matches
(https://www.rfc-editor.org/rfc/rfc1951, section 4), with tokens instead of bytes and one chain per key length. Tables
have a fixed size: a new position replaces the oldest. Its `lookup` takes the continuation of the longest matching
suffix, and its `pool` ranks continuations by frequency.

N-grams follow TokenSwift (https://huggingface.co/papers/2502.18890, section 3.2), with two differences: keys consist of
confirmed tokens only, since a key with a predicted token is wrong whenever that token is, and paths that begin with the
same tokens share nodes.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ...generation.draft_tree import DraftTree, merge_trees, trie_of, trie_table
from ...generation.drafter import Binding, Drafter, DrafterAround, Verification

BYTES_PER_ENTRY = array("i").itemsize
# Occurrences of a key that are compared or counted, the most recent ones, and tokens to which a match is followed back.
# Both bound the time of a query.
MAX_OCCURRENCES = 32
MAX_SUFFIX = 32
# Stands between the texts of a memory. No text contains it, and no path leads over it.
SEPARATOR = -1


class TextIndex:
    """Keep the text of one row, and for each key length the positions that follow each key.

    Appending a token takes constant time per key length, and the tables do not grow. The text itself takes 4 bytes per
    token.

    Args:
        longest_key (`int`): Tokens of the longest key. Keys of 1 to `longest_key` tokens are indexed.
        capacity (`int`): Number of positions that are kept, rounded up to a power of two.
        memory ([`TextIndex`], *optional*): Index of other texts, in which keys are found too.

    >>> index = TextIndex(longest_key=2, capacity=8)
    >>> index.extend([5, 7, 5, 8, 5])
    >>> index.occurrences(1, limit=9), index.after(3, 4)
    ([3, 1], (8, 5, 8, 5))
    """

    def __init__(self, longest_key: int, capacity: int, memory: "TextIndex | None" = None):
        self.longest_key = longest_key
        self.memory = memory
        self.text = array("i")
        self.size = 1 << (capacity - 1).bit_length()
        # for key length i + 1: _heads[i] maps the hash of a key to the last position after it, _previous[i] maps each
        # position to the one before it in the chain
        self._heads = [self._table() for _ in range(longest_key)]
        self._previous = [self._table() for _ in range(longest_key)]

    @property
    def nbytes(self) -> int:
        return BYTES_PER_ENTRY * (2 * self.longest_key * self.size + len(self.text))

    def extend(self, tokens: Iterable[int], indexed: bool = True) -> None:
        """Append committed tokens.

        Args:
            tokens (iterable of `int`): Tokens in order.
            indexed (`bool`, *optional*, defaults to `True`): Whether their positions can be found. Other tokens are
                only part of the keys of later positions.
        """
        for token in tokens:
            if indexed and token != SEPARATOR:
                self._remember(len(self.text))
            self.text.append(token)

    def occurrences(self, length: int, limit: int, text: array | None = None) -> list[int]:
        """Return at most `limit` positions after earlier occurrences of the last `length` tokens, latest first.

        The last tokens are those of `text`, by default of the index's own.
        """
        text, positions = self.text if text is None else text, list[int]()
        if length > len(text):
            return positions
        key, previous = text[-length:], self._previous[length - 1]
        position = self._heads[length - 1][self._slots(text, len(text), length)[-1]]
        oldest = max(1, len(self.text) - self.size)
        while position >= oldest and len(positions) < limit:
            if self.text[position - length : position] == key:  # another key may share the slot
                positions.append(position)
            position = previous[position % self.size]
        return positions

    def after(self, position: int, count: int) -> tuple[int, ...]:
        """Return `count` tokens from `position` on. If the text ends earlier, the copied tokens are repeated.

        Before a separator there are fewer.
        """
        copied = tuple(self.text[position : position + count])
        if SEPARATOR in copied:
            return copied[: copied.index(SEPARATOR)]
        if len(copied) == count:
            return copied
        return tuple(copied[place % len(copied)] for place in range(count))

    def lookup(self, length: int) -> dict[tuple[int, ...], int]:
        """Return different continuations of the last tokens, `length` tokens each, that of the longest suffix first.

        Each comes with the number of tokens before it that match.

        Prompt lookup decoding (https://github.com/apoorvumang/prompt-lookup-decoding) copies the tokens after the first
        match of a few tokens. Here the longest match comes first, and the most recent of equally long matches.

        >>> index = TextIndex(longest_key=1, capacity=64)
        >>> index.extend([1, 2, 7, 7, 5, 2, 8, 8, 1, 2])
        >>> index.lookup(length=2)
        {(7, 7): 2, (8, 8): 1}
        """
        for key_length in range(self.longest_key, 0, -1):
            matches = self._matches(key_length)
            if matches:
                end, found = self.text[-MAX_SUFFIX:], dict[tuple[int, ...], int]()
                suffixes = [(index._suffix_length(position, end), index, position) for index, position in matches]
                # sorting is stable also in reverse, so the most recent of equally long matches comes first
                for suffix, index, position in sorted(suffixes, key=lambda match: match[0], reverse=True):
                    found.setdefault(index.after(position, length), suffix)
                return found
        return {}

    def pool(self, length: int, count: int) -> dict[tuple[int, ...], int]:
        """Return at least `count` different continuations of `length` tokens, or all if there are fewer, best first.

        Continuations are ordered by the length of their key, then by frequency, then by recency. Each comes with the
        length of its key.

        >>> index = TextIndex(longest_key=2, capacity=64)
        >>> index.extend([1, 2, 3, 9, 2, 3, 8, 2, 3, 9, 2])
        >>> index.pool(length=2, count=3)
        {(3, 8): 2, (3, 9): 1}
        """
        paths: dict[tuple[int, ...], int] = {}
        for key_length in range(self.longest_key, 0, -1):
            counts = Counter(index.after(position, length) for index, position in self._matches(key_length))
            # most_common keeps the order of equal counts, so the most recent comes first
            for path, _ in counts.most_common():
                paths.setdefault(path, key_length)
            if len(paths) >= count:
                break
        return paths

    def _matches(self, key_length: int) -> list[tuple["TextIndex", int]]:
        """Return the occurrences of the last `key_length` tokens here, then those in the memory, with their index."""
        indexes = (self,) if self.memory is None else (self, self.memory)
        return [
            (index, position)
            for index in indexes
            for position in index.occurrences(key_length, MAX_OCCURRENCES, self.text)
        ]

    def _suffix_length(self, position: int, end: Sequence[int]) -> int:
        """Return the number of tokens before `position` that match the `end` of the text."""
        before = self.text[max(0, position - len(end)) : position]
        if before == end:
            return len(end)
        pairs = zip(reversed(before), reversed(end), strict=False)
        return next((length for length, (token, last) in enumerate(pairs) if token != last), len(before))

    def _remember(self, position: int) -> None:
        slots = self._slots(self.text, position, min(self.longest_key, position))
        for heads, previous, slot in zip(self._heads, self._previous, slots, strict=False):
            previous[position % self.size] = heads[slot]
            heads[slot] = position

    def _slots(self, text: array, end: int, longest: int) -> list[int]:
        """Return the slots of the keys of 1, 2, ..., `longest` tokens before `end` of a text."""
        code, slots = 0, []
        for length in range(1, longest + 1):
            code = hash((code, text[end - length]))
            slots.append(code % self.size)
        return slots

    def _table(self) -> array:
        return array("i", bytes(BYTES_PER_ENTRY * self.size))  # position 0 follows no key, so 0 marks an empty slot


class TextMemory:
    """An index of the last tokens of many texts, which lives longer than a call.

    Args:
        longest_key (`int`): Tokens of the longest key.
        capacity (`int`): Number of positions that are kept, rounded up to a power of two.
        tokens (iterable of `int`): Texts, each with a [`SEPARATOR`] after it.

    >>> memory = TextMemory(2, 64)
    >>> memory.remember([[1, 2, 3, 4], [9]])
    >>> index = TextIndex(2, 64, memory.index)
    >>> index.extend([7, 1, 2])
    >>> index.lookup(length=5)
    {(3, 4): 2}
    """

    def __init__(self, longest_key: int, capacity: int, tokens: Iterable[int] = ()):
        self.resize(longest_key, capacity, tokens)

    def resize(self, longest_key: int, capacity: int, tokens: Iterable[int]) -> None:
        """Index these texts instead, with other sizes."""
        self.sizes = longest_key, capacity
        self.index = TextIndex(longest_key, capacity)
        self.index.extend(tokens)

    def remember(self, texts: Iterable[Sequence[int]]) -> None:
        """Append texts. When the oldest half is out of reach of the tables, it is dropped."""
        for text in texts:
            self.index.extend([*text[-self.index.size :], SEPARATOR])
            if len(self.index.text) > 2 * self.index.size:
                # another index, as a call may be reading this one
                self.index = TextMemory(*self.sizes, self.index.text[-self.index.size :]).index


# Number of positions of a row's text that are indexed. In longer texts the oldest n-grams are dropped.
CAPACITY = 2**17


class NgramDrafter(Drafter):
    """Propose continuations from the row's own text.

    Args:
        setting (`Callable[[str], Any]`): Returns the value of a setting of the draft; see `NGRAMS` of settings.py.
        num_tokens (`str`, *optional*): Name of the setting for the number of tokens of a path.
        memory ([`TextMemory`], *optional*): Texts that are searched too, to which those of the call are added.
    """

    first_ngram_node = 1
    chooses_nodes = True
    level_cost = 0.0

    def __init__(
        self,
        binding: Binding,
        setting: Callable[[str], Any],
        num_tokens: str = "ngram_num_tokens",
        memory: TextMemory | None = None,
    ):
        super().__init__(binding)
        self.memory = memory
        self.max_depth: int = setting(num_tokens)
        self.num_nodes = 1 + self.max_depth * setting("ngram_candidates")
        self.longest_key, self.source = setting("ngram_size"), setting("ngram_source")
        self.preload = setting("ngram_preload")
        self.indexes = [self._empty_index() for _ in range(binding.cache.batch_size)]

    @property
    def state_bytes(self) -> int:
        return sum(index.nbytes for index in self.indexes)

    def start(self, texts: Sequence[torch.Tensor], verification: Verification) -> None:
        """Index the texts and the first root. A text that continues the one of the last call is only extended."""
        for row, (text, tokens) in enumerate(zip(texts, verification.tokens, strict=True)):
            whole, before = [*text.tolist(), *tokens], self.indexes[row].text.tolist()
            if not before or whole[: len(before)] != before:
                self.indexes[row] = self._empty_index()
                self.indexes[row].extend(whole[: len(text)], indexed=self.preload)
            self.indexes[row].extend(whole[len(self.indexes[row].text) :])

    def resume(self, texts: Sequence[torch.Tensor], verification: Verification) -> None:
        for index, text, tokens in zip(self.indexes, texts, verification.tokens, strict=True):
            index.extend([*text[len(index.text) :].tolist(), *tokens])

    def observe(self, verification: Verification) -> None:
        for index, tokens in zip(self.indexes, verification.tokens, strict=True):
            index.extend(tokens)

    def keep(self) -> None:
        if self.memory is not None and self.binding.rule is not None:
            self.memory.remember(self.binding.rule.sequences.generated)

    def row_states(self) -> Sequence[Any]:
        return (self.indexes,)

    def take(self, row: int, other: Drafter, of: int = 0) -> None:
        """Remember the generated tokens of a row, and take the index of another drafter for it."""
        if self.memory is not None and self.binding.rule is not None:
            self.memory.remember([text for text in self.binding.rule.sequences.generated[row : row + 1] if text])
        super().take(row, other, of)

    def propose(self, root: torch.Tensor) -> DraftTree:
        target, cache, table = self.binding.target, self.binding.cache, self.table(root)
        if table.shape[2] == 1:
            return DraftTree.root_only(root)
        max_depth = min(self.max_depth, table.shape[2] - 1)
        fields = target.run(_trie, cache, table, root, max_depth=max_depth)
        return DraftTree.of_fields(fields, max_depth)

    def table(self, root: torch.Tensor, nodes: int = 1) -> torch.Tensor:
        """Return the [`trie_table`] of the best paths after `root` `(batch,)`, beside a tree of so many nodes."""
        matches = [self._paths(index) for index in self.indexes]
        if self.plan is None:
            return trie_table([[path for path, _ in row] for row in matches], root, self.num_nodes, self.max_depth)
        paths, count = self.plan.cut(matches, nodes, self.num_nodes - 1)
        return trie_table(paths, root, 1 + count, self.max_depth)

    def _paths(self, index: TextIndex) -> list[tuple[tuple[int, ...], int]]:
        """Return the paths of one row, best first, and their matches. They are many, because paths share nodes."""
        length, source = self.max_depth, self.source
        found = list(index.lookup(length).items()) if source != "pool" else []
        if source != "lookup":
            found = found[:1] + list(index.pool(length, count=self.num_nodes - 1).items())
        return found

    def _empty_index(self) -> TextIndex:
        memory = None if self.memory is None else self.memory.index
        return TextIndex(self.longest_key, min(CAPACITY, self.binding.max_length), memory)


class JoinedDrafter(DrafterAround):
    """Propose the candidates of another drafter together with n-grams.

    The nodes of the other drafter keep their indices, so that its state per node stays valid. N-gram nodes follow.
    Those that repeat a path are padding.

    Args:
        inner ([`Drafter`]): The other drafter. Its trees have no distribution `q`.
        ngrams ([`NgramDrafter`]): Drafter of the n-grams.
    """

    # for loops that are not this package's, which get the joined trees, too
    get_candidates, _follow = Drafter.get_candidates, Drafter._follow

    def __init__(self, inner: Drafter, ngrams: NgramDrafter):
        super().__init__(inner)
        self.ngrams = ngrams
        self.num_nodes = inner.num_nodes + ngrams.num_nodes - 1
        self.max_depth = max(inner.max_depth, ngrams.max_depth)
        inner.ngram_depth = ngrams.max_depth
        self.first_ngram_node = inner.num_nodes

    def follow(self, plan: Any) -> None:
        """Let both drafters follow a plan."""
        self.inner.follow(plan)
        self.ngrams.follow(plan)

    @property
    def state_bytes(self) -> int:
        return self.inner.state_bytes + self.ngrams.state_bytes

    def start(self, texts: Sequence[torch.Tensor], verification: Verification) -> None:
        self.inner.start(texts, verification)
        self.ngrams.start(texts, verification)

    def resume(self, texts: Sequence[torch.Tensor], verification: Verification) -> None:
        self.inner.resume(texts, verification)
        self.ngrams.resume(texts, verification)

    def observe(self, verification: Verification) -> None:
        """Update both drafters. The path may contain nodes that the other drafter did not propose."""
        self.inner.observe(verification)
        self.ngrams.observe(verification)

    def take(self, row: int, other: Any, of: int = 0) -> None:
        """Let both drafters take a row."""
        self.inner.take(row, other.inner, of)
        self.ngrams.take(row, other.ngrams, of)

    def propose(self, root: torch.Tensor) -> DraftTree:
        """Return one tree after `root` `(batch,)`: that of the other drafter, then n-grams that it does not contain."""
        inner_tree = self.inner.propose(root)
        self.first_ngram_node = inner_tree.num_nodes
        table = self.ngrams.table(root, inner_tree.num_nodes)
        if table.shape[2] == 1:
            self._proposed = inner_tree, inner_tree
            return inner_tree
        target, cache = self.binding.target, self.binding.cache
        depths = {"own_depth": inner_tree.max_depth, "more_depth": self.ngrams.max_depth}
        fields = target.run(_merged, cache, table, root, *inner_tree.fields, **depths)
        tree = DraftTree.of_fields(fields, max(depths.values()))
        self._proposed = tree, inner_tree
        return tree


def _trie(table: torch.Tensor, root: torch.Tensor, max_depth: int) -> tuple[torch.Tensor, ...]:
    """Return the fields of the tree of a [`trie_table`] and the roots. It may be part of a graph."""
    return trie_of(table, root, max_depth).fields


def _merged(
    table: torch.Tensor, root: torch.Tensor, *fields: torch.Tensor, own_depth: int, more_depth: int
) -> tuple[torch.Tensor, ...]:
    """Return the fields of a tree merged with that of a [`trie_table`]. It may be part of a graph."""
    tree = DraftTree.of_fields(fields, own_depth)
    return merge_trees(tree, trie_of(table, root, more_depth)).fields
