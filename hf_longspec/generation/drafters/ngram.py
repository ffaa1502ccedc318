"""Drafting without a model: what followed the last confirmed tokens earlier in the same text, as one trie.

N-grams as in TokenSwift (https://huggingface.co/papers/2502.18890, section 3.2), with two differences: keys are
confirmed tokens only, since a key with a predicted token is wrong whenever that token is, and paths that begin alike
share nodes.
"""

from collections.abc import Sequence
from functools import cached_property

import torch

from ..draft_tree import DraftTree, merge_paths
from ..ngram_pool import NgramPool
from ..ngram_settings import NgramSettings
from ..suffix_lookup import SuffixLookup
from ..text_index import TextIndex
from .base import Binding, Drafter, TreeShape, Verification, named

# Positions of a row's text that are remembered: longer texts forget their oldest n-grams.
CAPACITY = 2**17


class NgramDrafter(Drafter):
    """Proposes continuations that the row's own text had before.

    Args:
        binding ([`Binding`]): Target, cache and rule of this call.
        settings ([`NgramSettings`]): How to draft.
        others (`Sequence[NgramSettings]`, *optional*): The same with other numbers of tokens and candidates, to choose
            from.
    """

    first_ngram_node = 1
    can_shadow = True

    def __init__(self, binding: Binding, settings: NgramSettings, others: Sequence[NgramSettings] = ()):
        super().__init__(binding)
        self._choices = [settings, *others]
        self.settings = settings
        self.num_nodes = 1 + max(choice.num_nodes for choice in self._choices)
        self.max_depth = max(choice.num_tokens for choice in self._choices)
        self.indexes = [self._empty_index() for _ in range(binding.cache.batch_size)]

    @cached_property
    def trees(self) -> tuple[TreeShape, ...]:
        """One for each of the settings."""
        return named(
            ([choice.num_tokens, choice.candidates], 1 + choice.num_nodes, choice.num_tokens)
            for choice in self._choices
        )

    def choose(self, tree: int) -> None:
        """The settings of the next tree."""
        self.settings = self._choices[tree]

    @property
    def state_bytes(self) -> int:
        """Bytes of texts and tables, in the host's memory."""
        return sum(index.nbytes for index in self.indexes)

    def start(self, texts: Sequence[torch.Tensor], verification: Verification) -> None:
        """Read the texts and the first root; of a text that goes on where the last one ended, only what is new."""
        for row, (text, tokens) in enumerate(zip(texts, verification.tokens, strict=True)):
            whole, known = [*text.tolist(), *tokens], self.indexes[row].text.tolist()
            if not known or whole[: len(known)] != known:
                self.indexes[row] = self._empty_index()
                self.indexes[row].extend(whole[: len(text)], indexed=self.settings.preload)
            self.indexes[row].extend(whole[len(self.indexes[row].text) :])

    def resume(self, texts: Sequence[torch.Tensor], verification: Verification) -> None:
        """Read what was emitted in the meantime."""
        for index, text, tokens in zip(self.indexes, texts, verification.tokens, strict=True):
            index.extend([*text[len(index.text) :].tolist(), *tokens])

    def observe(self, verification: Verification) -> None:
        """Read what was emitted."""
        for index, tokens in zip(self.indexes, verification.tokens, strict=True):
            index.extend(tokens)

    def propose(self, root: torch.Tensor) -> DraftTree:
        """A trie of the best paths behind `root` `(batch,)`, which each row's text ends with."""
        return merge_paths([self._paths(index) for index in self.indexes], root, *self._size)

    @property
    def _size(self) -> tuple[int, int]:
        """Nodes and depth of the next tree."""
        return 1 + self.settings.num_nodes, self.settings.num_tokens

    def _paths(self, index: TextIndex) -> list[tuple[int, ...]]:
        """Candidates of one row, best first; more than `candidates`, because paths share nodes."""
        length, source = self.settings.num_tokens, self.settings.source
        lookup = SuffixLookup(index).paths(length) if source != "pool" else []
        if source == "lookup":
            return lookup
        return lookup[:1] + NgramPool(index).paths(length, count=self.settings.num_nodes)

    def _empty_index(self) -> TextIndex:
        return TextIndex(self.settings.size, min(CAPACITY, self.binding.max_length))
