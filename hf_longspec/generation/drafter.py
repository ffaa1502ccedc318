"""Drafter: a draft bound to a target for one call of `generate`, and the bases of drafters of beams and of chains."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.generation.candidate_generator import CandidateGenerator

from ..attention_backends.contexts import StepContext
from ..attention_backends.lengths import SeqLens
from ..attention_backends.registry import AttentionBackend, AttentionCall, select, under_autocast
from .cache import SpeculativeCache
from .draft_tree import Beam, DraftTree
from .sampling import Coupling, TokenRule, warped
from .sparse_caches import WindowRing, budget
from .target import Step, TargetView, chain_of_last_tokens
from .verification import chain_q, draw_noise, gumbel_max_sample

# Upper bound on the time per byte of keys and values, relative to that of weights. An attention kernel may reach only a
# small part of the bandwidth of matrix products, and weights may come from a cache of the processor.
KV_FACTOR = 16


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


@dataclass
class Verification:
    """Result of the last verification, which the drafter gets after the commit."""

    path: torch.Tensor  # `(batch, M)`: indices of the accepted nodes, node 0 first
    num_nodes: SeqLens  # number of nodes that each row kept; 0 for rows that have ended
    prefix_lengths: SeqLens  # number of committed tokens of each row before this commit
    capture: Any = None  # the result of [`Drafter.capture`], filled
    # tokens that each row emitted, on the host. The last one is the next root. Empty for rows that have ended.
    tokens: list[list[int]] = field(default_factory=list)
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
    ) -> "Verification":
        """Return the result of a step over a tree in which these nodes were kept and these tokens emitted."""
        context = step.context
        counts = SeqLens.of(num_nodes)
        return cls(path, counts, context.lengths, context.capture, tokens, step.hidden, tree, step.logits)


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
        """Return a context in which the target reads the prompts. It does nothing by default."""
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
            with self.watch_prefill([len(tokens)], cache.lengths.host):
                target.prefill(missing[None, : -self.seed_tokens], cache, None)
            cache.set_lengths([cache.lengths.host[0] + len(missing) - self.seed_tokens])
        tree, sizes = chain_of_last_tokens([missing], self.seed_tokens)
        with target.attention():
            step = target.verify(tree, cache, self.capture(tree), with_hidden=self.wants_hidden)
        cache.commit(None, sizes)
        path = torch.arange(sizes[0], device=tokens.device)[None]
        self.start([tokens], Verification.of(tree, step, path, sizes, [[root]]))


class BeamDrafter(Drafter):
    """Draft trees with a fixed number of nodes per level, by a module that runs once for each level.

    Subclasses set `rings` and implement `inputs`, `begin`, `level_inputs`, `level` and `observe`. Those that read the
    target's cache also define `prefix`, `graph_of` and `prefix_in_graph`.
    """

    rings: list[WindowRing]  # keys and values of the committed text, for each layer of the draft
    # Whether positions are those of the target also after images. Graphs compute them from lengths alone.
    rotates_as_target: ClassVar[bool] = False

    def __init__(self, binding: Binding, draft: Any):
        super().__init__(binding)
        self._owner, self.draft = draft, draft.beside(binding.target.model)
        self.coupling = Coupling(binding.rule)
        self.widths, self.num_nodes = self.shape_of(draft)
        self.max_depth = len(self.widths)
        self.device, self.dtype = self.draft.device, self.draft.dtype
        head_dim = draft.config.head_dim
        self.scaling = head_dim**-0.5
        kernels = select(AttentionCall(self.device, self.dtype, head_dim, head_dim))
        self._kernels: AttentionBackend = under_autocast(kernels, self.device.type)

    @property
    def state_bytes(self) -> int:
        return sum(ring.nbytes for ring in self.rings)

    @property
    def _holder(self) -> Any:
        """The object that graphs go with. They hold the addresses of weights: those of a copy are dropped with it."""
        return self.rings[0] if self.draft is self._owner else self.draft

    def shape_of(self, draft: Any) -> tuple[list[int], int]:
        """Return the widths of all levels, and how many of the best nodes are verified, root included."""
        widths: list[int] = draft.setting("tree_widths")
        return widths, 1 + sum(widths)

    def inputs(self, root: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the tensors that a tree is drafted from, `root` `(batch,)` first."""
        raise NotImplementedError

    def begin(self, inputs: tuple[torch.Tensor, ...], prefix: Any) -> tuple[torch.Tensor, ...]:
        """Return what all levels of a tree share."""
        raise NotImplementedError

    def level_inputs(
        self, beam: Beam, depth: int, shared: tuple[torch.Tensor, ...], states: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Return the inputs of `level` for the newest level of a beam; `states` are further results of the last one."""
        raise NotImplementedError

    def level(self, changing: tuple[torch.Tensor, ...], depth: int, prefix: Any) -> tuple[torch.Tensor, ...]:
        """Return logits `(B, n, V)` after the newest level of a beam, and states if there are any.

        The logits may be `(B, 1, V)` if they do not depend on the path.

        `changing` is the result of `level_inputs`. The root has depth 0.
        """
        raise NotImplementedError

    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits `(B, n, vocab)` of the target's tokens."""
        return logits

    def prefix(self) -> Any:
        """Return what the draft reads of the target's cache; nothing by default."""

    def graph_of(self, runner: Any, prefix: Any) -> tuple[tuple[torch.Tensor, ...], tuple, tuple]:
        """Return changing tensors and fixed objects, from which a graph makes `prefix` again, and hashable settings."""
        return (), (), ()

    def prefix_in_graph(self, changing: tuple[torch.Tensor, ...], *fixed: Any) -> Any:
        """Return `prefix` inside a graph; see `graph_of`."""

    def propose(self, root: torch.Tensor) -> DraftTree:
        """Return a beam of the chosen widths after `root` `(batch,)`."""
        inputs, known, prefix = self.inputs(root), self.coupling.known(len(self.widths)), self.prefix()
        runner, fields = self.binding.target.runner, None
        cache = self.binding.cache
        moved = self.rotates_as_target and cache.rows.offsets is not None
        if runner is not None and (moved or not runner.takes(cache.lengths)):
            runner = None
        if runner is not None and self.coupling.fits_graphs:
            fields = self._run(runner, _grow, (*inputs, *known), prefix, len(inputs))
            runner = None
        fields = fields or self.grow(inputs, known, prefix, runner)
        return DraftTree.of_fields(fields, len(self.widths), is_chain=max(self.widths) == 1)

    def grow(
        self,
        inputs: tuple[torch.Tensor, ...],
        known: Sequence[torch.Tensor] = (),
        prefix: Any = None,
        runner: Any = None,
    ) -> tuple[torch.Tensor, ...]:
        """Draft all levels, and return the [`DraftTree.fields`] of the tree.

        It writes to the rings and reads nothing on the host. The arguments are the results of `inputs`,
        [`Coupling.known`] and `prefix`, and a runner if the draft runs level by level, compiled or captured, with
        candidates ranked in between.
        """
        beam, shared = Beam(inputs[0]), self.begin(inputs, prefix)
        states: Sequence[torch.Tensor] = ()
        for depth, width in enumerate(self.widths):
            changing = self.level_inputs(beam, depth, shared, states)
            results = None if runner is None else self._run(runner, _level, changing, prefix, depth)
            logits, *states = results or self.level(changing, depth, prefix)
            scores = self.coupling.scores(self.spread(logits.to(inputs[0].device)), known, depth, beam.paths)
            beam.grow(scores, width)
        return self.cut(beam.fields(self.num_nodes), states)

    def cut(self, fields: tuple[torch.Tensor, ...], states: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the fields of a tree, maybe with some nodes made padding; `states` are results of the last level."""
        return fields

    def _run(self, runner: Any, function: Any, changing: tuple[torch.Tensor, ...], prefix: Any, number: int) -> Any:
        """Return the result of `_grow` or `_level`, compiled or captured; `None` if that is not possible."""
        of_prefix, fixed, settings = self.graph_of(runner, prefix)
        shape = len(changing[0]), tuple(self.widths), *settings, self.coupling.key, number
        inputs, fixed = (*changing, *of_prefix), (self, len(changing), number, fixed)
        return runner(function, shape, inputs, fixed, self._owner, self._holder)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the attention output `(B, H, n, D)` of queries to the keys that a mask `(B, n, M)` leaves.

        There may be more keys `(B, K, slots, D)` than the mask has.
        """
        key, value = key[:, :, : mask.shape[2]], value[:, :, : mask.shape[2]]
        out: torch.Tensor = self._kernels.tree_attention(query, key, value, mask=mask, scaling=self.scaling)[0]
        return out


def _grow(changing, drafter, count, num_inputs, fixed):
    """Run [`BeamDrafter.grow`] inside a graph."""
    prefix = drafter.prefix_in_graph(changing[count:], *fixed)
    return drafter.grow(tuple(changing[:num_inputs]), changing[num_inputs:count], prefix)


def _level(changing, drafter, count, depth, fixed):
    """Run [`BeamDrafter.level`] inside a graph."""
    return drafter.level(tuple(changing[:count]), depth, drafter.prefix_in_graph(changing[count:], *fixed))


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
    shape = count, binding.cache.batch_size, binding.target.vocab_size
    return draw_noise(*shape, generator=rule.noise.generator, device=rule.noise.device)


def drafted_tokens(
    rule: TokenRule | None,
    root: torch.Tensor,
    count: int,
    logits_after: Callable[[int, torch.Tensor], torch.Tensor],
    noise: torch.Tensor | None,
    with_q: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Draft a chain by the target's rule: roots and drafted tokens `(B, count + 1)`, if `with_q` their distributions.

    `logits_after` returns the logits `(B, vocab)` after tokens `(B,)` at a depth, and `noise` is that of
    [`noise_of_chain`]. It may be part of a graph if the rule `fits_graphs`.
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
        if with_q:
            distributions.append(scores.softmax(-1))
    return torch.stack(tokens, 1), chain_q(distributions) if with_q else None


def speedup_bound(gamma: int, share: float, weights: float, kv: float) -> float:
    """Return an upper bound on the tokens per second of speculation, relative to plain steps.

    A plain step reads `weights` bytes of weights, and `kv` bytes of keys and values for all rows together, of which a
    drafting step reads the `share` from 0 to 1.

    >>> speedup_bound(gamma=4, share=0.0, weights=1.0, kv=0.0), speedup_bound(4, 1.0, 1.0, 1e9)
    (1.0, 1.0)
    >>> speedup_bound(gamma=4, share=0.0, weights=0.0, kv=1.0)
    5.0
    """
    if not weights and not kv:
        return float(gamma + 1)
    kv *= KV_FACTOR
    return (gamma + 1) * (weights + kv) / ((gamma + 1) * weights + kv * (1 + gamma * share))


def weight_bytes(target: TargetView) -> int:
    """Return a lower bound on the bytes of weights that every step reads in this process.

    Only linear layers outside of experts count, since a step reads some of the experts only.
    """
    total = sum(
        module.weight.nbytes
        for name, module in target.model.named_modules()
        if isinstance(module, nn.Linear) and "expert" not in name
    )
    return total // (1 if target.ranks is None else target.ranks.size)


def entry_bytes(layers: Sequence[Any]) -> int:
    """Return the bytes of the keys and values of one token in the given layers of a cache."""
    parts = [part for layer in layers for part in (layer.keys, layer.values)]
    return sum(part.shape[1] * part.shape[3] * part.element_size() for part in parts)


class SelfDrafter(Drafter):
    """Draft chains with the target itself on a part of its cache, `sparse`.

    Subclasses set `sparse` and implement `graph_of` and `observe`.
    """

    sparse: Any
    steps_compile: bool = True
    """Whether drafting steps may be compiled. Others are captured as they are, or not at all."""

    def __init__(self, binding: Binding, draft: Any):
        super().__init__(binding)
        self.gamma = self.max_depth = draft.setting("num_assistant_tokens")
        self.num_nodes = self.gamma + 1
        self.sparse_ratio, self.sparse_min_tokens = draft.setting("sparse_ratio"), draft.setting("sparse_min_tokens")
        self._is_drawn = draft.setting("acceptance") == "rejection"

    @property
    def state_bytes(self) -> int:
        return int(self.sparse.nbytes)

    def num_selected(self, length: int) -> int:
        """Return how many of `length` committed tokens a drafting step reads in a sparse layer, or fewer."""
        return budget(length, self.sparse_ratio, self.sparse_min_tokens)

    def speedup_bound(self) -> float:
        lengths = self.binding.cache.lengths.host
        share = sum(map(self.num_selected, lengths)) / max(1, sum(lengths))
        layers = [self.binding.cache.layers[index] for index in self.sparse.sparse_layers]
        return speedup_bound(self.max_depth, share, self._weight_bytes, entry_bytes(layers) * sum(lengths))

    @cached_property
    def _weight_bytes(self) -> int:
        """Bytes of the target's weights, counted once per call."""
        return weight_bytes(self.binding.target)

    def graph_of(
        self, root: torch.Tensor
    ) -> tuple[Callable[..., StepContext], Any, tuple[torch.Tensor, ...], tuple, tuple]:
        """Return what a graph of a whole chain after `root` `(batch,)` consists of.

        Returns:
            `tuple`: A function of lengths that include the query, its positions `(B, 1)`, the windows of all layers,
            further `changing` tensors and `fixed` objects, to the context of a drafting step; it has no closure. The
            cache of the drafting steps. The roots `(B,)`, their positions `(B,)`, and `changing`. `fixed`, which stays
            the same for the same cache and settings. Hashable settings.
        """
        raise NotImplementedError

    def propose(self, root: torch.Tensor) -> DraftTree:
        """Return a chain of gamma tokens after `root` `(batch,)`, drafted in one graph if that is possible."""
        rule, target = self.binding.rule, self.binding.target
        noise = noise_of_chain(self.binding, self.gamma, self._is_drawn)
        with_q, chain = self._is_drawn and noise is not None, None
        context, cache, tensors, fixed, settings = self.graph_of(root)
        at_places = self.binding.cache.rows.offsets is None  # a graph computes positions from lengths alone
        if at_places and target.captures and (rule is None or rule.fits_graphs):
            steps = self.gamma, self.binding.max_length, with_q, target.windows
            key = context, *settings, () if rule is None else rule.key, *steps
            changing = tensors if noise is None else (*tensors, noise)
            further = rule, *steps, context, fixed
            chain = target.forwards_replayed(
                _chain, changing, further, key, cache, self.gamma, is_compiled=self.steps_compile
            )
        if chain is None:
            chain = drafted_tokens(rule, root, self.gamma, lambda _, token: self._draft_step(token), noise, with_q)
        return DraftTree.chain(chain[0], q=chain[1])

    def _draft_step(self, token: torch.Tensor) -> torch.Tensor:
        """Run the target on one token per row over what it reads, and return logits `(batch, vocab)`."""
        target, runner = self.binding.target, self.binding.target.runner
        is_fixed = self.steps_compile or (runner is not None and not runner.compiles)
        logits: torch.Tensor = self.sparse.step(target, token, self.binding.max_length, fixed_shape=is_fixed)[0]
        self.sparse.advance()
        return logits


def _chain(forward, starts, inputs, rule, gamma, limit, with_q, windows, context_of, fixed):
    """Draft a chain inside a graph; see [`SelfDrafter.graph_of`] and [`FixedSteps.forwards`]."""
    root, first, *changing = inputs
    noise = changing.pop() if rule is not None and rule.do_sample else None
    mask = root.new_ones(len(root), 1, 1, 1, dtype=torch.bool)

    def logits_after(depth: int, token: torch.Tensor) -> torch.Tensor:
        positions = (first + depth)[:, None].clamp_max(limit - 1)
        here = [start.plus(depth) for start in starts]
        context = context_of([start.plus(1) for start in here], positions, windows, *changing, *fixed)
        logits: torch.Tensor = forward(token[:, None], positions, mask, context, *here)
        return logits[:, 0]

    return drafted_tokens(rule, root, gamma, logits_after, noise, with_q)
