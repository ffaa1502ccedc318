"""The committed keys and values of one of the target's layers, for a draft to attend to."""

from dataclasses import dataclass

import torch

from ..attention_backends.registry import AttentionBackend
from .compiled import end_of_prefixes, known_lengths


@dataclass
class Prefix:
    """What is committed in one layer, for a block that is not part of the target.

    Args:
        keys (`torch.Tensor` of shape `(B, K, capacity, D)`): Of the target.
        values (`torch.Tensor` of shape `(B, K, capacity, D)`): Likewise.
        lengths (`torch.LongTensor` of shape `(B,)`): Committed tokens per row.
        host_lengths (`tuple[int, ...]`, *optional*): The same on the host; None where they are not to be read.
        end (`int`, *optional*): Where the longest of them ends; None for all of the buffer.
    """

    keys: torch.Tensor
    values: torch.Tensor
    lengths: torch.Tensor
    host_lengths: tuple[int, ...] | None
    end: int | None

    def attend(self, kernels: AttentionBackend, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attention of queries `(B, H, N, D)` to all of it."""
        used = self.keys[:, :, : self.end], self.values[:, :, : self.end]
        where = {"host_lengths": self.host_lengths}
        return kernels.prefix_attention(query, *used, self.lengths, scaling=scaling, **where)[0]


def prefix_in_graph(
    keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, known: int, sizes: list[torch.Tensor]
) -> Prefix:
    """The same inside a function that is compiled or captured, from what its runner says of the lengths."""
    return Prefix(keys, values, lengths, known_lengths(sizes, known, len(lengths)), end_of_prefixes(sizes, known))
