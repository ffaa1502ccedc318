"""A drafter that runs the target itself on a part of its cache, and the speed-up that this can have at most.

The speed-up bound follows from the bytes that a step reads. Each of gamma drafting steps reads all weights and a
share of the keys and values. The verification reads all weights, keys and values once, and emits gamma + 1 tokens if
every draft is accepted; plain steps would read everything once for each of these tokens. Every estimate errs in
favour of speculation, so that no measured speed-up exceeds the bound.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ..attention_backends.contexts import StepContext
from .draft_tree import DraftTree
from .drafted_chain import drafted_tokens, noise_of_chain
from .drafter import Binding, Drafter, independent_draws
from .target import TargetView

# Upper bound on the time per byte of keys and values, relative to that of weights. An attention kernel may reach only a
# small part of the bandwidth of matrix products, and weights may come from a cache of the processor.
KV_FACTOR = 16


def speedup_bound(gamma: int, share: float, weights: float, kv: float) -> float:
    """Return an upper bound on the tokens per second of speculation, relative to plain steps.

    Args:
        gamma (`int`): Number of drafted tokens.
        share (`float`): Share of the keys and values that a drafting step reads, from 0 to 1.
        weights (`float`): Bytes of weights that a plain step reads.
        kv (`float`): Bytes of keys and values that a plain step reads, all rows together.

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
        module.weight.numel() * module.weight.element_size()
        for name, module in target.model.named_modules()
        if isinstance(module, nn.Linear) and "expert" not in name
    )
    return total // (1 if target.ranks is None else target.ranks.size)


def entry_bytes(layers: Sequence[Any]) -> int:
    """Return the bytes of the keys and values of one token in the given layers of a cache."""
    parts = [part for layer in layers for part in (layer.keys, layer.values)]
    return sum(part.shape[1] * part.shape[3] * part.element_size() for part in parts)


class SelfDrafter(Drafter):
    """Draft chains with the target itself on a part of its cache.

    Subclasses implement `propose` and `observe`, and say which part of which layers a drafting step reads.

    Args:
        binding ([`Binding`]): Target, cache and rule of this call.
        gamma (`int`): Number of drafted tokens.
        acceptance (`str`): When sampling, `rejection` or `coupled`.
    """

    def __init__(self, binding: Binding, gamma: int, acceptance: str):
        super().__init__(binding)
        self.gamma = self.max_depth = gamma
        self.num_nodes = gamma + 1
        self._is_drawn = acceptance == "rejection"

    @property
    def sparse_layers(self) -> Sequence[int]:
        """Indices of the layers of which a drafting step reads a part only."""
        raise NotImplementedError

    def num_selected(self, length: int) -> int:
        """Return how many of `length` committed tokens a drafting step reads in a sparse layer, or fewer."""
        raise NotImplementedError

    def speedup_bound(self) -> float:
        """Return an upper bound on the tokens per second after the present prefixes, relative to plain steps."""
        lengths = self.binding.cache.lengths.host
        share = sum(map(self.num_selected, lengths)) / max(1, sum(lengths))
        layers = [self.binding.cache.layers[index] for index in self.sparse_layers]
        return speedup_bound(self.max_depth, share, self._weight_bytes, entry_bytes(layers) * sum(lengths))

    @cached_property
    def _weight_bytes(self) -> int:
        """Bytes of the target's weights, counted once per call."""
        return weight_bytes(self.binding.target)

    def draws(self, root: torch.Tensor) -> torch.Tensor | None:
        """Return noise to draw the tokens after `root` `(batch,)` with; `None` if they are not drawn."""
        return independent_draws(self.binding, root, self.gamma) if self._is_drawn else None

    def captured(
        self,
        context: Callable[..., StepContext],
        cache: Any,
        tensors: tuple[torch.Tensor, ...],
        draws: torch.Tensor | None,
        fixed: tuple,
        settings: tuple,
        **options: Any,
    ) -> DraftTree | None:
        """Return a chain that is drafted in one graph; `None`, with nothing done, if it cannot be captured.

        Args:
            context (`Callable`): Function of lengths that include the query, its positions `(B, 1)`, the windows of all
                layers, `changing` and `fixed`, to the context of a drafting step. It has no closure.
            cache ([`SpeculativeCache`] or [`CompactCache`]): Cache of the drafting steps.
            tensors (`tuple[torch.Tensor, ...]`): The roots `(B,)`, their positions `(B,)`, and `changing`.
            draws (`torch.Tensor` of shape `(gamma, B, vocab)`, *optional*): Result of `draws`.
            fixed (`tuple`): Objects that stay the same for the same `cache` and `settings`.
            settings (`tuple`): Hashable values.
            options (`Any`): Options of [`FixedSteps.forwards`].
        """
        rule, target = self.binding.rule, self.binding.target
        if not target.captures or not (rule is None or rule.fits_graphs):
            return None
        noise = noise_of_chain(rule, self.gamma, draws)
        steps = self.gamma, self.binding.max_length, draws is not None, target.windows
        key = context, *settings, () if rule is None else rule.key, *steps
        found = target.forwards_replayed(
            _chain, (*tensors, *noise), (rule, *steps, context, fixed), key, cache, self.gamma, **options
        )
        return None if found is None else DraftTree.chain(found[0], q=found[1])


def _chain(forward, starts, inputs, rule, gamma, limit, is_drawn, windows, context_of, fixed):
    """Draft a chain inside a graph; see [`SelfDrafter.captured`] and [`FixedSteps.forwards`]."""
    has_noise = is_drawn or (rule is not None and rule.do_sample)
    root, first, *changing = inputs
    noise = changing.pop() if has_noise else None
    mask = root.new_ones(len(root), 1, 1, 1, dtype=torch.bool)

    def logits_after(depth: int, token: torch.Tensor) -> torch.Tensor:
        positions = (first + depth)[:, None].clamp_max(limit - 1)
        here = [start.plus(depth) for start in starts]
        context = context_of([start.plus(1) for start in here], positions, windows, *changing, *fixed)
        found: torch.Tensor = forward(token[:, None], positions, mask, context, *here)
        return found[:, 0]

    return drafted_tokens(rule, root, gamma, logits_after, noise, is_drawn)
