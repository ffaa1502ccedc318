"""No draft at all: our own autoregressive baseline on the same loop, cache and kernels."""

import torch

from ...generation.draft_tree import DraftTree
from ...generation.drafter import Drafter


class PlainDrafter(Drafter):
    """Proposes only the root, so that every verification emits exactly one token."""

    def propose(self, root: torch.Tensor) -> DraftTree:
        """The tree that holds nothing but `root`."""
        return DraftTree.root_only(root)
