# Published with a draft by hf_longspec, Apache-2.0.
"""Any drafter's tree and n-gram candidates in one trie."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from .generation_draft_tree import DraftTree, merge_trees
from .generation_drafters_base import Drafter, TreeShape, Verification
from .generation_drafters_ngram import NgramDrafter


class JoinedDrafter(Drafter):
    """Verifies n-gram candidates together with what another drafter proposes.

    The other drafter's nodes keep their indices, so that what it stores per node stays valid; n-gram nodes follow, and
    those that repeat a path are padding.

    Args:
        inner ([`Drafter`]): The other drafter; its trees carry no law `q`.
        ngrams ([`NgramDrafter`]): Where the n-grams come from.
    """

    def __init__(self, inner: Drafter, ngrams: NgramDrafter):
        super().__init__(inner.binding)
        self.inner = inner
        self.ngrams = ngrams
        self.num_nodes = inner.num_nodes + ngrams.num_nodes - 1
        self.max_depth = max(inner.max_depth, ngrams.max_depth)
        self.wants_hidden = inner.wants_hidden
        inner.foreign_depth = ngrams.max_depth
        self._proposed: tuple[DraftTree, DraftTree] | None = None
        self._chosen = 0

    @property
    def first_ngram_node(self) -> int:  # type: ignore[override]
        """Behind the other drafter's present tree."""
        return self.inner.trees[self._chosen].num_nodes

    @cached_property
    def trees(self) -> tuple[TreeShape, ...]:
        """The other drafter's, with the same n-grams."""
        more, deepest = self.ngrams.num_nodes - 1, self.ngrams.max_depth
        return tuple(
            TreeShape(tree.name, tree.num_nodes + more, max(tree.max_depth, deepest)) for tree in self.inner.trees
        )

    def choose(self, tree: int) -> None:
        """The other drafter's choice; n-grams stay."""
        self._chosen = tree
        self.inner.choose(tree)

    @property
    def seed_tokens(self) -> int:
        """As the other drafter wants it."""
        return self.inner.seed_tokens

    @property
    def state_bytes(self) -> int:
        """Bytes of both."""
        return self.inner.state_bytes + self.ngrams.state_bytes

    def start(self, texts: Sequence[torch.Tensor], verification: Verification) -> None:
        """Begin with both."""
        self.inner.start(texts, verification)
        self.ngrams.start(texts, verification)

    def resume(self, texts: Sequence[torch.Tensor], verification: Verification) -> None:
        """Go on with both."""
        self.inner.resume(texts, verification)
        self.ngrams.resume(texts, verification)

    def propose(self, root: torch.Tensor) -> DraftTree:
        """One tree behind `root` `(batch,)`: the other drafter's, then the n-grams that it does not hold."""
        own = self.inner.propose(root)
        tree = merge_trees([own, self.ngrams.propose(root)])
        self._proposed = tree, own
        return tree

    def capture(self, tree: DraftTree) -> Any:
        """What the other drafter asks for, to whom its own nodes are the whole tree."""
        joined, own = self._proposed or (None, tree)
        return self.inner.capture(own if tree is joined else tree)

    def observe(self, verification: Verification) -> None:
        """Tell both. The path may hold nodes that the other drafter did not propose."""
        self.inner.observe(verification)
        self.ngrams.observe(verification)
