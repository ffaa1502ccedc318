"""Drafter: a draft bound to a target for one call of `generate`."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Any

import torch
from transformers.generation.candidate_generator import CandidateGenerator

from ..attention_backends.lengths import SeqLens
from .cache import SpeculativeCache
from .draft_tree import DraftTree
from .sampling import TokenRule
from .target import Step, TargetView, chain_of_last_tokens
from .verification import draw_noise


@dataclass
class Binding:
    """Inputs of a drafter for one call of `generate`.

    Args:
        target ([`TargetView`]): The target model.
        cache ([`SpeculativeCache`]): The target's cache, which holds only committed tokens between steps.
        rule ([`TokenRule`], *optional*): The target's token rule, for drafters that sample under it. `None` if the
            drafter runs inside transformers' own assisted decoding.
        max_length (`int`): Maximum number of tokens of a row.
        part (`Callable`, *optional*): Function of a key and of a function that makes buffers. It returns the buffers of
            this key that an earlier call left, if there are any.
    """

    target: TargetView
    cache: SpeculativeCache
    rule: TokenRule | None
    max_length: int
    part: Callable[[tuple, Callable[[], Any]], Any] = lambda key, make: make()


@dataclass
class Verification:
    """Result of the last verification, which the drafter gets after the commit.

    Args:
        path (`torch.LongTensor` of shape `(batch, M)`): Indices of the accepted nodes, node 0 first.
        num_nodes ([`SeqLens`]): Number of nodes that each row kept; 0 for rows that have ended.
        prefix_lengths ([`SeqLens`]): Number of committed tokens of each row before this commit.
        capture (*optional*): The result of [`Drafter.capture`], filled.
        tokens (`list[list[int]]`, *optional*): Tokens that each row emitted, on the host. The last one is the next
            root. Empty for rows that have ended.
        hidden (`torch.Tensor` of shape `(batch, N, hidden)`, *optional*): What `wants_hidden` of the drafter names, at
            every node.
        tree ([`DraftTree`], *optional*): The verified tree.
        logits (`torch.Tensor` of shape `(batch, N, vocab)`, *optional*): The target's logits after every node.
    """

    path: torch.Tensor
    num_nodes: SeqLens
    prefix_lengths: SeqLens
    capture: Any = None
    tokens: list[list[int]] = field(default_factory=list)
    hidden: torch.Tensor | None = None
    tree: DraftTree | None = None
    logits: torch.Tensor | None = None

    @cached_property
    def last_nodes(self) -> torch.Tensor:
        """Index `(batch,)` of the last node that each row kept; node 0 for rows that have ended."""
        return last_of(self.path, self.num_nodes.on(self.path.device))

    @classmethod
    def of(
        cls,
        tree: DraftTree,
        step: Step,
        path: torch.Tensor,
        num_nodes: SeqLens | Sequence[int],
        tokens: list[list[int]],
    ) -> "Verification":
        """Return the result of a step over a tree in which these nodes were kept and these tokens emitted."""
        context = step.context
        counts = SeqLens.of(num_nodes)
        return cls(path, counts, context.lengths, context.capture, tokens, step.hidden, tree, step.logits)


def independent_draws(binding: Binding, root: torch.Tensor, count: int) -> torch.Tensor | None:
    """Return noise `(count, B, vocab)` for tokens that are drawn apart from the target's noise; `None` if it is greedy.

    Acceptance by rejection needs such tokens.
    """
    rule = binding.rule
    if rule is None or not rule.do_sample:
        return None
    shape = count, len(root), binding.target.vocab_size
    return draw_noise(*shape, generator=rule.generator, device=root.device)


def last_of(values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the last of the first `counts[b]` entries of each row of `values` `(B, M)`; the first entry if it is 0.

    >>> last_of(torch.tensor([[4, 5, 6], [7, 8, 9]]), torch.tensor([2, 0])).tolist()
    [5, 7]
    """
    return values.gather(1, (counts - 1).clamp_min(0)[:, None]).squeeze(1)


class Drafter(CandidateGenerator):
    """Propose draft trees, and update the own state after their verification.

    The decoding loop depends on this interface only. Subclasses implement `propose`, and also `observe` and `capture`
    if they keep state.

    Args:
        binding ([`Binding`]): Target, cache and rule of this call.
    """

    num_nodes: int = 1
    """Number of nodes of a tree, root included."""
    max_depth: int = 0
    """Depth of the deepest node."""
    wants_hidden: bool | tuple[int, ...] = False
    """Whether [`Verification`] includes the input of the target's final norm, or the layers whose inputs it has."""
    is_steady: bool = True
    """Whether more verifications of trees of the present shape will follow, so that compiling one is worth it."""
    foreign_depth: int = 0
    """Depth of the nodes that other drafters add to verified trees, from `num_nodes` on; a path may contain them."""
    first_ngram_node: int | None = None
    """Index of the first node that only n-grams propose; all later nodes are of this kind."""

    def __init__(self, binding: Binding):
        self.binding = binding

    def speedup_bound(self) -> float:
        """Return an upper bound on the tokens per second after the present prefixes, relative to plain steps."""
        return inf

    @property
    def seed_tokens(self) -> int:
        """Number of last prompt tokens that run as a verification, so that the drafter can observe them."""
        return 1

    @property
    def state_bytes(self) -> int:
        """Bytes of the drafter's own state, without the target's cache."""
        return 0

    def watch_prefill(self, lengths: Sequence[int], starts: Sequence[int]) -> AbstractContextManager[Any]:
        """Return a context in which the target reads the prompts. It does nothing by default.

        Args:
            lengths (`Sequence[int]`): Number of tokens of every row.
            starts (`Sequence[int]`): Number of tokens of every row that are in the cache already.
        """
        return nullcontext()

    def attention(self) -> AbstractContextManager[None]:
        """Return the context in which the loop decodes; drafters that run another model switch its attention here."""
        return nullcontext()

    def start(self, texts: Sequence[torch.Tensor], verification: Verification) -> None:
        """Begin to draft after the prompts.

        Args:
            texts (`Sequence[torch.Tensor]`): Tokens `(T,)` of every row, all committed.
            verification ([`Verification`]): Verification of their last `seed_tokens` tokens as a chain.
        """
        self.observe(verification)

    def resume(self, texts: Sequence[torch.Tensor], verification: Verification) -> None:
        """Continue to draft after plain steps, whose tokens the drafter did not observe; see `start`.

        The verification is that of the last tokens, one of each growing row.
        """
        self.start(texts, verification)

    def propose(self, root: torch.Tensor) -> DraftTree:
        """Return a tree of candidates after `root` `(batch,)`, the last emitted tokens."""
        raise NotImplementedError

    def capture(self, tree: DraftTree) -> Any:
        """Return an object that collects data from the attention layers in the next verification; `None` by default."""
        return None

    def observe(self, verification: Verification) -> None:
        """Update the drafter's state with the tokens that were verified and committed."""

    def keep(self) -> None:
        """Keep what a later call may use, as the text is complete."""

    @torch.no_grad()
    def get_candidates(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return `input_ids` with the best chain of [`Drafter.propose`], as transformers' candidate generators do.

        The cache is first extended to the sequence, so this works inside any assisted decoding with batch size 1.

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
        """Do nothing, as the number of candidates is fixed."""

    def _follow(self, tokens: torch.Tensor, root: int) -> None:
        """Extend the cache to `tokens`, which `root` follows, by one verification of a chain."""
        target, cache = self.binding.target, self.binding.cache
        missing = tokens[cache.lengths.host[0] :]
        if not len(missing):
            return
        if len(missing) > self.seed_tokens:
            with self.watch_prefill([len(tokens)], cache.lengths.host):
                target.prefill(missing[None, : -self.seed_tokens], cache, None)
            cache.set_lengths([cache.lengths.host[0] + len(missing) - self.seed_tokens])
        tree, sizes = chain_of_last_tokens([missing], self.seed_tokens)
        with target.attention():
            step = target.verify(tree, cache, self.capture(tree), with_hidden=self.wants_hidden)
        cache.commit(None, sizes)
        path = torch.arange(sizes[0], device=tokens.device)[None]
        self.start([tokens], Verification.of(tree, step, path, sizes, [[root]]))
