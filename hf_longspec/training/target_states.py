"""The states of the frozen target on rows of text: hidden states, and the keys and values of one layer."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from ..generation.cache import CACHE_NAME, Rows, SpeculativeCache, layers_of
from ..generation.special_cases.recurrences import ignores_earlier_states
from ..generation.target_modules import LayerInputs


@dataclass
class TargetStates:
    """States of a target on whole rows."""

    hidden: Any  # `(B, L, layers * hidden)`: inputs of the layers
    keys: torch.Tensor | None = None  # `(B, K, L, D)`: keys of the KV layer, as in the target's cache
    values: torch.Tensor | None = None  # `(B, K, L, D)`: values of the KV layer


class TargetPass:
    """Runs the frozen target over whole rows, without its head, and keeps inputs of layers, and keys of one layer.

    Args:
        chunk_size (`int`, *optional*): Tokens of a forward, by default a whole row. Between chunks the cache of every
            layer is in memory, after the last chunk only that of the KV layer.
        layers (`True` or `tuple[int, ...]`, *optional*, defaults to `True`): Layers whose inputs are concatenated;
            `True` is the final norm, and `None` its output.
        kv_layer (`int`, *optional*): Layer whose keys and values are kept.

    Raises:
        ValueError: If layers of the target forget the states of the chunk before.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        chunk_size: int | None = None,
        layers: bool | tuple[int, ...] | None = True,
        kv_layer: int | None = None,
    ):
        if chunk_size is not None and ignores_earlier_states(target):
            raise ValueError(
                f"target_chunk_size={chunk_size}: the Mamba-1 layers of {type(target).__name__} begin anew with each "
                "chunk. Leave out target_chunk_size."
            )
        self.target, self.chunk_size, self.layers, self.kv_layer = target, chunk_size, layers, kv_layer
        self.config = target.config.get_text_config(decoder=True)

    @torch.no_grad()
    def __call__(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> TargetStates:
        """Return the states for `input_ids` at `position_ids`, both `(B, L)`, by default 0, 1, 2, ...

        Padding must be on the right.
        """
        length, decoder = input_ids.shape[1], self.target.get_decoder()
        size = min(self.chunk_size or length, length)
        with LayerInputs(self.target, () if self.layers is None else self.layers) as inputs:
            if size == length and self.kv_layer is None:
                decoder(input_ids=input_ids, use_cache=False)
                return TargetStates(inputs.hidden)
            if position_ids is None:
                position_ids = torch.arange(length, device=input_ids.device).expand_as(input_ids)
            cache: Any = OneLayerCache(self.config, self.kv_layer)
            if size < length:
                cache = SpeculativeCache(self.config, len(input_ids), length, tree_slots=1)
            hidden = []
            for tokens, positions in zip(input_ids.split(size, 1), position_ids.split(size, 1), strict=True):
                # with a cache: without one, transformers takes a jump of the positions for the beginning of another
                # text, and masks everything before it
                output = decoder(input_ids=tokens, position_ids=positions, **{CACHE_NAME: cache}, use_cache=True)
                hidden.append(output.last_hidden_state if self.layers is None else inputs.hidden)
        states = TargetStates(torch.cat(hidden, 1))
        if self.kv_layer is not None:
            layer = cache if size == length else cache.layers[self.kv_layer]
            states.keys, states.values = layer.keys[:, :, :length], layer.values[:, :, :length]
        return states


class OneLayerCache(Cache):
    """A cache for a single forward that keeps the keys and values of one layer, and recurrent states."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, config: Any, kv_layer: int | None):
        super().__init__(layers=layers_of(config, Rows(1), 1, lambda *_: DynamicLayer()))
        self.kv_layer = kv_layer

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of this forward: there are no earlier ones."""
        if layer_idx == self.kv_layer:
            self.keys, self.values = key_states, value_states
        return key_states, value_states
