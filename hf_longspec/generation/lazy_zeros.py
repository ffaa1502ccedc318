"""Zeros that take no memory before they are written."""

import math

import numpy as np
import torch

# Bytes. Addresses of torch's own allocations are multiples of this.
ALIGNMENT = 64


def lazy_zeros(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return zeros of the given shape, with dtype and device of `like`.

    On a CPU, a page takes memory when it is first written. `torch.zeros` writes every zero, so a text of 100 tokens
    would pay for a buffer of 100,000; numpy gets pages of zeros from the system instead. On other devices the whole
    buffer is allocated at once.

    >>> lazy_zeros(torch.ones(1, dtype=torch.bfloat16), 2, 3).tolist()
    [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    """
    if like.device.type != "cpu" or torch.compiler.is_compiling():
        return like.new_zeros(shape)
    size = math.prod(shape) * like.element_size()
    pages = np.zeros(size + ALIGNMENT, np.uint8)
    start = -pages.ctypes.data % ALIGNMENT
    return torch.from_numpy(pages[start : start + size]).view(like.dtype).view(shape)
