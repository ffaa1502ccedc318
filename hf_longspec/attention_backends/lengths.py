"""The number of used slots of every row: on the host for code that slices, on devices for kernels and graphs."""

from collections.abc import Sequence
from typing import Any

import torch


def on_device(numbers: Any, device: torch.device | str) -> torch.Tensor:
    """Return integers of the host as a tensor on `device`, without waiting for it.

    Torch waits for a copy from pageable memory. It does not wait for one from pinned memory, and frees that memory only
    when the copy has run.
    """
    tensor, device = torch.tensor(numbers, dtype=torch.long), torch.device(device)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class SeqLens:
    """Lengths of the rows of a batch, on the host, on a device, or both. A longer prefix has another `SeqLens`.

    >>> lengths = SeqLens([5, 7])
    >>> lengths.longest, lengths.shared, lengths.plus(1).host, lengths.on("cpu").tolist()
    (7, None, (6, 8), [5, 7])
    """

    def __init__(self, host: Sequence[int] | None, tensor: torch.Tensor | None = None):
        # empty where the host does not know them, as in a captured graph
        self.host: tuple[int, ...] = () if host is None else tuple(host)
        # in a graph that serves several lengths an upper bound of the longest, or `None`
        self.longest: Any = max(self.host) if self.host else None
        # length of all rows; `None` if they differ or may differ
        self.shared: int | None = self.longest if self.host and min(self.host) == self.longest else None
        self._tensors = [] if tensor is None else [tensor]
        self._slots: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}
        self._sums: dict[int, SeqLens] = {}

    @classmethod
    def of(cls, lengths: "SeqLens | Sequence[int]") -> "SeqLens":
        """Return `lengths`, made of numbers on the host if they are not a `SeqLens`."""
        return lengths if isinstance(lengths, SeqLens) else cls(lengths)

    @classmethod
    def equal(cls, length: int, batch_size: int) -> "SeqLens":
        """Return the lengths of rows that all have the same length, which may be symbolic."""
        lengths = cls(None)
        lengths.host, lengths.longest, lengths.shared = (length,) * batch_size, length, length
        return lengths

    @classmethod
    def in_graph(cls, tensor: torch.Tensor, sizes: Sequence[torch.Tensor], known: int) -> "SeqLens":
        """Return lengths inside a compiled or captured function, which must not compare them with each other.

        `sizes` and `known` are the results of the runner's `sizes` and `knows`.
        """
        lengths = cls(None, tensor)
        if known > 1:
            lengths.host = tuple(size.shape[0] for size in sizes)
        else:
            lengths.longest = sizes[0].shape[0]
        if known == 1:
            lengths.shared, lengths.host = lengths.longest, (sizes[0].shape[0],) * len(tensor)
        return lengths

    @property
    def is_ragged(self) -> bool:
        """Whether rows differ, or may differ, in length."""
        return self.shared is None

    def fit_window(self, sliding_window: int, nodes: int) -> bool:
        """Return whether a window is known to hide no slot of any prefix from `nodes` nodes after it.

        This holds if the deepest possible node, `nodes - 1` positions after the root, still sees slot 0.
        """
        return self.longest is not None and bool(self.longest + nodes <= sliding_window)

    def on(self, device: torch.device | str) -> torch.Tensor:
        """Return the lengths as a tensor of shape `(B,)` on a device, which is made once."""
        device = torch.device(device)
        for tensor in self._tensors:
            if tensor.device == device:
                return tensor
        if self.host:
            tensor = on_device(self.host, device)
        else:
            tensor = self._tensors[0].to(device)
        self._tensors.append(tensor)
        return tensor

    def plus(self, count: "int | SeqLens") -> "SeqLens":
        """Return the sums with one number, or one for each row, on the devices that have both already."""
        if not isinstance(count, int):
            added = {tensor.device: tensor for tensor in count._tensors}
            lengths = SeqLens([one + more for one, more in zip(self.host, count.host, strict=True)])
            lengths._tensors = [one + added[one.device] for one in self._tensors if one.device in added]
            return lengths
        if count in self._sums:
            return self._sums[count]
        lengths = self._sums[count] = SeqLens(None)
        if self.shared is None:
            lengths.host = tuple([length + count for length in self.host])
        else:
            lengths.shared = self.shared + count
            lengths.host = (lengths.shared,) * len(self.host)
        lengths.longest = None if self.longest is None else self.longest + count
        lengths._tensors = [tensor + count for tensor in self._tensors]
        return lengths

    def slots(self, count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return row index `(B, 1)` and slot index `(B, count)` of the first `count` slots after every row."""
        key = (count, device)
        if key not in self._slots:
            start = self.on(device)[:, None]
            row = torch.arange(len(start), device=device)[:, None]
            self._slots[key] = row, start + torch.arange(count, device=device)
        return self._slots[key]
