"""Drafter: a draft bound to a target for one call of `generate`."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from transformers.generation.candidate_generator import CandidateGenerator

from ..attention_backends.lengths import SeqLens
from .cache import SpeculativeCache
from .draft_tree import DraftTree
from .sampling import Coupling, TokenRule, warped
from .target import Step, TargetView, chain_of_last_tokens
from .verification import chain_q, gumbel_max_sample


@dataclass
class Binding:
    """Inputs of a drafter for one call of `generate`."""

    target: TargetView  # the target model
    cache: SpeculativeCache  # the target's cache, which holds only committed tokens between steps
    # the target's token rule, for drafters that sample under it. `None` if the drafter runs inside transformers' own
    # assisted decoding.
    rule: TokenRule | None
    max_length: int  # maximum number of tokens of a row
    # function of a key and of a function that makes buffers. It returns the buffers of this key that an earlier call
    # left, if there are any.
    part: Callable[[tuple, Callable[[], Any]], Any] = lambda key, make: make()

    def coupling(self) -> Any:
        """Return the [`Coupling`] that ranks candidates by the target's rule."""
        return Coupling(None) if self.rule is None else self.rule.coupling()


@dataclass
class Verification:
    """Result of the last verification, which the drafter gets after the commit."""

    path: torch.Tensor  # `(batch, M)`: indices of the accepted nodes, node 0 first
    num_nodes: SeqLens  # number of nodes that each row kept; 0 for rows that have ended
    prefix_lengths: SeqLens  # number of committed tokens of each row before this commit
    capture: Any = None  # the result of [`Drafter.capture`], filled
    # tokens that each row emitted, on the host. The last one is the next root. Empty for rows that have ended.
    tokens: list[list[int]] = field(default_factory=list)
    # nodes that each row kept, on the host, node 0 first
    nodes: list[list[int]] = field(default_factory=list)
    hidden: torch.Tensor | None = None  # `(batch, N, hidden)`: what `wants_hidden` of the drafter names, at every node
    tree: DraftTree | None = None  # the verified tree
    logits: torch.Tensor | None = None  # `(batch, N, vocab)`: the target's logits after every node

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
        nodes: list[list[int]] | None = None,
    ) -> "Verification":
        """Return the result of a step over a tree in which these nodes were kept and these tokens emitted."""
        context = step.context
        counts = SeqLens.of(num_nodes)
        found = path, counts, context.lengths, context.capture, tokens, nodes or []
        return cls(*found, step.hidden, tree, step.logits)


def last_of(values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the last of the first `counts[b]` entries of each row of `values` `(B, M)`; the first entry if it is 0.

    >>> last_of(torch.tensor([[4, 5, 6], [7, 8, 9]]), torch.tensor([2, 0])).tolist()
    [5, 7]
    """
    return values.gather(1, (counts - 1).clamp_min(0)[:, None]).squeeze(1)


class Drafter(CandidateGenerator):
    """Propose draft trees, and update its own state after their verification.

    The decoding loop depends on this interface only. Subclasses implement `propose`, and also `observe` and `capture`
    if they keep state.
    """

    num_nodes: int = 1
    """Number of nodes of a tree, root included."""
    max_depth: int = 0
    """Depth of the deepest node."""
    wants_hidden: bool | tuple[int, ...] = False
    """Whether [`Verification`] includes the input of the target's final norm, or the layers whose inputs it has."""
    reuse_graph: bool = True
    """Whether more verifications of trees of the present shape will follow, so that compiling one is worth it."""
    ngram_depth: int = 0
    """Depth of the nodes that other drafters add to verified trees, from `num_nodes` on; a path may contain them."""
    first_ngram_node: int | None = None
    """Index of the first node that only n-grams propose; all later nodes are of this kind."""
    largest: Sequence[int] = ()
    """Number of candidates of each level of its largest tree, if it drafts smaller ones when `widths_now` says so."""
    chooses_nodes: bool = False
    """Whether the number of nodes is chosen when they are known, by [`SpeculationGate.cut`]."""
    level_cost: float = 0.1
    """Time of drafting a level in plain steps, before it is measured."""
    first_chance: float = 0.6
    """Chance that its best candidate is accepted, before it is measured."""
    tells: bool = False
    """Whether it asks [`SpeculationGate.goes_on`] after each token of a chain, and says how probable it finds it."""
    plan: Any = None
    """The [`SpeculationGate`] that chooses how much is drafted; `None` if it is always all."""

    def __init__(self, binding: Binding):
        self.binding = binding

    def follow(self, plan: Any) -> None:
        """Draft in each step what a [`SpeculationGate`] has chosen."""
        self.plan = plan

    @property
    def asked(self) -> Any:
        """The gate that is asked after each token whether to draft the next one; `None` if all are drafted."""
        return self.plan if self.plan is not None and self.plan.answers else None

    @property
    def widths_now(self) -> Sequence[int]:
        """Number of candidates of each level of the next tree."""
        return self.largest if self.plan is None else self.plan.widths

    def level_sizes(self, widths: Sequence[int]) -> Sequence[int]:
        """Return the number of nodes of each level of a tree with so many candidates in each."""
        return widths

    @property
    def seed_tokens(self) -> int:
        """Number of last prompt tokens that run as a verification, so that the drafter can observe them."""
        return 1

    @property
    def state_bytes(self) -> int:
        """Bytes of the drafter's own state, without the target's cache."""
        return 0

    def watch_prefill(self, lengths: Sequence[int], starts: Sequence[int], places: Sequence[int]) -> Any:
        """Return a context in which rows `places` of forwards read prompts of `lengths` tokens, from `starts` on."""
        return nullcontext()

    def attention(self) -> AbstractContextManager[None]:
        """Return the context in which the loop decodes; drafters that run another model switch its attention here."""
        return nullcontext()

    def start(self, texts: Sequence[torch.Tensor], verification: Verification) -> None:
        """Begin to draft after committed `texts` `(T,)` of every row; the last `seed_tokens` tokens were verified."""
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

    def row_states(self) -> Sequence[Any]:
        """Return what is kept for each row: tensors `(batch, ...)` and lists of as many entries. Rows may be replaced.

        Raises:
            ValueError: If the drafter keeps state and does not define this method.
        """
        if type(self).observe is not Drafter.observe:
            raise ValueError(
                f"{type(self).__name__} keeps state, and does not say of each row which. Define row_states(), or "
                "decode with generate()."
            )
        return ()

    def take(self, row: int, other: Any, of: int = 0) -> None:
        """Replace what is kept for a row by what another drafter of this kind keeps for its row `of`."""
        for own, taken in zip(self.row_states(), other.row_states(), strict=True):
            own[row] = taken[of]

    @torch.no_grad()
    def get_candidates(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return `input_ids` with the best chain of [`Drafter.propose`], as transformers' candidate generators do.

        The cache is first extended to the sequence, so this works inside any assisted decoding with batch size 1.
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
            with self.watch_prefill([len(tokens)], cache.lengths.host, [0]):
                target.prefill(missing[None, : -self.seed_tokens], cache, None)
            cache.set_lengths([cache.lengths.host[0] + len(missing) - self.seed_tokens])
        tree, sizes = chain_of_last_tokens([missing], self.seed_tokens)
        with target.attention():
            step = target.verify(tree, cache, self.capture(tree), with_hidden=self.wants_hidden)
        cache.commit(None, sizes)
        path = torch.arange(sizes[0], device=tokens.device)[None]
        self.start([tokens], Verification.of(tree, step, path, sizes, [[root]]))


class RootDrafter(Drafter):
    """Propose the root alone, so that every verification emits one token, unless others add nodes."""

    def __init__(self, binding: Binding, draft: Any = None):
        super().__init__(binding)

    def propose(self, root: torch.Tensor) -> DraftTree:
        return DraftTree.root_only(root)


class DrafterAround:
    """Base of drafters around another one. All that a subclass does not define is that of the other drafter.

    A subclass that changes trees sets `_proposed` to the changed tree and the other drafter's own.
    """

    def __init__(self, inner: Any):
        self.inner = inner
        self._proposed: tuple[DraftTree | None, DraftTree | None] = None, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def take(self, row: int, other: Any, of: int = 0) -> None:
        """Let the other drafter take a row of its kind, also of one within such a drafter."""
        self.inner.take(row, other.inner if isinstance(other, type(self)) else other, of)

    def capture(self, tree: DraftTree) -> Any:
        """Return the capture of the other drafter for its own tree."""
        changed, own = self._proposed
        return self.inner.capture(tree if own is None or tree is not changed else own)


def noise_of_chain(binding: Binding, count: int, is_drawn: bool) -> torch.Tensor | None:
    """Return the noise `(count, B, vocab)` that decides the next `count` tokens of a chain; `None` if it is greedy.

    It is that by which the target will decide these positions. If `is_drawn`, it is drawn apart from the target's, as
    acceptance by rejection needs.
    """
    rule = binding.rule
    if rule is None or not rule.do_sample:
        return None
    if not is_drawn:
        return rule.noise.rows(count).transpose(0, 1)
    noise: torch.Tensor = rule.noise.draw(count)
    return noise


def drafted_tokens(
    rule: TokenRule | None,
    root: torch.Tensor,
    count: int,
    logits_after: Callable[[int, torch.Tensor], torch.Tensor],
    noise: torch.Tensor | None,
    with_q: bool,
    gate: Any = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Draft a chain by the target's rule: roots and drafted tokens `(B, count + 1)`, if `with_q` their distributions.

    `logits_after` returns the logits `(B, vocab)` after tokens `(B,)` at a depth, and `noise` is that of
    [`noise_of_chain`]. It may be part of a graph if the rule `fits_graphs`. A `gate`, as [`Drafter.asked`], may end the
    chain earlier.
    """
    tokens, distributions = [root], []
    for depth in range(count):
        scores = logits_after(depth, tokens[-1])
        if rule is not None:
            is_free = rule.history_free
            scores = warped(rule.processors, scores[:, None])[:, 0] if is_free else rule.scores_at(scores, depth)
        tokens.append(scores.argmax(-1) if noise is None else gumbel_max_sample(scores, noise[depth]))
        if rule is not None and not rule.history_free:
            rule.try_out(depth, tokens[-1])
        if with_q or gate is not None:
            distributions.append(scores.softmax(-1))
        if gate is not None and not gate.goes_on(distributions[-1].gather(1, tokens[-1][:, None])[:, 0].tolist()):
            break
    if gate is not None:  # whether a drawn token is verified must not depend on the token
        count = gate.kept(may_cut=not with_q)
    return torch.stack(tokens[: count + 1], 1), chain_q(distributions) if with_q else None
