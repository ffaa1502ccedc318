"""Drafters with which the target drafts for itself, on a part of its cache."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ...attention_backends.contexts import StepContext
from ...attention_backends.lengths import SeqLens
from ...generation.draft_tree import DraftTree
from ...generation.drafter import Binding, Drafter, drafted_tokens, noise_of_chain
from ...generation.sampling import TokenRule
from ...generation.target import Forward, Forwards, TargetView
from .draft_weights import LowBitLinear
from .sparse_caches import budget

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

    Subclasses set `sparse` and implement `chain` and `observe`.
    """

    sparse: Any
    steps_compile: bool = True
    """Whether drafting steps may be compiled. Others are captured as they are, or not at all."""

    def __init__(self, binding: Binding, draft: Any):
        super().__init__(binding)
        copied = draft.weights_for(binding.target.model)
        self.stepper = binding.target if copied is None else TargetView(copied, binding.target.steps.runner)
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

    def chain(self, root: torch.Tensor, steps: "ChainSteps") -> tuple["Chain", Any, tuple[torch.Tensor, ...]]:
        """Return a chain in one graph, the cache of its steps, and its inputs after the roots `(batch,)`."""
        raise NotImplementedError

    def propose(self, root: torch.Tensor) -> DraftTree:
        """Return a chain of gamma tokens after `root` `(batch,)`, drafted in one graph if that is possible."""
        rule, target = self.binding.rule, self.stepper
        noise = noise_of_chain(self.binding, self.gamma, self._is_drawn)
        with_q, drafted = self._is_drawn and noise is not None, None
        steps = ChainSteps(rule, self.gamma, self.binding.max_length, with_q, target.windows)
        chain, cache, inputs = self.chain(root, steps)
        at_places = self.binding.cache.rows.offsets is None  # a graph computes positions from lengths alone
        if at_places and (rule is None or rule.fits_graphs):
            inputs = (root, *inputs) if noise is None else (root, *inputs, noise)
            drafted = target.steps.forwards(chain, cache, self.gamma, *inputs, may_compile=self.steps_compile)
        if drafted is None:
            drafted = drafted_tokens(rule, root, self.gamma, lambda _, token: self._draft_step(token), noise, with_q)
        return DraftTree.chain(drafted[0], q=drafted[1])

    def _draft_step(self, token: torch.Tensor) -> torch.Tensor:
        """Run one token per row over what a drafting step reads, and return logits `(batch, vocab)`."""
        target = self.stepper
        is_fixed = self.steps_compile or not target.steps.compiles
        logits: torch.Tensor = self.sparse.step(target, token, self.binding.max_length, fixed_shape=is_fixed)[0]
        self.sparse.advance()
        return logits


@dataclass(eq=False)
class ChainSteps:
    """The drafting steps of a chain."""

    rule: TokenRule | None
    count: int
    limit: int  # positions are clamped below it
    with_q: bool  # whether the distributions of the tokens are wanted
    windows: tuple[int | None, ...]  # of all layers

    @property
    def key(self) -> tuple:
        """What tells graphs of such steps apart."""
        return self.count, self.limit, self.with_q, self.windows, () if self.rule is None else self.rule.key


@dataclass(eq=False)
class Chain(Forwards):
    """A chain in one graph."""

    steps: ChainSteps

    @property
    def key(self) -> tuple:
        return self.steps.key

    def context(self, ends: Sequence[SeqLens], positions: torch.Tensor, *inputs: torch.Tensor) -> StepContext:
        """Return the context of a step at `positions` `(B, 1)`; `ends` are lengths that include the query."""
        raise NotImplementedError

    def run(self, forward: Forward, starts: Sequence[SeqLens], *inputs: torch.Tensor) -> Any:
        """Draft after the roots and their positions `(B,)`, which further inputs follow, noise at the end."""
        (root, first, *more), steps = inputs, self.steps
        is_sampled = steps.rule is not None and steps.rule.do_sample
        noise, more = (more[-1], more[:-1]) if is_sampled else (None, more)
        mask = root.new_ones(len(root), 1, 1, 1, dtype=torch.bool)

        def logits_after(depth: int, token: torch.Tensor) -> torch.Tensor:
            positions = (first + depth)[:, None].clamp_max(steps.limit - 1)
            here = [start.plus(depth) for start in starts]
            context = self.context([start.plus(1) for start in here], positions, *more)
            return forward(token[:, None], positions, mask, context, *here)[:, 0]

        return drafted_tokens(steps.rule, root, steps.count, logits_after, noise, steps.with_q)
