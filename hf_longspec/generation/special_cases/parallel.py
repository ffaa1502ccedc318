"""Targets of several processes: communication under tensor parallelism, and sharded weights, which end speculation.

Under tensor parallelism, every rank runs the whole loop on the same prompts. The target's logits are gathered, so that
they are the same on all ranks. The cache of a rank holds the rank's own key/value heads.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from ..call import SHARDED, Call
from ..special_case import SpecialCase
from ..target import TENSOR_PARALLELISM


class Ranks:
    """Communicate between the ranks that share the heads of a target."""

    def __init__(self, group: Any, device: torch.device):
        self.group = group
        self.device = device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    @property
    def is_everyone(self) -> bool:
        """Whether the group contains all processes."""
        return self.size == dist.get_world_size()

    def first(self, numbers: Sequence[int]) -> list[int]:
        """Return the numbers of the first rank, on every rank."""
        shared = torch.tensor(numbers, dtype=torch.long, device=self.device)
        dist.broadcast(shared, group=self.group, group_src=0)
        return shared.tolist()

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, which replaces `values` in place."""
        dist.all_reduce(values, group=self.group)
        return values

    def own_heads(self, heads: torch.Tensor) -> torch.Tensor:
        """Return from `(B, H, N, D)` the heads of this rank's key/value heads, `(B, H / ranks, N, D)`."""
        return heads.chunk(self.size, dim=1)[self.rank]

    def all_heads(self, heads: torch.Tensor) -> torch.Tensor:
        """Gather the heads of all ranks in order, `(B, H, N, D)`: the inverse of `own_heads`."""
        parts = [torch.empty_like(heads, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, heads.contiguous(), group=self.group)
        return torch.cat(parts, dim=1)


class Parallel(SpecialCase):
    """Targets whose heads several processes share."""

    case = TENSOR_PARALLELISM

    def ranks_of(self, model: PreTrainedModel) -> Ranks:
        """Return the ranks of a model that was loaded with a `tp_plan`."""
        mesh: Any = model._device_mesh
        if "tp" in (mesh.mesh_dim_names or ()):
            mesh = mesh["tp"]
        return Ranks(mesh.get_group(), model.device)


class Sharded(SpecialCase):
    """Targets whose weights each forward gathers from all processes, whose drafts need other numbers of forwards."""

    case = SHARDED

    def why_not(self, call: Call) -> Iterator[str]:
        """Yield the reason, if FSDP holds a part of the model, or `generate` counts the forwards of all processes."""
        from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel  # there only in processes of a group

        modules, kinds = call.target.model.modules(), (FSDPModule, FullyShardedDataParallel)
        if call.model_kwargs.get("synced_gpus") or any(isinstance(module, kinds) for module in modules):
            yield (
                "the weights are sharded over processes (FSDP, ZeRO-3 or synced_gpus=True), which must run the same "
                "number of forwards. Generate with a copy that each process holds whole."
            )
