"""What a target that drafts for itself can gain at most, from the bytes that a step reads.

gamma drafting steps read all weights and a share of the keys and values each; the verification reads all of both once,
and gives gamma + 1 tokens if everything is accepted, for which plain steps would read all of both gamma + 1 times. What
can be saved is keys and values, so little of them, or a share of one, leaves nothing to gain.

All estimates err on the side of speculation: what is called impossible here must not be possible.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn

from .target import TargetView

# Time per byte of keys and values over that of weights, at most: an attention kernel may reach a small part of the
# bandwidth that matrix products do, and weights may come from a cache.
KV_FACTOR = 16


def speedup_bound(gamma: int, share: float, weights: float, kv: float) -> float:
    """Bound on tokens per second over those of plain steps.

    Args:
        gamma (`int`): Drafted tokens.
        share (`float`): Of the keys and values that drafting reads.
        weights (`float`): Bytes of weights that a step reads.
        kv (`float`): Bytes of keys and values that it reads, all rows together.

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
    """Bytes of weights that every step reads, or less: linear layers outside of experts, on this process."""
    total = sum(
        module.weight.numel() * module.weight.element_size()
        for name, module in target.model.named_modules()
        if isinstance(module, nn.Linear) and "expert" not in name
    )
    return total // (1 if target.ranks is None else target.ranks.size)


def entry_bytes(layers: Sequence[Any]) -> int:
    """Bytes of one token's keys and values in some layers of a cache."""
    parts = [part for layer in layers for part in (layer.keys, layer.values)]
    return sum(part.shape[1] * part.shape[3] * part.element_size() for part in parts)
