# Published with a draft by hf_longspec, Apache-2.0.
"""How many committed tokens every row of a cache holds."""

from collections.abc import Sequence

import torch


class RowLengths:
    """Committed length of every row, on the host and on each device that asked, shared by all layers."""

    def __init__(self, batch_size: int):
        self.batch_size = batch_size
        self.staged = False
        self._on_device: dict[torch.device, torch.Tensor] = {}
        self._slots: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}
        self.set((0,) * batch_size)

    def set(self, lengths: Sequence[int]) -> None:
        """Replace every row's length."""
        self.host = tuple(lengths)
        self.longest = max(self.host)
        # the length of every row, or None when they differ
        self.equal_length = self.longest if min(self.host) == self.longest else None
        self._on_device.clear()
        self._slots.clear()

    def on(self, device: torch.device) -> torch.Tensor:
        """Lengths as a tensor of shape `(batch,)` on `device`."""
        if device not in self._on_device:
            self._on_device[device] = torch.tensor(self.host, dtype=torch.long, device=device)
        return self._on_device[device]

    def slots(self, count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Row index `(batch, 1)` and slot index `(batch, count)` of the next `count` slots of every row."""
        key = (count, device)
        if key not in self._slots:
            row = torch.arange(self.batch_size, device=device)[:, None]
            self._slots[key] = row, self.on(device)[:, None] + torch.arange(count, device=device)
        return self._slots[key]
