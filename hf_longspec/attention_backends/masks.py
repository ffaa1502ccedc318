"""Additive masks: added to the scores, -inf where a query does not see a key.

`ExplicitMask` and `PositionMask` are masks of a whole call that are only ever computed for a block of its keys:
`mask(start, stop)`. `WindowMask` is the boolean mask of a sliding window as a tensor without entries.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

KeyMask = Callable[[int, int], torch.Tensor]


def additive_mask(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The additive mask that says the same as `mask`.

    Args:
        mask (`torch.Tensor`): True where a query sees a key; or an additive mask already.
        dtype (`torch.dtype`): Floating point dtype of the result.

    Returns:
        `torch.Tensor` of the same shape. The lowest number of a dtype, which transformers writes for "hidden", becomes
        -inf: a query whose keys are all hidden then gets 0 instead of the mean of all values.
    """
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
    return mask.masked_fill(mask <= torch.finfo(mask.dtype).min, -torch.inf).to(dtype)


def prefix_mask(
    lengths: torch.Tensor,
    slots: int,
    nodes: int,
    positions: torch.Tensor | None = None,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Which of the first `slots` slots N queries see of prefixes of `lengths` `(B,)`: `(B, N, slots)`."""
    places = torch.arange(slots, device=lengths.device)
    seen = (places < lengths[:, None])[:, None].expand(-1, nodes, -1)
    if sliding_window is None or positions is None:
        return seen
    return seen & (positions[:, :, None] - places < sliding_window)


@dataclass
class ExplicitMask:
    """A mask that exists as a tensor.

    Args:
        mask (`torch.Tensor` of shape `(..., N, M)`): Boolean or additive mask.
        dtype (`torch.dtype`): Floating point dtype of the result.
    """

    mask: torch.Tensor
    dtype: torch.dtype

    def __call__(self, start: int, stop: int) -> torch.Tensor:
        return additive_mask(self.mask[..., start:stop], self.dtype)


@dataclass
class PositionMask:
    """Causality and sliding window, from the positions of queries and keys.

    Args:
        positions (`torch.LongTensor` of shape `(B or 1, N)`): Absolute positions of the queries.
        first (`int`): Absolute position of key 0 of the call.
        sliding_window (`int`, *optional*): A query sees a key only if their distance is below it.
        causal (`bool`): Whether a query sees only keys at its own position or before.
        dtype (`torch.dtype`): Floating point dtype of the result.
    """

    positions: torch.Tensor
    first: int
    sliding_window: int | None
    causal: bool
    dtype: torch.dtype

    def __call__(self, start: int, stop: int) -> torch.Tensor:
        keys = torch.arange(self.first + start, self.first + stop, device=self.positions.device)
        distance = self.positions[:, None, :, None] - keys  # [B, 1, N, stop - start]
        mask = torch.zeros(distance.shape, dtype=self.dtype, device=distance.device)
        if self.sliding_window is not None:
            mask.masked_fill_(distance >= self.sliding_window, -torch.inf)
        if self.causal:
            mask.masked_fill_(distance < 0, -torch.inf)
        return mask


class WindowMask(torch.Tensor):
    """The causal mask of a sliding window, `(B, 1, N, S)`, for queries that are the last N of S positions.

    It has the shape and the dtype of `torch.bool` of that mask and no memory of its own: an attention function reads
    `sliding_window` and needs no entries. Whatever else is done with it is done with the whole mask.
    """

    sliding_window: int

    @classmethod
    def of(cls, batch_size: int, queries: int, keys: int, sliding_window: int, device: Any) -> "WindowMask":
        """The mask of this shape on a device."""
        one = torch.zeros((), dtype=torch.bool, device=device)
        mask = one.expand(batch_size, 1, queries, keys).as_subclass(cls)
        mask.sliding_window = sliding_window
        return mask

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Properties are those of the stand-in, copies on a device stay one, everything else gets the entries."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func.__name__ in _PROPERTIES:
                return func(*args, **kwargs)
            if func is torch.Tensor.to and (moved := func(*args, **kwargs)).dtype == torch.bool:
                batch_size, _, queries, keys = moved.shape
                return cls.of(batch_size, queries, keys, args[0].sliding_window, moved.device)
            args, kwargs = torch.utils._pytree.tree_map_only(cls, cls.entries, (args, kwargs))
            return func(*args, **kwargs)

    def entries(self) -> torch.Tensor:
        """The boolean mask itself."""
        batch_size, _, queries, keys = self.shape
        positions = torch.arange(keys - queries, keys, device=self.device)[:, None]
        distance = positions - torch.arange(keys, device=self.device)
        return ((distance >= 0) & (distance < self.sliding_window)).expand(batch_size, 1, -1, -1)


# What is asked of a tensor without reading it: attributes come as `__get__`.
_PROPERTIES = {"__get__", "dim", "size", "stride", "numel", "__len__", "is_floating_point", "get_device", "ndimension"}
