"""An upper bound on the speed-up of self-speculation, from the bytes that a step reads.

Each of gamma drafting steps reads all weights and a share of the keys and values. The verification reads all weights,
keys and values once, and emits gamma + 1 tokens if every draft is accepted. Plain steps would read all of them once for
each of these tokens. Speculation only saves reads of keys and values, so the bound approaches 1 as the cache gets small
or the share approaches 1.

Every estimate errs in favour of speculation, so that no measured speed-up exceeds the bound.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn

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
