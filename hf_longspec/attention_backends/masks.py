"""The keys that a query attends to: additive masks, and rules on lengths and windows that need no mask.

An additive mask is added to the scores and is -inf where a query does not attend to a key. [`ExplicitMask`] and
[`PositionMask`] are masks of a whole call. They are computed for one block of its keys at a time: `mask(start, stop)`.
[`WindowMask`] is the boolean mask of a sliding window as a tensor without entries.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

KeyMask = Callable[[int, int], torch.Tensor]

WINDOW_WITHOUT_POSITIONS = (
    "sliding_window is {}, but positions is None: a window is counted from the position of each query. "
    "Pass positions of shape (batch, num_nodes)."
)


def additive_mask(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `mask` as an additive mask.

    Args:
        mask (`torch.Tensor`): Boolean mask, True where a query attends to a key; or an additive mask.
        dtype (`torch.dtype`): Floating point dtype of the result.

    Returns:
        `torch.Tensor` of the same shape. The lowest number of a dtype, by which transformers hides keys, becomes
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
    """Return the boolean mask `(B, N, slots)` of N queries over prefixes of `lengths` `(B,)`.

    Args:
        lengths (`torch.LongTensor` of shape `(B,)`): Length of each row's prefix.
        slots (`int`): Number of slots.
        nodes (`int`): N.
        positions (`torch.LongTensor` of shape `(B, N)`, *optional*): Positions of the queries, needed for a window.
        sliding_window (`int`, *optional*): Window of the layer.
    """
    places = torch.arange(slots, device=lengths.device)
    seen = (places < lengths[:, None])[:, None].expand(-1, nodes, -1)
    if sliding_window is None or positions is None:
        return seen
    return seen & (positions[:, :, None] - places < sliding_window)


@dataclass
class ExplicitMask:
    """Mask that exists as a tensor.

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
    """Mask of causality and sliding window, computed from the positions of queries and keys.

    Args:
        positions (`torch.LongTensor` of shape `(B or 1, N)`): Absolute positions of the queries.
        first (`int`): Absolute position of key 0 of the call.
        sliding_window (`int`, *optional*): A query attends only to keys at a smaller distance.
        causal (`bool`): Whether a query attends only to keys at its own position or before.
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
    """Causal mask of a sliding window, `(B, 1, N, S)`, for queries that are the last N of S positions.

    It has the shape of that mask, the dtype `torch.bool` and no memory for entries. An attention function reads
    `sliding_window` instead. All other operations run on the whole mask, which is computed for them.
    """

    sliding_window: int

    @classmethod
    def of(cls, batch_size: int, queries: int, keys: int, sliding_window: int, device: Any) -> "WindowMask":
        """Return the mask of this shape on a device."""
        one = torch.zeros((), dtype=torch.bool, device=device)
        mask = one.expand(batch_size, 1, queries, keys).as_subclass(cls)
        mask.sliding_window = sliding_window
        return mask

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run properties and copies to a device without entries, and all other operations on the whole mask."""
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
        """Return the boolean mask itself."""
        batch_size, _, queries, keys = self.shape
        positions = torch.arange(keys - queries, keys, device=self.device)[:, None]
        distance = positions - torch.arange(keys, device=self.device)
        return ((distance >= 0) & (distance < self.sliding_window)).expand(batch_size, 1, -1, -1)


# Properties of a tensor that need no entries; attributes arrive as `__get__`.
_PROPERTIES = {"__get__", "dim", "size", "stride", "numel", "__len__", "is_floating_point", "get_device", "ndimension"}


def window_holds_all(sliding_window: int, longest: int, nodes: int) -> bool:
    """Return whether a window hides no slot of a prefix of `longest` tokens from any of `nodes` nodes.

    This holds if the deepest possible node, `nodes - 1` positions after the root, still sees slot 0.
    """
    return longest + nodes <= sliding_window
