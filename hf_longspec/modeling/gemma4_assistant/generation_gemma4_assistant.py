"""Gemma 4 assistants: a beam grows from one position, over the keys and values of the target's last layers.

An accepted node leaves nothing in the draft. After a verification it needs the target's state at the last
committed token, and the target's cache.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...attention_backends.lengths import SeqLens
from ...generation.draft_tree import Beam
from ...generation.drafter import BeamDrafter, Binding, Verification, last_of
from ...generation.target_modules import TargetEnds, final_norm_of
from ..families.aux_drafter import Angles
from .configuration_gemma4_assistant import layers_read


class Prefix(NamedTuple):
    """The committed tokens in the layers that are read."""

    lengths: SeqLens
    layers: tuple[tuple[str, torch.Tensor, torch.Tensor], ...]  # type, keys and values `(B, K, capacity, D)`


class Gemma4AssistantDrafter(BeamDrafter):
    """Draft a tree of fixed size."""

    wants_hidden = True

    def __init__(self, binding: Binding, draft: Any):
        super().__init__(binding, draft)
        target, self.rings = binding.target.model, []
        self.ends, self.norm, self.layers = (
            TargetEnds(target),
            final_norm_of(target),
            layers_read(binding.target.config),
        )
        self.angles: Angles = binding.part((Angles, self.device), lambda: Angles(draft.rotary_embedding(self.device)))
        size = binding.cache.batch_size, 1, draft.config.backbone_hidden_size
        # output of the target's final norm at the last committed tokens
        self.state = torch.zeros(size, dtype=self.dtype, device=self.device)

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of the last tokens."""
        return self.state.nbytes

    @property
    def _holder(self) -> Any:
        return self.binding.cache if self.draft is self._owner else self.draft

    def observe(self, verification: Verification) -> None:
        """Keep the target's state at the last committed token of each row."""
        assert verification.hidden is not None
        path, counts = verification.path, verification.num_nodes
        changing = verification.hidden, path, counts.on(path.device), self.state
        self.state = self.binding.target.replayed(_newest, changing, (self,), self._holder)

    def inputs(self, root: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the roots `(B,)`, and the states before them."""
        return root, self.state

    def prefix(self) -> Prefix:
        cache = self.binding.cache
        read = ((kind, cache.layers[index]) for kind, index in self.layers.items())
        return Prefix(cache.lengths, tuple((kind, layer.keys, layer.values) for kind, layer in read))

    def graph_of(self, runner: Any, prefix: Prefix) -> tuple[tuple[torch.Tensor, ...], tuple, tuple]:
        """Return the lengths, the keys and values of the target, and what distinguishes graphs over them."""
        known, capacity = runner.knows(prefix.lengths), prefix.layers[0][1].shape[2]
        sizes = runner.sizes(prefix.lengths, 0, capacity)
        layers = tuple((kind, runner.buffer(keys), runner.buffer(values)) for kind, keys, values in prefix.layers)
        graph = runner.key_of(sizes, *self.binding.cache.layout)
        return (prefix.lengths.on(self.device),), (known, sizes, layers), (known, graph)

    def prefix_in_graph(self, changing: tuple[torch.Tensor, ...], *fixed: Any) -> Prefix:
        known, sizes, layers = fixed
        return Prefix(SeqLens.in_graph(changing[0], sizes, known), layers)

    def begin(self, inputs: tuple[torch.Tensor, ...], prefix: Prefix) -> tuple[torch.Tensor, ...]:
        """Return the states before the roots, and the position of all nodes `(B, 1)`."""
        return inputs[1], prefix.lengths.on(self.device)[:, None]

    def level_inputs(
        self, beam: Beam, depth: int, shared: tuple[torch.Tensor, ...], states: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Return tokens, states before them, and the position."""
        before, positions = shared
        if depth:
            parents = beam.parent_places.to(self.device)[..., None]
            before = states[0].gather(1, parents.expand(-1, -1, states[0].shape[2]))
        return beam.tokens, before, positions

    def level(self, changing: tuple[torch.Tensor, ...], depth: int, prefix: Prefix) -> tuple[torch.Tensor, ...]:
        """Return logits `(B, n, V)` after the newest level of a beam, and states `(B, n, hidden)`."""
        tokens, states, positions = changing
        embedded = self.ends.embed(tokens).to(self.device, self.dtype)
        used = slice(prefix.lengths.longest)
        shared = {kind: (keys[:, :, used], values[:, :, used]) for kind, keys, values in prefix.layers}
        results: tuple[torch.Tensor, ...] = self.draft(
            embedded, states, positions, self.angles.rotary, shared, prefix.lengths
        )
        return results


def _newest(changing, drafter):
    """Return the states of the last kept nodes, maybe inside a graph; rows that kept none keep their earlier state."""
    hidden, path, counts, before = changing
    last = last_of(path, counts).to(hidden.device)[:, None, None]
    states = drafter.norm(hidden.gather(1, last.expand(-1, 1, hidden.shape[2]))).to(before)
    return torch.where(counts.to(before.device)[:, None, None] > 0, states, before)
