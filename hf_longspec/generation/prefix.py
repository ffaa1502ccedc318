"""The committed keys and values of one layer of the target, which a draft attends to."""

from dataclasses import dataclass

import torch

from ..attention_backends.registry import AttentionBackend
from .compiled import end_of_prefixes, known_lengths


@dataclass
class Prefix:
    """
    The prefix in one layer of the target, for a block that is not part of the target.

    Args:
        keys (`torch.Tensor` of shape `(B, K, capacity, D)`): Keys of the target's cache.
        values (`torch.Tensor` of shape `(B, K, capacity, D)`): Values of the target's cache.
        lengths (`torch.LongTensor` of shape `(B,)`): Number of committed tokens per row.
        host_lengths (`tuple[int, ...]`, *optional*): `lengths` on the host. `None` inside graphs that must not depend
            on them.
        end (`int`, *optional*): End of the longest row in the buffer; `None` for the whole buffer.
    """

    keys: torch.Tensor
    values: torch.Tensor
    lengths: torch.Tensor
    host_lengths: tuple[int, ...] | None
    end: int | None

    def attend(self, kernels: AttentionBackend, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Return the attention output `(B, H, N, D)` of queries `(B, H, N, D)` over the whole prefix."""
        used = self.keys[:, :, : self.end], self.values[:, :, : self.end]
        where = {"host_lengths": self.host_lengths}
        return kernels.prefix_attention(query, *used, self.lengths, scaling=scaling, **where)[0]


def prefix_in_graph(
    keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, known: int, sizes: list[torch.Tensor]
) -> Prefix:
    """Return the prefix inside a compiled or captured function.

    Args:
        keys (`torch.Tensor` of shape `(B, K, capacity, D)`): Keys of the target's cache.
        values (`torch.Tensor` of shape `(B, K, capacity, D)`): Values of the target's cache.
        lengths (`torch.LongTensor` of shape `(B,)`): Number of committed tokens per row.
        known (`int`): Result of the runner's `knows`.
        sizes (`list[torch.Tensor]`): Result of the runner's `sizes`.
    """
    return Prefix(keys, values, lengths, known_lengths(sizes, known, len(lengths)), end_of_prefixes(sizes, known))
