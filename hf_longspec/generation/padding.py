"""Padding of prompts. The loop drops it, and plain `generate` keeps a column for it in the cache and in its windows."""

import torch
from torch.nn.functional import pad


def has_gaps(mask: torch.Tensor) -> bool:
    """Return whether there is padding between tokens of a row, where `mask` `(batch, P)` is 0."""
    is_token = mask.bool()
    return bool((is_token[:, :-1] & ~is_token[:, 1:]).any())


def columns_of(mask: torch.Tensor, count: int) -> torch.Tensor:
    """Return the columns of the first `count` tokens of every row, `(batch, count)`.

    Tokens of a prompt stand where its mask `(batch, P)` is not 0, and generated ones in the columns from P on.

    >>> columns_of(torch.tensor([[0, 1, 0, 1], [1, 1, 1, 1]]), 4).tolist()
    [[1, 3, 4, 5], [0, 1, 2, 3]]
    """
    is_token = pad(mask.bool(), (0, count), value=True)
    return is_token.byte().argsort(dim=1, descending=True, stable=True)[:, :count].contiguous()
