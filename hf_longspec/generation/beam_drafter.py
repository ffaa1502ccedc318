"""A drafter that grows a beam with a module of its own."""

from functools import partial
from typing import Any

import torch

from ..attention_backends.registry import AttentionBackend, AttentionCall, outside_autocast, select
from .drafter import Binding, Drafter
from .sampling import Coupling


class BeamDrafter(Drafter):
    """Draft trees with a fixed number of nodes per level. Subclasses implement `propose` and `observe`.

    Args:
        binding ([`Binding`]): Target, cache and rule of this call.
        weight (`torch.Tensor`): A weight of the module, whose device and dtype its keys and values have.
        head_dim (`int`): Size of a head of the module.
        widths (`list[int]`): Number of nodes of each level, root excluded.

    Attributes:
        coupling ([`Coupling`]): Ranks the candidates.
        scaling (`float`): Factor of the attention scores.
    """

    def __init__(self, binding: Binding, weight: torch.Tensor, head_dim: int, widths: list[int]):
        super().__init__(binding)
        self.coupling = Coupling(binding.rule)
        self.widths = widths
        self.num_nodes = 1 + sum(widths)
        self.max_depth = len(widths)
        self.device, self.dtype = weight.device, weight.dtype
        self.scaling = head_dim**-0.5
        self._kernels: AttentionBackend = select(AttentionCall(self.device, self.dtype, head_dim, head_dim))

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Return the attention output `(B, H, n, D)` of queries to the keys that a mask `(B, n, M)` leaves."""
        attention = partial(self._kernels.tree_attention, mask=seen, scaling=self.scaling)
        out: torch.Tensor = outside_autocast(attention, query, key, value)[0]
        return out

    def runner(self) -> Any:
        """Return what runs steps compiled or captured after the present prefixes, if anything does."""
        runner = self.binding.target.runner
        return runner if runner is not None and runner.takes(self.binding.cache.lengths) else None
