"""MTP: the layer of the target's checkpoint grows a beam from states of the target, then from its own.

DeepSeek-V3, https://huggingface.co/papers/2412.19437, section 2.2. Entries, the ring and trees are those of EAGLE-3,
with the output of the target's final norm as the state. The ring keeps what a layer of the target's own class stores.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from ...generation.drafter import Binding
from ...generation.target_modules import TargetParts, final_norm_of
from ..shared.aux_drafter import Nodes, StepwiseAuxDrafter
from ..shared.beams import WindowRing


class MtpDrafter(StepwiseAuxDrafter):
    """Draft a tree of fixed size with one layer."""

    def __init__(self, binding: Binding, draft: Any):
        self.parts: TargetParts = draft.parts_of(binding.target.model)
        self.norm = final_norm_of(binding.target.model)
        super().__init__(binding, draft)
        self.layer = self.draft.layers[0]

    def make_rotary(self) -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        return lambda like, positions: self.parts.rotary(positions, like)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.parts.embed(tokens).to(self.device, self.dtype)

    def head(self, outputs: torch.Tensor) -> torch.Tensor:
        return self.parts.head(outputs)

    @cached_property
    def rings(self) -> list[WindowRing]:  # type: ignore[override]
        """Entries of the committed text, with the sizes of what the layer stores."""
        shapes: list[torch.Size] = []

        def note(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
            shapes.extend((keys.shape, values.shape))
            return keys, values, None

        none = torch.zeros(1, 1, self.draft.config.layer.hidden_size, dtype=self.dtype, device=self.device)
        place = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        self.layer(none, none, place, self.rotary(none, place), note)
        (_, heads, _, key_dim), (*_, value_dim) = shapes
        sizes = self.binding.cache.batch_size, heads, key_dim, self.dtype, self.device
        return [self.make_ring(0, self.window, self.num_nodes, *sizes, self.sinks, self.most_new, value_dim)]

    def enter(
        self, aux_hidden_states: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, query_places: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store entries in the ring; return outputs `(B, n, hidden)` at `query_places` `(B, n)`, also as states."""
        ring, shown = self.rings[0], positions.clamp_min(0)

        def store(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
            ring.fill(keys, values, positions)
            if not query_places.shape[1]:
                return keys, values, None
            return ring.keys[:, :, : ring.size], ring.values[:, :, : ring.size], ring.visible(shown)

        states = self.norm(aux_hidden_states).to(self.device, self.dtype)
        outputs = self.layer(states, self.embed(tokens), shown, self.rotary(states, shown), store)
        outputs = outputs.gather(1, query_places[..., None].expand(-1, -1, outputs.shape[2]))
        return outputs, outputs

    def next_level(self, nodes: Nodes) -> tuple[torch.Tensor, torch.Tensor]:
        ring = self.rings[0]

        def stage(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            mask = self.stage(0, nodes, keys, values)
            size = mask.shape[2]
            return ring.keys[:, :, :size], ring.values[:, :, :size], mask

        position, angles = nodes.position.expand_as(nodes.tokens), (nodes.cos, nodes.sin)
        outputs = self.layer(nodes.states, self.embed(nodes.tokens), position, angles, stage)
        return self.head(outputs), outputs
