"""MTP: the layer of the target's checkpoint grows a beam from states of the target, then from its own.

DeepSeek-V3, https://huggingface.co/papers/2412.19437, section 2.2. Entries, the ring and trees are those of EAGLE-3,
with the output of the target's final norm as the state. The ring keeps what a layer of the target's own class stores.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch

from ...generation.draft_tree import Beam
from ...generation.drafter import Binding
from ...generation.target_modules import TargetParts, final_norm_of
from ..shared.aux_drafter import AuxDrafter
from ..shared.beams import Tensors, WindowRing


class MtpDrafter(AuxDrafter):
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

    def remember(self, aux_hidden_states: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor) -> None:
        self._enter(aux_hidden_states, tokens, positions, positions[:, :0])

    def level_inputs(self, beam: Beam, depth: int, shared: Tensors, states: Sequence[torch.Tensor]) -> Tensors:
        if not depth:
            return shared[:4]
        of_level = (part[:, depth : depth + 1] for part in shared[4:])
        return self.of_parents(beam, states[0]), beam.tokens, beam.ancestor_mask, *of_level, states[1]

    def level(self, changing: Tensors, depth: int, prefix: None) -> Tensors:
        """Return logits `(B, n, V)` and outputs `(B, n, hidden)` after the newest level of a beam.

        The first level also returns what nodes see of the ring.
        """
        if depth:
            outputs = self._next(*changing)
            return self.head(outputs), outputs
        outputs, (_, _, positions, last) = self._enter(*changing), changing
        return self.head(outputs), outputs, self.seen(self.rings[0], positions.gather(1, last))

    def _enter(
        self, aux_hidden_states: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, query_places: torch.Tensor
    ) -> torch.Tensor:
        """Store entries in the ring; return outputs `(B, n, hidden)` at `query_places` `(B, n)`."""
        ring, shown = self.rings[0], positions.clamp_min(0)

        def store(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
            ring.fill(keys, values, positions)
            if not query_places.shape[1]:
                return keys, values, None
            return ring.keys[:, :, : ring.size], ring.values[:, :, : ring.size], ring.visible(shown)

        states = self.norm(aux_hidden_states).to(self.device, self.dtype)
        outputs = self.layer(states, self.embed(tokens), shown, self.rotary(states, shown), store)
        return outputs.gather(1, query_places[..., None].expand(-1, -1, outputs.shape[2]))

    def _next(
        self,
        states: torch.Tensor,
        tokens: torch.Tensor,
        ancestor_mask: torch.Tensor,
        position: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        seen: torch.Tensor,
    ) -> torch.Tensor:
        """Return outputs `(B, n, hidden)` at the newest level of a beam.

        Args:
            states (`torch.Tensor` of shape `(B, n, hidden)`): State of each node's parent.
            tokens (`torch.LongTensor` of shape `(B, n)`): Tokens of the level.
            ancestor_mask (`torch.BoolTensor` of shape `(B, n, N)`): Ancestors of each node among the N nodes so far.
            position (`torch.LongTensor` of shape `(B, 1)`): Position of the level.
            cos (`torch.Tensor` of shape `(B, 1, D)`): Cosines of it.
            sin (`torch.Tensor` of shape `(B, 1, D)`): Sines of it.
            seen (`torch.BoolTensor` of shape `(B, 1, slots + 1)`): What nodes see of the ring, and of the root.
        """
        ring, (count, total) = self.rings[0], ancestor_mask.shape[1:]
        mask = self.with_ancestors(seen, ancestor_mask[:, :, 1:])  # the root is in `seen`

        def stage(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            ring.stage(keys, values, total - count)
            size = mask.shape[2]
            return ring.keys[:, :, :size], ring.values[:, :, :size], mask

        return self.layer(states, self.embed(tokens), position.expand(-1, count), (cos, sin), stage)
