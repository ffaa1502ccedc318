"""EAGLE-3: a draft of one layer grows a beam from states of the target, then from its own.

EAGLE-3, https://huggingface.co/papers/2503.01840. Entries are those of `aux_drafter.py`. The newest one predicts the
first level of the tree. A node of the tree is an entry too, with the state of its parent in place of auxiliary hidden
states, which the target has only after it verified the node.
"""

from collections.abc import Sequence

import torch

from ...generation.draft_tree import Beam
from ..shared.aux_drafter import Nodes, StepwiseAuxDrafter
from ..shared.beams import Tensors, visible


class Eagle3Drafter(StepwiseAuxDrafter):
    """Draft a tree of fixed size with one small decoder."""

    def next_level(self, nodes: Nodes) -> tuple[torch.Tensor, torch.Tensor]:
        def attend(index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            ring, mask = self.rings[index], self.stage(index, nodes, key, value)
            return self.attend(query, ring.keys, ring.values, mask)

        embedded = self.embed(nodes.tokens)
        outputs, states = self.draft.run(nodes.states, embedded, (nodes.cos, nodes.sin), attend)
        return self.head(outputs), states

    def enter(
        self, aux_hidden_states: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, query_places: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        last_layer = len(self.rings) - 1
        query_positions = positions.gather(1, query_places)

        def attend(index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            ring = self.rings[index]
            ring.fill(key, value, positions)
            if not query.shape[2]:
                return query
            if index < last_layer and query.shape[2] > self.most_new:  # the ring has no room for all at once
                mask = visible(positions, positions, ring.window, ring.sinks)
                return self.attend(query, key, value, mask)
            return self.attend(
                query, ring.keys, ring.values, ring.visible(query_positions if index == last_layer else positions)
            )

        embedded = self.embed(tokens)
        states = self.draft.features(aux_hidden_states.to(self.device, self.dtype))
        angles = self.rotary(states, positions.clamp_min(0))
        return self.draft.run(states, embedded, angles, attend, query_places)


class ParallelEagle3Drafter(Eagle3Drafter):
    """Draft a tree of fixed size from one forward of a P-EAGLE draft, which was trained for that.

    The newest entry predicts the first token, and rows after it, which hold a learned state and the mask token, predict
    the others. Rows see the entries and the rows before them; their keys and values are dropped afterwards. The logits
    of a level are the same after all of its nodes.
    """

    def level_inputs(self, beam: Beam, depth: int, shared: Tensors, states: Sequence[torch.Tensor]) -> Tensors:
        """Return the entries to store for the first level, and the logits of all levels for the others."""
        return tuple(states) if depth else shared[:4]

    def level(self, changing: Tensors, depth: int, prefix: None) -> Tensors:
        """Return logits `(B, 1, draft vocabulary)` of a level, and those of all `(B, levels, draft vocabulary)`."""
        logits = changing[0] if depth else self.head(self._rows(*changing))
        return logits[:, depth : depth + 1], logits

    def _rows(
        self, aux_hidden_states: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, last: torch.Tensor
    ) -> torch.Tensor:
        """Store entries, and return the outputs `(B, levels, hidden)` of the last one and of the rows after it."""
        draft, count, length = self.draft, len(self.widths) - 1, positions.shape[1]
        rows = torch.arange(count, device=self.device)
        end = positions.gather(1, last)
        row_positions = end + 1 + rows
        windows, last_layer = draft.config.window_of_layers, len(self.rings) - 1

        def attend(index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            ring = self.rings[index]
            ring.fill(key[:, :, :length], value[:, :, :length], positions)
            ring.stage(key[:, :, length:], value[:, :, length:], 0)
            of_entries = ring.visible(end if index == last_layer else positions)
            of_rows = ring.visible(end).expand(-1, count, -1)
            if windows[index] is not None:  # it moves with the rows, and always holds the last entry
                newest = ring.positions[:, None, : ring.size] == end[..., None]
                of_rows = ring.visible(row_positions) | newest
            seen = torch.nn.functional.pad(rows[:, None] >= rows, (0, 0, of_entries.shape[1], 0))
            mask = torch.cat([torch.cat([of_entries, of_rows], 1), seen.expand(len(end), -1, -1)], -1)
            return self.attend(query, ring.keys, ring.values, mask)

        embedded, states = draft.with_mask_rows(
            aux_hidden_states.to(self.device, self.dtype), tokens, count, self.binding.target.model
        )
        angles = self.rotary(states, torch.cat([positions.clamp_min(0), row_positions], 1))
        places = torch.cat([last, (length + rows).expand(len(last), -1)], 1)
        return draft.run(states, embedded.to(self.device, self.dtype), angles, attend, places)[0]
