"""The model's cache inside a step of fixed shapes."""

from collections.abc import Sequence
from typing import Any, Self

import torch
from transformers.cache_utils import Cache

from ...attention_backends.lengths import SeqLens
from ..target_modules import written


class StepCache(Cache):
    """The model's cache inside a step: buffers, and the slots that the step writes to.

    Args:
        places (`list[tuple]`): For every layer, the slots that are written, `(N,)` if they are the same in all rows
            or `(B, N)`, and the end of the slots that are read (`None` for the whole buffer).

    Attributes:
        indexers (`list[torch.Tensor | None]`): Buffer `(B, 1, S, D)` of the keys of every layer's indexer.
    """

    def __init__(self, buffers: list[tuple[torch.Tensor, torch.Tensor]], places: list[tuple]):
        self.buffers = buffers
        self.places = places
        self.layers: list[Any] = []
        self.indexers: list[Any] = []

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
            of_group.append((offsets + start, None if prefix.longest is None else prefix.longest + nodes))
        return cls(buffers, [of_group[group] for group in members])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values of the nodes, and return the used part of both buffers."""
        slots, end = self.places[layer_idx]
        keys, values = written(key_states, value_states, *self.buffers[layer_idx], slots)
        return keys[:, :, :end], values[:, :, :end]

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Write the nodes' keys `(B, N, D)` of an indexer, and return the used part of their buffer, `(B, S, D)`."""
        keys, (slots, end) = self.indexers[layer_idx], self.places[layer_idx]
        states = indexer_key_states[:, None]
        written(states, states[..., :0], keys, keys[..., :0], slots)
        return keys[:, 0, :end]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return `None`, so that a mixer with a state runs the functions for several tokens also on one."""

    get_recurrent_state = get_conv_state

    @property
    def is_sliding(self) -> list[bool]:
        """False for every layer, as none drops entries."""
        return [False] * len(self.buffers)
