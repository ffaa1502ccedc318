# Published with a draft by hf_longspec, Apache-2.0.
"""Which slots of a key or value buffer are used, and reading chosen ones."""

from collections.abc import Callable

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true


def gather_slots(cached: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Copy slots out of a buffer.

    Args:
        cached (`torch.Tensor` of shape `(B, K, S, D)`): Buffer, or a view of one.
        indices (`torch.LongTensor` of shape `(B, K, T)` or `(B, 1, T)`): Slots, per head or the same for all.

    Returns:
        `torch.Tensor` of shape `(B, K, T, D)`, contiguous.
    """
    batch, heads, slots, size = cached.shape
    strides = cached.stride()
    # One index_select copies whole rows of D numbers; gather looks up each number on its own and takes 4 times as long
    # (T=2048, K=2, D=32, bfloat16). It needs a buffer that can be seen as one table of rows: any slice of one can.
    if strides[3] != 1 or any(stride % size for stride in strides[:3]) or cached.numel() == 0:
        return cached.gather(2, indices.expand(-1, heads, -1)[..., None].expand(-1, -1, -1, size))
    of_batch, of_head, of_slot = (stride // size for stride in strides[:3])
    rows = (batch - 1) * of_batch + (heads - 1) * of_head + (slots - 1) * of_slot + 1
    table = cached.as_strided((rows, size), (size, 1))
    flat = indices if of_slot == 1 else indices * of_slot
    device = indices.device
    first = torch.arange(0, heads * of_head, of_head, device=device) if of_head else indices.new_zeros(heads)
    flat = flat + first[:, None]
    if batch > 1:
        flat = flat + torch.arange(batch, device=device)[:, None, None] * of_batch
    return table.index_select(0, flat.view(-1)).view(batch, heads, -1, size)


def shared_length(host_lengths: tuple[int, ...]) -> int | None:
    """The length of all rows, or None if they have several.

    In a graph, lengths that are handed over one by one count as several: comparing them would compile in which of them
    happen to be equal.
    """
    first = host_lengths[0]
    if torch.compiler.is_compiling():
        return first if all(statically_known_true(length == first) for length in host_lengths) else None
    return first if host_lengths.count(first) == len(host_lengths) else None


def window_holds_all(sliding_window: int, longest: int, nodes: int) -> bool:
    """Whether a window hides nothing behind a prefix of `longest` tokens.

    Even the deepest node that can be, `nodes - 1` positions past the root, sees slot 0.
    """
    return longest + nodes <= sliding_window


def attention_to_copies(
    prefix_attention: Callable[..., tuple[torch.Tensor, torch.Tensor]],
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The `sparse_attention` of a backend that copies the chosen slots and attends to the copies; see reference.py."""

    def sparse_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        indices: torch.Tensor,
        counts: torch.Tensor,
        *,
        scaling: float,
        softcap: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = gather_slots(key, indices), gather_slots(value, indices)
        return prefix_attention(query, *chosen, counts, scaling=scaling, softcap=softcap)

    return sparse_attention
