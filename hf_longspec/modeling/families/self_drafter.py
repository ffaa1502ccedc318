"""Drafters with which the target drafts for itself, on a part of its cache."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ...attention_backends.contexts import StepContext
from ...generation.draft_tree import DraftTree
from ...generation.drafter import Binding, Drafter, drafted_tokens, noise_of_chain
from ...generation.sampling import TokenRule
from ...generation.sparse_caches import budget
from ...generation.target import TargetView
from .draft_weights import LowBitLinear

# Upper bound on the time per byte of keys and values, relative to that of weights. An attention kernel may reach only a
# small part of the bandwidth of matrix products, and weights may come from a cache of the processor.
KV_FACTOR = 16


def speedup_bound(gamma: int, share: float, weights: float, kv: float, drafting: float) -> float:
    """Return an upper bound on the tokens per second of speculation, relative to plain steps.

    A plain step reads `weights` bytes of weights, and `kv` bytes of keys and values for all rows together. A drafting
    step reads `drafting` bytes of weights, and of the keys and values the `share` from 0 to 1.

    >>> speedup_bound(gamma=4, share=0.0, weights=1.0, kv=0.0, drafting=1.0), speedup_bound(4, 1.0, 1.0, 1e9, 1.0)
    (1.0, 1.0)
    >>> speedup_bound(gamma=4, share=0.0, weights=0.0, kv=1.0, drafting=0.0)
    5.0
    >>> speedup_bound(gamma=4, share=1.0, weights=1.0, kv=0.0, drafting=0.25)
    2.5
    """
    if not weights and not kv:
        return float(gamma + 1)
    kv *= KV_FACTOR
    return (gamma + 1) * (weights + kv) / (weights + gamma * drafting + kv * (1 + gamma * share))


def weight_bytes(target: TargetView) -> int:
    """Return a lower bound on the bytes of weights that every step reads in this process.

    Only linear layers outside of experts count, since a step reads some of the experts only.
    """
    total = sum(
        (module.packed if isinstance(module, LowBitLinear) else module.weight).nbytes
        for name, module in target.model.named_modules()
        if isinstance(module, nn.Linear | LowBitLinear) and "expert" not in name
    )
    return total // (1 if target.ranks is None else target.ranks.size)


def entry_bytes(layers: Sequence[Any]) -> int:
    """Return the bytes of the keys and values of one token in the given layers of a cache."""
    parts = [part for layer in layers for part in (layer.keys, layer.values)]
    return sum(part.shape[1] * part.shape[3] * part.element_size() for part in parts)


class SelfDrafter(Drafter):
    """Draft chains on a part of the target's cache, `sparse`, with the target itself or a copy with cheaper weights.

    Subclasses set `sparse` and implement `chain_of_graph` and `observe`.
    """

    sparse: Any
    steps_compile: bool = True
    """Whether drafting steps may be compiled. Others are captured as they are, or not at all."""

    def __init__(self, binding: Binding, draft: Any):
        super().__init__(binding)
        copied = draft.weights_for(binding.target.model)
        self.stepper = binding.target if copied is None else TargetView(copied, binding.target.runner)
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
        weights, drafting = self._weight_bytes
        return speedup_bound(self.max_depth, share, weights, entry_bytes(layers) * sum(lengths), drafting)

    @cached_property
    def _weight_bytes(self) -> tuple[int, int]:
        """Bytes of the weights that the target and a drafting step read, counted once per call."""
        return weight_bytes(self.binding.target), weight_bytes(self.stepper)

    def attention(self) -> AbstractContextManager[None]:
        return nullcontext() if self.stepper is self.binding.target else self.stepper.attention()

    def chain_of_graph(self, root: torch.Tensor) -> "ChainInGraph":
        """Return what a graph of a whole chain after `root` `(batch,)` consists of."""
        raise NotImplementedError

    def propose(self, root: torch.Tensor) -> DraftTree:
        """Return a chain of gamma tokens after `root` `(batch,)`, drafted in one graph if that is possible."""
        rule, target = self.binding.rule, self.stepper
        noise = noise_of_chain(self.binding, self.gamma, self._is_drawn)
        with_q, drafted = self._is_drawn and noise is not None, None
        chain = self.chain_of_graph(root)
        at_places = self.binding.cache.rows.offsets is None  # a graph computes positions from lengths alone
        if at_places and target.captures and (rule is None or rule.fits_graphs):
            steps = ChainSteps(self.gamma, self.binding.max_length, with_q, target.windows)
            key = chain.context, *chain.settings, () if rule is None else rule.key, steps
            changing = root, chain.lengths, *chain.changing, *(() if noise is None else (noise,))
            fixed, is_compiled = (rule, steps, chain.context, chain.fixed), self.steps_compile
            drafted = target.forwards_replayed(
                _chain, changing, fixed, key, chain.cache, self.gamma, is_compiled=is_compiled
            )
        if drafted is None:
            drafted = drafted_tokens(rule, root, self.gamma, lambda _, token: self._draft_step(token), noise, with_q)
        return DraftTree.chain(drafted[0], q=drafted[1])

    def _draft_step(self, token: torch.Tensor) -> torch.Tensor:
        """Run one token per row over what a drafting step reads, and return logits `(batch, vocab)`."""
        target, runner = self.stepper, self.stepper.runner
        is_fixed = self.steps_compile or (runner is not None and not runner.compiles)
        logits: torch.Tensor = self.sparse.step(target, token, self.binding.max_length, fixed_shape=is_fixed)[0]
        self.sparse.advance()
        return logits


@dataclass(frozen=True)
class ChainInGraph:
    """What a graph of a whole chain consists of."""

    # function without closure of lengths that include the query, its positions `(B, 1)`, the windows of all layers,
    # `changing` and `fixed`, to the context of a drafting step
    context: Callable[..., StepContext]
    cache: Any  # of the drafting steps
    lengths: torch.Tensor  # positions `(B,)` of the roots
    changing: tuple[torch.Tensor, ...] = ()  # tensors of the chain
    fixed: tuple = ()  # objects that stay the same for the same cache and settings
    settings: tuple = ()  # hashable, what distinguishes graphs


@dataclass(frozen=True)
class ChainSteps:
    """The drafting steps of a chain."""

    count: int
    limit: int  # positions are clamped below it
    with_q: bool  # whether the distributions of the tokens are wanted
    windows: tuple[int | None, ...]  # of all layers


def _chain(
    forward: Callable[..., torch.Tensor],
    starts: Sequence[Any],
    inputs: Sequence[torch.Tensor],
    rule: TokenRule | None,
    steps: ChainSteps,
    context_of: Callable[..., StepContext],
    fixed: tuple,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Draft a chain inside a graph; see [`ChainInGraph`] and [`FixedSteps.forwards`]."""
    root, first, *changing = inputs
    noise = changing.pop() if rule is not None and rule.do_sample else None
    mask = root.new_ones(len(root), 1, 1, 1, dtype=torch.bool)

    def logits_after(depth: int, token: torch.Tensor) -> torch.Tensor:
        positions = (first + depth)[:, None].clamp_max(steps.limit - 1)
        here = [start.plus(depth) for start in starts]
        context = context_of([start.plus(1) for start in here], positions, steps.windows, *changing, *fixed)
        logits: torch.Tensor = forward(token[:, None], positions, mask, context, *here)
        return logits[:, 0]

    return drafted_tokens(rule, root, steps.count, logits_after, noise, steps.with_q)
