"""MTP: the layers of the target's checkpoint grow a beam from states of the target, then from their own.

DeepSeek-V3, https://huggingface.co/papers/2412.19437, section 2.2. Entries, rings and trees are those of EAGLE-3, with
the output of the target's final norm as the state. What a layer of the target's own class stores is a ring per layer.

With one layer, an entry depends on a state and a token alone, and a node of the tree is an entry with the output at its
parent as the state. With several, layer j reads the output of layer j - 1 at the token before: it runs on all nodes up
to level j, and entries of a text continue from the last output of the verification before.
"""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch

from ...generation.draft_tree import Beam
from ...generation.drafter import Binding
from ...generation.target_modules import TargetParts, final_norm_of
from ..shared.aux_drafter import AuxDrafter
from ..shared.beams import Tensors, WindowRing

# Entries of a prompt that several layers run at a time.
PIECE = 256


class Nodes(NamedTuple):
    """The nodes of a tree that a layer runs on."""

    states: torch.Tensor  # `(B, n, hidden)`: state of each node's parent
    tokens: torch.Tensor  # `(B, n)`
    ancestor_mask: torch.Tensor  # `(B, n, N)`: ancestors of each node among the N nodes so far
    positions: torch.Tensor  # `(B, 1)` or `(B, n)`
    cos: torch.Tensor  # `(B, 1, D)` or `(B, n, D)`: cosines of the positions
    sin: torch.Tensor  # likewise, sines
    seen: torch.Tensor  # `(B, 1, slots + 1)`: what nodes see of the ring, and of the root


class MtpDrafter(AuxDrafter):
    """Draft a tree of fixed size with one layer, or with several, a level each."""

    def __init__(self, binding: Binding, draft: Any):
        self.parts: TargetParts = draft.parts_of(binding.target.model)
        self.norm, self.depth = final_norm_of(binding.target.model), len(draft.layers)
        # by layer but the last: output at the newest entry, and its position
        self._carried: list[tuple[torch.Tensor, torch.Tensor]] = []
        super().__init__(binding, draft)

    def make_rotary(self) -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        return lambda like, positions: self.parts.rotary(positions, like)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.parts.embed(tokens).to(self.device, self.dtype)

    def head(self, outputs: torch.Tensor) -> torch.Tensor:
        return self.parts.head(outputs)

    @cached_property
    def rings(self) -> list[WindowRing]:  # type: ignore[override]
        size, batch = self.draft.config.layer.hidden_size, self.binding.cache.batch_size
        shapes: list[torch.Size] = []

        def note(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
            shapes.extend((keys.shape, values.shape))
            return keys, values, None

        none = torch.zeros(1, 1, size, dtype=self.dtype, device=self.device)
        place = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        self.draft.layers[0](none, none, place, self.rotary(none, place), note)
        (_, heads, _, key_dim), (*_, value_dim) = shapes
        room = self.most_new if self.depth == 1 else max(self.most_new, PIECE)
        shape = self.window, self.num_nodes, batch, heads, key_dim, self.dtype, self.device, self.sinks, room, value_dim
        rings = [self.make_ring(index, *shape) for index in range(self.depth)]
        state = torch.zeros(batch, 1, size, dtype=self.dtype, device=self.device)
        self._carried = [(state, torch.full((batch, 1), -2, device=self.device)) for _ in rings[1:]]
        return rings

    def row_states(self) -> Sequence[torch.Tensor]:
        return *super().row_states(), *(part for carried in self._carried for part in carried)

    def remember(self, aux_hidden_states: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor) -> None:
        size = tokens.shape[1] if self.depth == 1 else PIECE
        pieces = (x.split(max(size, 1), 1) for x in (aux_hidden_states, tokens, positions))
        for states, after, places in zip(*pieces, strict=True):
            self._enter(states, after, places, places[:, :0])

    def _enter(
        self, aux_hidden_states: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, query_places: torch.Tensor
    ) -> torch.Tensor:
        """Store entries in the rings; return outputs `(B, depth, hidden)` of all layers at the place of each row."""
        states = self.norm(aux_hidden_states).to(self.device, self.dtype)
        embedded = self.embed(tokens)
        shown, places, newest = positions.clamp_min(0), positions, []
        angles = self.rotary(states, shown)
        for index, layer in enumerate(self.draft.layers):
            is_read = query_places.shape[1] > 0 or index < self.depth - 1
            states = layer(states, embedded, shown, angles, partial(self._fill, index, places, shown, is_read))
            last = query_places[..., None].expand(-1, -1, states.shape[2])
            newest.append(states.gather(1, last))
            if index < self.depth - 1:
                states, places = self._shifted(index, states, places)
        return torch.cat(newest, 1)

    def _fill(
        self, index: int, places: torch.Tensor, queries: torch.Tensor, is_read: bool, keys: Any, values: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        ring = self.rings[index]
        ring.fill(keys, values, places)
        if not is_read:
            return keys, values, None
        return ring.keys[:, :, : ring.size], ring.values[:, :, : ring.size], ring.visible(queries)

    def _shifted(self, index: int, outputs: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the states of the next layer, outputs at the token before, and places, -1 where there is none."""
        carried, position = self._carried[index]
        earlier = torch.cat([position, places[:, :-1]], 1)
        last = places.argmax(1, keepdim=True)
        end = places.gather(1, last)
        at_end = outputs.gather(1, last[..., None].expand(-1, -1, outputs.shape[2]))
        grew = end >= 0
        self._carried[index] = torch.where(grew[..., None], at_end, carried), torch.where(grew, end, position)
        return torch.cat([carried, outputs[:, :-1]], 1), torch.where(earlier == places - 1, places, -1)

    def level_inputs(self, beam: Beam, depth: int, shared: Tensors, states: Sequence[torch.Tensor]) -> Tensors:
        """Return the inputs of the newest level, or those of all levels with several layers."""
        if not depth:
            return shared[:4]
        _, _, _, _, positions, *angles = shared
        if self.depth == 1:
            place, cos, sin = (part[:, depth : depth + 1] for part in (positions, *angles))
            return Nodes(self.of_parents(beam, states[0]), beam.tokens, beam.ancestor_mask, place, cos, sin, states[1])
        tokens, parents, _, depths, masks = (part[:, 1:] for part in beam.fields())
        depths = depths.to(self.device)
        cos, sin = (part.gather(1, depths[..., None].expand(-1, -1, part.shape[2])) for part in angles)
        above = states[0].gather(1, parents.to(self.device)[..., None].expand(-1, -1, states[0].shape[2]))
        seen = self.seen(self.rings[depth], positions[:, :1])
        nodes = Nodes(above, tokens, masks, positions.gather(1, depths), cos, sin, seen)
        return *nodes, beam.tokens, states[1]

    def level(self, changing: Tensors, depth: int, prefix: None) -> Tensors:
        """Return logits `(B, n, V)` after the newest level of a beam, and states."""
        if not depth:
            outputs, (_, _, positions, last) = self._enter(*changing), changing
            further = outputs if self.depth > 1 else self.seen(self.rings[0], positions.gather(1, last))
            return self.head(outputs[:, :1]), outputs[:, :1], further
        if self.depth == 1:
            states = self._next(0, Nodes(*changing))
            return self.head(states), states
        *nodes, newest, outputs = changing
        states = self._next(depth, Nodes(*nodes))
        logits = self.head(states[:, -newest.shape[1] :])
        return logits, torch.cat([outputs[:, depth : depth + 1], states], 1), outputs

    def _next(self, index: int, nodes: Nodes) -> torch.Tensor:
        """Return outputs `(B, n, hidden)` of a layer at nodes."""
        ring, (count, total) = self.rings[index], nodes.ancestor_mask.shape[1:]
        mask = self.seen_by_nodes(nodes.seen, nodes.ancestor_mask)

        def stage(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            ring.stage(keys, values, total - count)
            size = mask.shape[2]
            return ring.keys[:, :, :size], ring.values[:, :, :size], mask

        embedded = self.embed(nodes.tokens)
        shown = nodes.positions.expand(-1, count)
        return self.draft.layers[index](nodes.states, embedded, shown, (nodes.cos, nodes.sin), stage)

    def _run(self, *args: Any) -> Any:
        """Return `None` with several layers, whose steps are neither compiled nor captured."""
        return super()._run(*args) if self.depth == 1 else None
