"""Moving accepted nodes to the slots right after the prefix, in place, in all layers of a device by one Triton launch.

    for m < counts[b]:    buffer[b, h, lengths[b] + m] = buffer[b, h, lengths[b] + path[b, m]]    in every buffer

A table on the device holds the address of every head of every buffer. One program moves one head of one row. Numbers
are moved as words of up to 8 bytes, so dtypes do not matter and nothing is rounded. The kernel is tested in
Triton's interpreter, has run on an H200, and is compiled for sm_80, sm_90 and sm_100.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, lru_cache

import torch
from transformers.utils import logging

from .config import INSTALLED, OPTIONS, jit, tl
from .launch import LIBRARY, launching_on

logger = logging.get_logger(__name__)

# Slots and words that one program holds in registers: a path is rarely longer than 16 nodes, and 32 words of 8 bytes
# are 128 numbers of 16 bits.
BLOCK_M, BLOCK_W = 16, 32


@jit(do_not_specialize=["stride_pb", "stride_pm", "nodes"])
def _move_kernel(
    table,
    path,
    lengths,
    counts,
    stride_pb,
    stride_pm,
    nodes,
    WORD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Move one head of one buffer, one row. The table and everything that is multiplied by a stride is int64."""
    entry = table + tl.program_id(0) * 4
    batch = tl.program_id(1).to(tl.int64)
    address, stride_b = tl.load(entry), tl.load(entry + 1)  # unmasked: every program has an entry
    stride_s, width = tl.load(entry + 2), tl.load(entry + 3)  # unmasked: likewise
    length, count = tl.load(lengths + batch), tl.load(counts + batch)  # unmasked: one number per row
    prefix = address.to(tl.pointer_type(WORD)) + batch * stride_b + length * stride_s
    count = tl.minimum(count, nodes).to(tl.int32)
    for start in range(0, count, BLOCK_M):
        node = start + tl.arange(0, BLOCK_M)
        source = tl.load(path + batch * stride_pb + node.to(tl.int64) * stride_pm, mask=node < count, other=0)
        moved = (node < count) & (source != node)
        for first in range(0, width, BLOCK_W):
            column = first + tl.arange(0, BLOCK_W)
            mask = moved[:, None] & (column < width)[None, :]
            words = tl.load(prefix + source[:, None] * stride_s + column[None, :], mask=mask, other=0)
            # A target may be another node's source, which another thread reads. All nodes of the block are read before
            # any is written. Later blocks lie after everything written so far, as node m is slot m or a later one.
            tl.debug_barrier()
            tl.store(prefix + node.to(tl.int64)[:, None] * stride_s + column[None, :], words, mask=mask)


@lru_cache(maxsize=16)
def _table(places: tuple[tuple[int, ...], ...], device: torch.device) -> tuple[torch.Tensor, int]:
    """Return the table `(rows, 4)` and the bytes of a word, from `(address, heads, width, strides b, h, s)` in bytes.

    It is kept, because the buffers of a cache stay where they are from its first step to its last.
    """
    size = math.gcd(8, *(number for place in places for number in (place[0], *place[2:])))
    rows = [
        (address + head * stride_h, stride_b // size, stride_s // size, width // size)
        for address, heads, width, stride_b, stride_h, stride_s in places
        for head in range(heads)
    ]
    return torch.tensor(rows, dtype=torch.int64, device=device), size


def _place(buffer: torch.Tensor) -> tuple[int, ...]:
    if buffer.stride(3) != 1:
        raise ValueError(
            f"a buffer has strides {buffer.stride()}, expected 1 in the last dimension: a slot is moved as one piece. "
            "Move it with torch."
        )
    size = buffer.element_size()
    strides = (stride * size for stride in buffer.stride()[:3])
    return (buffer.data_ptr(), buffer.shape[1], buffer.shape[3] * size, *strides)


@torch.library.custom_op(f"{LIBRARY}::triton_move_nodes", mutates_args=("buffers",))
def move_nodes(
    buffers: Sequence[torch.Tensor], path: torch.Tensor, lengths: torch.Tensor, counts: torch.Tensor
) -> None:
    """Copy the nodes of a path to the slots right after the prefix, in place, in one launch.

    Args:
        buffers (sequence of `torch.Tensor` of shape `(B, K, S, D)`):
            Keys and values of any number of layers on one device. Shapes, strides and dtypes may differ; the last
            stride is 1. Slots from `lengths[b]` on hold the nodes.
        path (`torch.LongTensor` of shape `(B, M)`):
            Nodes to keep, strictly increasing from 0 on. Entries at and beyond `counts[b]` are ignored.
        lengths (`torch.LongTensor` of shape `(B,)`): Prefix per row.
        counts (`torch.LongTensor` of shape `(B,)`): Nodes to keep of each row.

    Raises:
        ValueError: If a last stride is not 1.
    """
    places = tuple(_place(buffer) for buffer in buffers if buffer.numel())
    if not places or path.numel() == 0:
        return
    with launching_on(path):
        table, size = _table(places, path.device)
        _move_kernel[(table.shape[0], path.shape[0])](
            *(table, path, lengths.contiguous(), counts.contiguous(), *path.stride(), path.shape[1]),
            WORD={8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}[size],
            BLOCK_M=BLOCK_M,
            BLOCK_W=BLOCK_W,
            num_warps=4,
            **OPTIONS,
        )


@move_nodes.register_fake
def _(buffers, path, lengths, counts) -> None:
    pass


def can_move(device: torch.device) -> bool:
    """Return whether to call [`move_nodes`] on this device: an NVIDIA GPU with Triton where a first move was right."""
    return INSTALLED and device.type == "cuda" and torch.version.hip is None and _works_on(device)


@cache
def _works_on(device: torch.device) -> bool:
    """Move nodes 0, 2 and 3 of five, and return whether they arrived. Without a C compiler, for instance, none does."""
    buffer = torch.arange(10, device=device).view(1, 1, 5, 2)
    path, lengths, counts = (torch.tensor(numbers, device=device) for numbers in ([[0, 2, 3]], [1], [3]))
    try:
        move_nodes([buffer], path, lengths, counts)
        problem = None if buffer.flatten().tolist() == [0, 1, 2, 3, 6, 7, 8, 9, 8, 9] else "it moved the wrong slots"
    except Exception as error:  # Triton, its compiler and the driver share no class of errors
        problem = f"{type(error).__name__}: {error}"
    if problem is not None:
        logger.warning(
            "Triton is installed, but failed to move accepted tokens on %s (%s). Torch moves them instead, layer by "
            "layer.",
            device,
            problem,
        )
    return problem is None
