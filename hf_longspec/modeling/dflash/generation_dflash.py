"""DFlash: one forward over a block gives the distribution of every slot, from which a chain or a tree is made.

DFlash, https://huggingface.co/papers/2602.06036. The block holds the root and masks; its keys and values are dropped
afterwards. Rings hold the entries of the committed text. The first level of the beam runs the layers; later levels
read the logits of their slot, which may be corrected by the token of the level before.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ...generation.draft_tree import Beam, DraftTree
from ...generation.drafter import Binding
from ..shared.aux_drafter import AuxDrafter
from ..shared.beams import Tensors


class DFlashDrafter(AuxDrafter):
    """Draft a chain, or the tree of the most probable paths, from one forward over a block."""

    def __init__(self, binding: Binding, draft: Any):
        super().__init__(binding, draft)
        self.threshold: float | None = draft.setting("confidence_threshold")

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

    def propose(self, root: torch.Tensor) -> DraftTree:
        """Return a chain or tree after `root` `(batch,)`. Padding at its end is dropped if no step is captured."""
        tree = super().propose(root)
        # n-grams follow the whole tree
        if self.threshold is None or self.ngram_depth or self.binding.target.steps.runner is not None:
            return tree
        places = torch.arange(tree.num_nodes, device=tree.valid.device)
        size = 1 + max(1, int((tree.valid * places).max()))
        fields = (*(part[:, :size] for part in tree.fields[:4]), tree.mask[:, :size, :size])
        return DraftTree.of_fields(fields, min(tree.max_depth, size - 1), tree.is_chain)

    def cut(self, fields: Tensors, states: Sequence[torch.Tensor]) -> Tensors:
        """Make nodes padding whose confidence, times those of their ancestors, is below the threshold."""
        if self.threshold is None:
            return fields
        tokens, parents, valid, depths, mask = fields
        draft, hidden = self.draft, states[1]
        slots = (draft.config.first_slot + depths - 1).clamp_min(0).to(hidden.device)
        before = tokens.gather(1, parents.clamp_min(0)).to(hidden.device)
        of_slots = hidden.gather(1, slots[..., None].expand(-1, -1, hidden.shape[2]))
        confidence = draft.confidence_logits(of_slots, before).float().sigmoid().to(tokens.device)
        confidence = confidence.masked_fill(depths == 0, 1)
        product = torch.where(mask, confidence[:, None], 1).prod(-1)
        valid = valid & (product >= self.threshold)
        itself = torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device)
        return tokens, parents, valid, depths * valid, (mask & valid[..., None]) | itself

    @property
    def key(self) -> tuple:
        return *super().key, self.threshold

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
