"""Gemma 4 assistants: a beam grows from one position, over the keys and values of the target's last layers.

An accepted node leaves nothing in the draft. After a verification it needs the target's state at the last
committed token, and the target's cache.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ...generation.draft_tree import Beam
from ...generation.drafter import Binding, Verification, last_of
from ...generation.target_modules import TargetEnds, final_norm_of
from ..shared.aux_drafter import Angles
from ..shared.beams import CacheReader, PrefixStates, Tensors
from .configuration_gemma4_assistant import layers_read


class Gemma4AssistantDrafter(CacheReader):
    """Draft a tree of fixed size."""

    wants_hidden = True

    def __init__(self, binding: Binding, draft: Any):
        super().__init__(binding, draft)
        target, self.rings = binding.target.model, []
        self.ends, self.norm = TargetEnds(target), final_norm_of(target)
        self.kinds, self.read_layers = zip(*layers_read(binding.target.config).items(), strict=True)
        self.angles: Angles = binding.part((Angles, self.device), lambda: Angles(draft.rotary_embedding(self.device)))
        size = binding.cache.batch_size, 1, draft.config.backbone_hidden_size
        # output of the target's final norm at the last committed tokens
        self.state = torch.zeros(size, dtype=self.dtype, device=self.device)

    @property
    def state_bytes(self) -> int:
        return self.state.nbytes

    @property
    def _holder(self) -> Any:
        return self.binding.cache if self.draft is self._owner else self.draft

    def row_states(self) -> Sequence[torch.Tensor]:
        return (self.state,)

    def observe(self, verification: Verification) -> None:
        assert verification.hidden is not None
        path, counts = verification.path, verification.num_nodes
        self.state = self.run(self.newest, verification.hidden, path, counts.on(path.device), self.state)

    def newest(
        self, hidden: torch.Tensor, path: torch.Tensor, counts: torch.Tensor, before: torch.Tensor
    ) -> torch.Tensor:
        """Return the states of the last kept nodes; rows that kept none keep their earlier state."""
        last = last_of(path, counts).to(hidden.device)[:, None, None]
        states = self.norm(hidden.gather(1, last.expand(-1, 1, hidden.shape[2]))).to(before)
        return torch.where(counts.to(before.device)[:, None, None] > 0, states, before)

    def inputs(self, root: torch.Tensor) -> Tensors:
        """Return the roots `(B,)`, and the states before them."""
        return root, self.state

    def begin(self, inputs: Tensors, prefix: PrefixStates) -> Tensors:
        """Return the states before the roots, and the position of all nodes `(B, 1)`."""
        return inputs[1], prefix.lengths.on(self.device)[:, None]

    def level_inputs(self, beam: Beam, depth: int, shared: Tensors, states: Sequence[torch.Tensor]) -> Tensors:
        before, positions = shared
        return beam.tokens, self.of_parents(beam, states[0]) if depth else before, positions

    def level(self, changing: Tensors, depth: int, prefix: PrefixStates) -> Tensors:
        """Return logits `(B, n, V)` after the newest level of a beam, and states `(B, n, hidden)`."""
        tokens, states, positions = changing
        embedded = self.ends.embed(tokens).to(self.device, self.dtype)
        used = slice(prefix.lengths.longest)
        layers = zip(self.kinds, prefix.layers, strict=True)
        shared = {kind: (keys[:, :, used], values[:, :, used]) for kind, (keys, values) in layers}
        return self.draft(embedded, states, positions, self.angles.rotary, shared, prefix.lengths)
