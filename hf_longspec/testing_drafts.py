"""Drafts for tests: random tokens on random trees with some right ones among them, and random weights."""

import random
from typing import Any, ClassVar

import torch

from .generation.draft_tree import DraftTree
from .generation.drafter import Binding, Drafter, TreeShape, Verification
from .generation.gate import SpeculationGate
from .generation.target import TargetView
from .modeling.base import DraftModel
from .modeling.longspec.modeling_longspec import LongSpecDraftModel
from .modeling.plain.configuration_plain import PlainConfig
from .modeling.tokenswift.modeling_tokenswift import TokenSwiftDraftModel


def random_longspec_draft(target: Any, seed: int = 3, **overrides: Any) -> LongSpecDraftModel:
    """An untrained LongSpec draft with peaked attention and spread logits, so that a wrong key or position shows.

    Args:
        target (`PreTrainedModel`): Its target.
        seed (`int`, *optional*, defaults to 3): Seed of the weights.
        **overrides: As in `LongSpecDraftModel.from_target`.
    """
    draft = LongSpecDraftModel.from_target(target, **overrides)
    randomize(draft, seed)
    return draft


def random_tokenswift_draft(target: Any, seed: int = 3, **overrides: Any) -> TokenSwiftDraftModel:
    """Untrained TokenSwift heads that move the hidden state and spread their logits, so that a wrong state shows.

    Args:
        target (`PreTrainedModel`): Its target.
        seed (`int`, *optional*, defaults to 3): Seed of the weights.
        **overrides: As in `TokenSwiftDraftModel.from_target`.
    """
    draft = TokenSwiftDraftModel.from_target(target, **overrides)
    randomize(draft, seed)
    return draft


def randomize(draft: DraftModel, seed: int = 3) -> None:
    """Spread the weights of a draft, so that a wrong key, position or state shows in its trees."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in draft.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(noise * (0.3 if weight.dim() == 2 else 0.5))


class FlippingGate(SpeculationGate):
    """Opens and closes at random: one to four steps of each kind, from a seed. Every step has a random tree.

    Attributes:
        turns (`int`): How often it opened or closed.
    """

    tree = 0

    def __init__(self, seed: int = 0, trees: int = 1):
        super().__init__([TreeShape("draft", 2, 1)])
        self.random = random.Random(seed)
        self.num_trees = trees
        self.speculating = False
        self.left = self.turns = 0

    def speculates(self) -> bool:
        """Return whether it is open in this step."""
        if not self.left:
            self.speculating, self.left = not self.speculating, self.random.randint(1, 4)
            self.turns += 1
        self.left -= 1
        if self.num_trees > 1:
            self.tree = self.random.randrange(self.num_trees)
        return self.speculating

    def record(self, tokens: int, rows: int, length: int) -> None:
        """Measure nothing."""


def ungated(wanted: bool, drafter: Any, ranks: Any) -> None:
    """Stand in for `gate_of` where steps are counted: all of them speculate, whatever the clock says."""


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
        """A random tree behind `root`, with padding in some rows."""
        rows = [self._row(row, int(token)) for row, token in enumerate(root)]
        tokens, parents, valid = (torch.tensor(part, device=root.device) for part in zip(*rows, strict=True))
        tree = DraftTree(tokens, parents, valid, is_chain=self.draft.chain)
        tree.validate()
        return tree

    def observe(self, verification: Verification) -> None:
        """Keep it for the test to look at."""
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
