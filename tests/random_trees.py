"""A draft of random trees, parts of which are right, for tests of the loop."""

import random
from typing import Any, ClassVar

import torch

from hf_longspec import DraftModel, DraftTree
from hf_longspec.generation.drafter import Binding, Drafter, Verification
from hf_longspec.generation.target import TargetView
from hf_longspec.modeling.plain.modeling_plain import PlainConfig


class RandomTreeDraftModel(DraftModel):
    """Proposes trees of random shape whose nodes carry a known continuation with some probability, else noise.

    Args:
        hints (`list[list[int]]`): Continuation of each row, as plain decoding emits it.
        num_nodes (`int`): Nodes per tree.
        luck (`float`): Probability that a node on the right path carries the right token.
        chain (`bool`): Propose chains instead of trees.
        seed (`int`): Of the trees.
    """

    config_class = PlainConfig
    weightless: ClassVar[bool] = True

    def __init__(
        self, config: Any, hints: Any = None, num_nodes: int = 7, luck: float = 0.7, chain: bool = False, seed: int = 0
    ):
        super().__init__(config)
        self.hints = hints or []
        self.num_nodes = num_nodes
        self.luck = luck
        self.chain = chain
        self.seed = seed
        self.verifications: list[Verification] = []

    def make_drafter(self, binding: Binding) -> Drafter:
        """A drafter with its own random numbers."""
        return RandomTreeDrafter(binding, self)

    def max_nodes(self, target: TargetView) -> int:
        """Nodes per tree."""
        return self.num_nodes


class RandomTreeDrafter(Drafter):
    """Draws a new tree for every row and iteration."""

    def __init__(self, binding: Binding, draft: RandomTreeDraftModel):
        super().__init__(binding)
        self.draft = draft
        self.random = random.Random(draft.seed)
        self.num_nodes = draft.num_nodes
        self.max_depth = draft.num_nodes - 1

    @property
    def seed_tokens(self) -> int:
        """Several, so that the seeding chain is longer than the shortest prompts of the tests."""
        return 5

    def propose(self, root: torch.Tensor) -> DraftTree:
        """A random tree after `root`, with padding in some rows."""
        rows = [self._row(row, int(token)) for row, token in enumerate(root)]
        tokens, parents, valid = (torch.tensor(part, device=root.device) for part in zip(*rows, strict=True))
        tree = DraftTree(tokens, parents, valid, is_chain=self.draft.chain)
        tree.validate()
        return tree

    def observe(self, verification: Verification) -> None:
        """Keep it, so that a test can inspect it."""
        self.draft.verifications.append(verification)

    def _row(self, row: int, root: int) -> tuple[list[int], list[int], list[bool]]:
        assert self.binding.rule is not None
        emitted = len(self.binding.rule.sequences.generated[row])
        coming = self.draft.hints[row][emitted:] if self.draft.hints else []
        vocab = self.binding.target.vocab_size
        tokens, parents, right = [root], [-1], [0]  # right[i]: depth of node i on the right path, or -1
        for node in range(1, self.draft.num_nodes):
            parent = node - 1 if self.draft.chain else self.random.randrange(node)
            depth = right[parent]
            if 0 <= depth < len(coming) and self.random.random() < self.draft.luck:
                tokens.append(coming[depth])
                right.append(depth + 1)
            else:
                tokens.append(self.random.randrange(vocab))
                right.append(-1)
            parents.append(parent)
        used = self.random.randint(max(1, self.draft.num_nodes - 2), self.draft.num_nodes)
        return tokens, parents, [node < used for node in range(self.draft.num_nodes)]
