"""What a draft sees of its target while it is trained: keys and values of one layer, and the final hidden states."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from ..generation.cache import SpeculativeCache
from ..generation.target_parts import TargetParts


@dataclass
class TargetStates:
    """States of a target on whole rows.

    Args:
        keys (`torch.Tensor` of shape `(B, K, L, D)`): Keys of the KV layer, as its cache holds them.
        values (`torch.Tensor` of shape `(B, K, L, D)`): Likewise.
        hidden (`torch.Tensor` of shape `(B, L, hidden)`, *optional*): What the target's head gets.
    """

    keys: torch.Tensor
    values: torch.Tensor
    hidden: torch.Tensor | None


class TargetPass:
    """Runs the frozen target over whole rows, without its head.

    Args:
        parts ([`TargetParts`]): The target, and the layer to keep.
        chunk_size (`int`, *optional*): Tokens per forward; by default all at once. Between chunks the cache of every
            layer exists, after the last one that of the KV layer alone.
        hidden (`bool`, *optional*, defaults to `False`): Whether the final hidden states are wanted.
    """

    def __init__(self, parts: TargetParts, chunk_size: int | None = None, hidden: bool = False):
        self.parts = parts
        self.chunk_size = chunk_size
        self.hidden = hidden

    @torch.no_grad()
    def __call__(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> TargetStates:
        """States for `input_ids` at `position_ids`, both `(B, L)`, padded on the right if at all."""
        length = input_ids.shape[1]
        if self.chunk_size is None or self.chunk_size >= length:
            cache = OneLayerCache(self.parts.config.num_hidden_layers, self.parts.kv_layer)
            hidden = self._run(input_ids, position_ids, cache)
            return TargetStates(cache.keys, cache.values, hidden if self.hidden else None)
        stored = SpeculativeCache(self.parts.config, len(input_ids), length, tree_slots=1)
        chunks = [
            self._run(tokens, positions, stored)
            for tokens, positions in zip(
                input_ids.split(self.chunk_size, 1), position_ids.split(self.chunk_size, 1), strict=True
            )
        ]
        layer = stored.layers[self.parts.kv_layer]
        keys, values = layer.keys[:, :, :length], layer.values[:, :, :length]
        return TargetStates(keys, values, torch.cat(chunks, 1) if self.hidden else None)

    def _run(self, tokens: torch.Tensor, positions: torch.Tensor, cache: Cache) -> torch.Tensor:
        # Never without a cache: transformers would take a jump of the positions for the beginning of another text and
        # hide everything before it.
        hidden: torch.Tensor = self.parts.decoder(
            input_ids=tokens, position_ids=positions, past_key_values=cache, use_cache=True
        ).last_hidden_state
        return hidden


class OneLayerCache(Cache):
    """A cache for a single forward, which remembers the keys and values of one layer.

    Args:
        num_layers (`int`): Layers of the model.
        kv_layer (`int`): The one to remember.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, num_layers: int, kv_layer: int):
        super().__init__(layers=[DynamicLayer() for _ in range(num_layers)])
        self.kv_layer = kv_layer

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hand back what the layer computed: there is nothing before it."""
        if layer_idx == self.kv_layer:
            self.keys, self.values = key_states, value_states
        return key_states, value_states
