# Published with a draft by hf_longspec, Apache-2.0.
"""Zeros that take no memory before they are written to."""

import math

import numpy as np
import torch

# Bytes; what torch's own allocations begin at a multiple of.
ALIGNMENT = 64


def lazy_zeros(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Zeros of a shape, with dtype and device of `like`; on a CPU, a page takes memory when it is first written to.

    `torch.zeros` writes every zero, so that a text of 100 tokens would pay for a buffer of 100,000. Numpy asks the
    system for pages of zeros instead. On other devices the whole buffer is taken at once.

    >>> lazy_zeros(torch.ones(1, dtype=torch.bfloat16), 2, 3).tolist()
    [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    """
    if like.device.type != "cpu" or torch.compiler.is_compiling():
        return like.new_zeros(shape)
    size = math.prod(shape) * like.element_size()
    pages = np.zeros(size + ALIGNMENT, np.uint8)
    start = -pages.ctypes.data % ALIGNMENT
    return torch.from_numpy(pages[start : start + size]).view(like.dtype).view(shape)
