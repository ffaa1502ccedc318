"""Verification of texts with padding between their tokens (zeros inside of an attention mask).

The cache holds tokens without padding, one slot each, and positions number them. The windows of plain `generate` count
the columns of the padded text instead, so a window may hide slots of a prefix that is shorter than it.
"""

from dataclasses import dataclass, field

import torch

from .contexts import TreeContext
from .lengths import SeqLens


@dataclass
class GappedContext(TreeContext):
    """One verification step whose windows count columns. It is not run in a graph.

    Args:
        columns (`torch.LongTensor` of shape `(B, T)`): Column of the token at each position, increasing in every row.
    """

    columns: torch.Tensor = field(kw_only=True)

    def prefix_of(self, sliding_window: int | None) -> tuple[SeqLens, torch.Tensor]:
        """Return lengths and positions as above.

        A backend counts slots, so the first slot that a query sees is looked up, and the backend gets the position
        whose window begins there.
        """
        if sliding_window is None:
            return super().prefix_of(None)
        if (name := ("prefix", sliding_window)) not in self._memo:
            hidden = self.columns.gather(1, self.positions) - sliding_window
            positions = torch.searchsorted(self.columns, hidden, right=True) + sliding_window - 1
            self._memo[name] = self.lengths.with_gaps(), positions
        return self._memo[name]

    def windowed_mask(self, sliding_window: int | None) -> torch.Tensor:
        """Return the tree mask without the ancestors that are outside the window of a node."""
        return self.mask if sliding_window is None else self._mask_within(sliding_window)

    def _distances(self) -> torch.Tensor:
        columns = self.columns.gather(1, self.positions)
        return columns[:, :, None] - columns[:, None]
