"""How a drafter runs a method of its own in a captured graph."""

from typing import Any

import torch

from ...generation.drafter import BeamDrafter


def replayed(drafter: BeamDrafter, method: str, *changing: torch.Tensor) -> Any:
    """Return the result of a method with these tensors, by a captured graph if steps are captured.

    The graph is that of an earlier call with tensors of the same shapes. A method that rotates as the target does runs
    by itself after images, as a graph would keep their offsets.
    """
    target, has_offsets = drafter.binding.target, drafter.binding.cache.rows.offsets is not None
    if has_offsets and drafter.rotates_as_target:
        return getattr(drafter, method)(*changing)
    return target.replayed(_call, changing, (drafter,), drafter._holder, (method,))


def _call(changing: tuple[torch.Tensor, ...], drafter: BeamDrafter, method: str) -> Any:
    return getattr(drafter, method)(*changing)
