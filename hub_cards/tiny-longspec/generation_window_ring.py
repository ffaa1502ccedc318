# Published with a draft by hf_longspec, Apache-2.0.
"""The state of a draft with windowed self-attention: constant in the length of the context."""

import torch


class WindowRing:
    """Keys and values of the last `window` committed tokens of every row in a ring, and slots for a draft tree.

    The token at position p lies in slot `p % window`; node i of the tree in slot `window + i`. One more slot takes what
    a row writes without keeping it, so that all rows run the same operations.

    Args:
        window (`int`): Positions that a query sees, its own included.
        tree_slots (`int`): Nodes of the tree.
        batch_size (`int`): Rows.
        num_heads (`int`): Key/value heads.
        head_dim (`int`): Size of a head.
    """

    def __init__(
        self,
        window: int,
        tree_slots: int,
        batch_size: int,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.window = window
        self.spare = window + tree_slots
        shape = (batch_size, num_heads, self.spare + 1, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        # position of the token in each slot; nothing is at the positions below 0
        self.positions = torch.full((batch_size, self.spare + 1), -1, device=device)
        self._rows = torch.arange(batch_size, device=device)[:, None]

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and positions."""
        return sum(states.numel() * states.element_size() for states in (self.keys, self.values, self.positions))

    def fill(self, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor) -> None:
        """Store at most `window` tokens `(B, K, T, D)` by their `positions` `(B, T)`; negative ones are padding."""
        slots = torch.where(positions >= 0, positions % self.window, self.spare)
        self.keys[self._rows, :, slots] = keys.transpose(1, 2)
        self.values[self._rows, :, slots] = values.transpose(1, 2)
        self.positions.scatter_(1, slots, positions)

    def stage(self, keys: torch.Tensor, values: torch.Tensor, first_node: int) -> None:
        """Store the nodes `first_node, ...` of the tree, `(B, K, n, D)`."""
        slots = slice(self.window + first_node, self.window + first_node + keys.shape[2])
        self.keys[:, :, slots] = keys
        self.values[:, :, slots] = values

    def keep(self, path: torch.Tensor, counts: torch.Tensor, lengths: torch.Tensor) -> None:
        """Move the accepted nodes into the ring.

        Args:
            path (`torch.LongTensor` of shape `(B, M)`): Nodes, root first; M is at most the window.
            counts (`torch.LongTensor` of shape `(B,)`): How many of them each row keeps.
            lengths (`torch.LongTensor` of shape `(B,)`): Position of the root.
        """
        places = torch.arange(path.shape[1], device=path.device)
        positions = torch.where(places < counts[:, None], lengths[:, None] + places, -1)
        source = self.window + path
        # (B, M, K, D): what advanced indices around a slice return
        keys, values = self.keys[self._rows, :, source], self.values[self._rows, :, source]
        self.fill(keys.transpose(1, 2), values.transpose(1, 2), positions)

    def visible(self, positions: torch.Tensor) -> torch.Tensor:
        """Which ring slots queries at `positions` `(B, 1)` see: `(B, window)`."""
        stored = self.positions[:, : self.window]
        return (stored >= 0) & (stored > positions - self.window)
