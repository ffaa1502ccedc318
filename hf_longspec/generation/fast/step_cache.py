"""The model's cache inside a step of fixed shapes."""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch.overrides import handle_torch_function, has_torch_function
from transformers.cache_utils import Cache

from ...attention_backends.lengths import SeqLens


class StepCache(Cache):
    """The model's cache inside a step: buffers, and the slots that the step writes to.

    Args:
        places (`list[tuple]`): For every layer, whether all rows write to the same slots, these slots `(N,)` or
            `(B, N)`, and the end of the slots that are read (`None` for the whole buffer).
    """

    def __init__(self, buffers: list[tuple[torch.Tensor, torch.Tensor]], places: list[tuple]):
        self.buffers = buffers
        self.places = places
        self.layers: list[Any] = []

    @classmethod
    def of_step(
        cls,
        buffers: list[tuple[torch.Tensor, torch.Tensor]],
        members: Sequence[int],
        prefixes: Sequence[SeqLens],
        tokens: torch.Tensor,
    ) -> Self:
        """Return the cache of a step whose tokens `(B, N)` come after one of the prefixes, that of `members[layer]`."""
        nodes, of_group = tokens.shape[1], []
        offsets = torch.arange(nodes, device=tokens.device)
        for prefix in prefixes:
            start: Any = prefix.on(tokens.device)[:, None] if prefix.is_ragged else prefix.shared
            of_group.append(
                (not prefix.is_ragged, offsets + start, None if prefix.longest is None else prefix.longest + nodes)
            )
        return cls(buffers, [of_group[group] for group in members])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values of the nodes, and return the used part of both buffers.

        A mode of torch functions may replace it, as it may replace functions of torch.
        """
        states = key_states, value_states
        if has_torch_function(states):
            return handle_torch_function(StepCache.update, states, self, *states, layer_idx)
        keys, values = self.buffers[layer_idx]
        same, slots, end = self.places[layer_idx]
        if same:
            keys.index_copy_(2, slots, key_states)
            values.index_copy_(2, slots, value_states)
        else:
            row = torch.arange(len(slots), device=slots.device)[:, None]
            keys[row, :, slots] = key_states.transpose(1, 2)
            values[row, :, slots] = value_states.transpose(1, 2)
        return keys[:, :, :end], values[:, :, :end]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return `None`, so that a mixer with a state runs the functions for several tokens also on one."""

    get_recurrent_state = get_conv_state

    @property
    def is_sliding(self) -> list[bool]:
        """False for every layer, as none drops entries."""
        return [False] * len(self.buffers)
