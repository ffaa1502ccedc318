"""Tensor parallelism: the processes that hold one target together, and what they have to agree on.

Every rank runs the whole loop on the same prompts. The target's logits are gathered, so all ranks see the same ones;
what a rank holds of the cache are its own key/value heads.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel


class Ranks:
    """The ranks among which a target's heads are divided, in order.

    Args:
        group (`torch.distributed.ProcessGroup`): Their process group.
        device (`torch.device`): Where this rank's tensors live.
    """

    def __init__(self, group: Any, device: torch.device):
        self.group = group
        self.device = device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Ranks | None":
        """Those of a model that was loaded with a `tp_plan`; None if it lives in one process."""
        if (getattr(model, "_tp_size", None) or 1) < 2:
            return None
        mesh: Any = model._device_mesh
        if "tp" in (mesh.mesh_dim_names or ()):
            mesh = mesh["tp"]
        return cls(mesh.get_group(), model.device)

    @property
    def is_everyone(self) -> bool:
        """Whether there are no other processes."""
        return self.size == dist.get_world_size()

    def first(self, numbers: Sequence[int]) -> list[int]:
        """The first rank's numbers, on every rank."""
        shared = torch.tensor(numbers, dtype=torch.long, device=self.device)
        dist.broadcast(shared, group=self.group, group_src=0)
        return shared.tolist()

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, written to `values`."""
        dist.all_reduce(values, group=self.group)
        return values

    def own_heads(self, heads: torch.Tensor) -> torch.Tensor:
        """Of `(B, H, N, D)` the heads that belong to this rank's key/value heads, `(B, H / ranks, N, D)`."""
        return heads.chunk(self.size, dim=1)[self.rank]

    def all_heads(self, heads: torch.Tensor) -> torch.Tensor:
        """All ranks' heads in order, from this rank's: the inverse of `own_heads`."""
        parts = [torch.empty_like(heads, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, heads.contiguous(), group=self.group)
        return torch.cat(parts, dim=1)
