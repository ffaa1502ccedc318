"""Drafter: a draft bound to a target for one call of `generate`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any

import torch
from transformers.generation.candidate_generator import CandidateGenerator

from .cache import SpeculativeCache
from .draft_tree import DraftTree
from .sampling import TokenRule
from .target import TargetView, chain_of_last_tokens


@dataclass
class Binding:
    """What a drafter is given for one call.

    Args:
        target ([`TargetView`]): The target model.
        cache ([`SpeculativeCache`]): The target's cache; committed prefix only between steps.
        rule ([`TokenRule`], *optional*): The target's token rule, for drafters that sample under it. `None` when the
            drafter runs inside transformers' own assisted decoding.
        max_length (`int`): Most tokens a row can reach.
    """

    target: TargetView
    cache: SpeculativeCache
    rule: TokenRule | None
    max_length: int


@dataclass
class Verification:
    """What the last verification decided, told to the drafter after the commit.

    Args:
        path (`torch.LongTensor` of shape `(batch, M)`): Node indices that were kept, node 0 first.
        num_nodes (`list[int]`): How many of them each row kept; 0 for rows that are done.
        prefix_lengths (`tuple[int, ...]`): Committed tokens of each row before this commit.
        capture (*optional*): What [`Drafter.capture`] asked for, filled.
        tokens (`list[list[int]]`, *optional*): What each row emitted, on the host; the last is the next root. Empty for
            rows that are done.
        hidden (`torch.Tensor` of shape `(batch, N, hidden)`, *optional*): The final norm's input at every node, for
            drafters that set `wants_hidden`.
    """

    path: torch.Tensor
    num_nodes: list[int]
    prefix_lengths: tuple[int, ...]
    capture: Any = None
    tokens: list[list[int]] = field(default_factory=list)
    hidden: torch.Tensor | None = None

    @property
    def last_nodes(self) -> torch.Tensor:
        """Index `(batch,)` of the last node that each row kept; node 0 for rows that are done."""
        last = torch.tensor(self.num_nodes, device=self.path.device).sub_(1).clamp_min_(0)
        return self.path.gather(1, last[:, None]).squeeze(1)


@dataclass(frozen=True)
class TreeShape:
    """One of the trees that a drafter can propose.

    Args:
        name (`str`): What the settings call it.
        num_nodes (`int`): Nodes, root included.
        max_depth (`int`): Depth of the deepest node.
    """

    name: str
    num_nodes: int
    max_depth: int


def named(trees: Iterable[tuple[Any, int, int]]) -> tuple[TreeShape, ...]:
    """Shapes from what the settings say, nodes and depth of each tree; one alone needs no name.

    >>> [tree.name for tree in named([([4, 2], 7, 2), ([1], 2, 1)])], named([([1], 2, 1)])[0].name
    (['[4, 2]', '[1]'], 'draft')
    """
    shapes = tuple(TreeShape(str(value), num_nodes, max_depth) for value, num_nodes, max_depth in trees)
    return shapes if len(shapes) > 1 else (replace(shapes[0], name="draft"),)


class Drafter(CandidateGenerator):
    """Proposes draft trees and learns from their verification. The decoding loop knows nothing else of it.

    Subclasses implement `propose`, and `observe` and `capture` if they keep state.

    Args:
        binding ([`Binding`]): Target, cache and rule of this call.
    """

    num_nodes: int = 1
    """Nodes of the largest tree, root included."""
    max_depth: int = 0
    """Depth of its deepest node, or of a deeper one of the other trees."""
    wants_hidden: bool = False
    """Whether verifications shall hand over what the target's final norm is given."""
    is_steady: bool = True
    """Whether more verifications of the present tree's shape will follow, so that compiling one is worth it."""
    foreign_depth: int = 0
    """Depth of the nodes, from `num_nodes` on, that others add to the verified trees; a path may lead over them."""
    first_ngram_node: int | None = None
    """Nodes from this one on come from n-grams alone."""

    can_shadow: bool = False
    """Whether proposing takes no forward and changes nothing, so that it may be compared with plain steps."""

    def __init__(self, binding: Binding):
        self.binding = binding

    @cached_property
    def trees(self) -> tuple[TreeShape, ...]:
        """The trees that may be chosen, the configured one first."""
        return named([(None, self.num_nodes, self.max_depth)])

    def choose(self, tree: int) -> None:
        """Propose trees of this number from now on."""

    def speedup_bound(self) -> float:
        """Tokens per second over those of plain steps, behind the present prefixes, if everything were accepted."""
        return inf

    @property
    def seed_tokens(self) -> int:
        """How many of the last prompt tokens run through the verification path, so that the drafter sees them."""
        return 1

    @property
    def state_bytes(self) -> int:
        """Bytes of what the drafter keeps beside the target's cache."""
        return 0

    def start(self, texts: Sequence[torch.Tensor], verification: Verification) -> None:
        """Begin behind `texts`, the tokens of every row, which are all committed.

        Args:
            verification ([`Verification`]): That of their last tokens, `seed_tokens` of them, as a chain.
        """
        self.observe(verification)

    def resume(self, texts: Sequence[torch.Tensor], verification: Verification) -> None:
        """Go on behind `texts`, all committed, of which tokens at the end were not told.

        Args:
            verification ([`Verification`]): That of their last tokens, one of each growing row.
        """
        self.start(texts, verification)

    def propose(self, root: torch.Tensor) -> DraftTree:
        """A tree of candidates after `root` `(batch,)`, the last emitted tokens."""
        raise NotImplementedError

    def capture(self, tree: DraftTree) -> Any:
        """What the next verification shall collect from the attention layers; nothing by default."""
        return None

    def observe(self, verification: Verification) -> None:
        """Catch up with what was verified and committed."""

    def get_candidates(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The best chain of [`Drafter.propose`] behind `input_ids`: transformers' candidate generator contract.

        Runs the drafter's own cache up to the sequence first, so it works inside any assisted decoding of batch 1.

        Raises:
            ValueError: For more than one row, or more tokens than the drafter was made for.
        """
        if input_ids.shape[0] != 1 or input_ids.shape[1] > self.binding.max_length:
            raise ValueError(
                f"input_ids has shape {tuple(input_ids.shape)}: a candidate generator proposes for one row of at most "
                f"{self.binding.max_length} tokens. Pass a larger max_length to candidate_generator, or decode several "
                "rows with generate(assistant_model=draft)."
            )
        self._follow(input_ids[0, :-1], int(input_ids[0, -1]))
        chain = self.propose(input_ids[:, -1]).best_chain()
        room = max(0, self.binding.max_length - input_ids.shape[1] - 1)
        return torch.cat([input_ids, chain[None, :room]], dim=-1), None

    def update_candidate_strategy(self, input_ids, scores, num_matches) -> None:
        """Nothing to adapt: the number of candidates is fixed."""

    def _follow(self, tokens: torch.Tensor, root: int) -> None:
        """Bring the cache to `tokens`, after which `root` comes, by one chain-shaped verification."""
        target, cache = self.binding.target, self.binding.cache
        missing = tokens[cache.host_lengths[0] :]
        if not len(missing):
            return
        if len(missing) > self.seed_tokens:
            target.prefill(missing[None, : -self.seed_tokens], cache, None)
            cache.set_lengths([cache.host_lengths[0] + len(missing) - self.seed_tokens])
        tree, sizes = chain_of_last_tokens([missing], self.seed_tokens)
        before, capture = cache.host_lengths, self.capture(tree)
        with target.attention():
            step = target.verify(tree, cache, capture, with_hidden=self.wants_hidden)
        cache.commit(None, sizes)
        path = torch.arange(sizes[0], device=tokens.device)[None]
        self.start([tokens], Verification(path, sizes, before, capture, [[root]], step.hidden))
