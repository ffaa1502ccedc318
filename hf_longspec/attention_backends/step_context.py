"""What the contexts of a step have in common: they travel to the attention layers, and count which of them called."""

from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import torch


class CallCounter:
    """How often an attention layer called back: the proof that a model really runs on our attention."""

    def __init__(self) -> None:
        self.total = 0

    def __repr__(self) -> str:
        return f"CallCounter(total={self.total})"


@dataclass
class StepContext:
    """One step, as the attention layers see it. Build a new one for every forward.

    Args:
        lengths (`torch.LongTensor` of shape `(B,)`): Used slots per row.
        host_lengths (`tuple[int, ...]`, *optional*): The same numbers on the host; None where they are not to be read.
        windows (`tuple[int | None, ...]`, *optional*):
            Sliding window of every layer. By default, what a layer passes itself.
    """

    lengths: torch.Tensor
    host_lengths: tuple[int, ...] | None
    windows: tuple[int | None, ...] | None = field(default=None, kw_only=True)
    # what depends on the step but not on the layer, computed by the first layer that needs it
    _memo: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def to(self, device: torch.device | str | int | None, non_blocking: bool = False) -> Self:
        """This context on another device; itself if it is there. What is no tensor is shared."""
        if device is None:  # accelerate, where a module has no device of its own; tensors take it likewise
            return self
        device = torch.device(device)
        if device == self.lengths.device or (device.index is None and device.type == self.lengths.device.type):
            return self
        if device not in self._memo:  # accelerate moves the arguments of every layer: one copy per device will do
            values = {part.name: getattr(self, part.name) for part in fields(self)}
            moved: dict[str, Any] = {
                name: value.to(device, non_blocking=non_blocking)
                for name, value in values.items()
                if isinstance(value, torch.Tensor)
            }
            self._memo[device] = replace(self, **moved)
        context: Self = self._memo[device]
        return context

    def window_of(self, layer_idx: int, passed: int | None) -> int | None:
        """The sliding window of a layer that passed this one."""
        return passed if self.windows is None else self.windows[layer_idx]
