"""P-EAGLE: an EAGLE-3 draft that was trained to draft all levels in one forward.

The newest entry predicts the first token, and rows after it, which hold a learned state and the mask token, predict the
others. Rows see the entries and the rows before them; their keys and values are dropped afterwards. The logits of a
level are the same after all of its nodes.
"""

from collections.abc import Sequence

import torch

from ...generation.draft_tree import Beam
from .generation_eagle3 import Eagle3Drafter


class ParallelEagle3Drafter(Eagle3Drafter):
    """Draft a tree of fixed size from one forward."""

    def level_inputs(
        self, beam: Beam, depth: int, shared: tuple[torch.Tensor, ...], states: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Return the entries to store for the first level, and the logits of all levels for the others."""
        return tuple(states) if depth else shared[:4]

    def level(self, changing: tuple[torch.Tensor, ...], depth: int, prefix: None) -> tuple[torch.Tensor, ...]:
        """Return logits `(B, 1, draft vocabulary)` of a level, and those of all `(B, levels, draft vocabulary)`."""
        logits = changing[0] if depth else self.draft.logits(self._rows(*changing), self.binding.target.model)
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
            if windows[index] is not None:  # it moves with the rows, but never leaves the last entry behind
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
        outputs: torch.Tensor = draft.run(states, embedded.to(self.device, self.dtype), angles, attend, places)[0]
        return outputs
