"""Drafter that proposes no tokens: the autoregressive baseline on the same loop, cache and kernels."""

import torch

from ...generation.draft_tree import DraftTree
from ...generation.drafter import Drafter


class PlainDrafter(Drafter):
    """Propose the root alone, so that every verification emits one token."""

    def propose(self, root: torch.Tensor) -> DraftTree:
        """Return the tree of `root` `(batch,)` alone."""
        return DraftTree.root_only(root)
