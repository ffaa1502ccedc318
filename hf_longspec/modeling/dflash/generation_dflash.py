"""DFlash: one forward over a block gives the distribution of every slot, from which a chain or a tree is made.

DFlash, https://huggingface.co/papers/2602.06036. The block holds the root and masks; its keys and values are dropped
afterwards. Rings hold the entries of the committed text. The first level of the beam runs the layers; later levels
read the logits of their slot, which may be corrected by the token of the level before.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ...generation.draft_tree import Beam
from ..shared.aux_drafter import AuxDrafter
from ..shared.beams import Tensors


class DFlashDrafter(AuxDrafter):
    """Draft a chain, or the tree of the most probable paths, from one forward over a block."""

    def shape_of(self, draft: Any) -> tuple[list[int], int]:
        return draft.tree_shape

    @property
    def tree_slots(self) -> int:
        return int(self.draft.config.block_size)

    def remember(self, aux_hidden_states: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor) -> None:
        """Store entries in the rings; see [`AuxDrafter.remember`]. An entry has no token here."""
        context = self.draft.context(aux_hidden_states.to(self.device, self.dtype))
        angles = self.rotary(context, positions.clamp_min(0))
        for layer, ring in zip(self.draft.layers, self.rings, strict=True):
            key, value = layer.entries(context, angles)
            ring.fill(key, value, positions)

    def begin(self, inputs: Tensors, prefix: None) -> Tensors:
        """Return the roots `(B,)`, and states and positions of the entries that are stored first."""
        root, aux_hidden_states, tokens, positions, last = inputs
        return root.to(self.device), aux_hidden_states, tokens, positions, positions.gather(1, last)

    def level_inputs(self, beam: Beam, depth: int, shared: Tensors, states: Sequence[torch.Tensor]) -> Tensors:
        """Return the entries to store for the first level; tokens, and what it computed, for the others."""
        if not depth:
            return shared
        logits, hidden, memory = states
        return beam.tokens.to(self.device), logits, hidden, self.of_parents(beam, memory)

    def level(self, changing: Tensors, depth: int, prefix: None) -> Tensors:
        """Return logits after the newest level; logits `(B, S, draft vocabulary)` and states `(B, S, hidden)` of all
        slots, and the state of the Markov head after each node `(B, n, rank)`.
        """
        draft = self.draft
        if depth:
            tokens, logits, hidden, memory = changing
        else:
            root, *entries, end = changing
            self.remember(*entries)
            hidden = self._block(root, end[:, 0] + 1)
            logits, tokens = self.head(hidden), root[:, None]
            memory = draft.first_memory(tokens)
        slot = slice(draft.config.first_slot + depth, draft.config.first_slot + depth + 1)
        row, memory = draft.next_logits(logits[:, slot], hidden[:, slot], tokens, memory)
        return row, logits, hidden, memory

    def _block(self, root: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """Return the states `(B, S, hidden)` of blocks that begin with `root` `(B,)` at `anchors` `(B,)`."""
        draft = self.draft

        def attend(index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            ring = self.rings[index]
            ring.stage(key, value, 0)
            entries = ring.visible(draft.query_positions(index, anchors))
            slots = draft.slot_mask(index, anchors.device).expand(len(anchors), -1, -1)
            mask, sinks = torch.cat([entries, slots], -1), draft.layers[index].self_attn.attention_sink_bias
            return self.attend(query, ring.keys, ring.values, mask, sinks)

        states = draft.embed_block(root, self.binding.target.model).to(self.device, self.dtype)
        return draft.run(states, self.rotary(states, draft.block_positions(anchors)), attend)
