"""The self-attention cache of a draft with a sliding window. Its size does not depend on the context length."""

import torch


class WindowRing:
    """Store keys and values of the last `window` committed tokens of every row in a ring, and those of a draft tree.

    The token at position p lies in slot `p % window`, node i of the tree in slot `window + i`. One spare slot takes the
    writes that a row does not keep, so that all rows run the same operations.

    Args:
        window (`int`): Positions that a query attends to, its own included.
        tree_slots (`int`): Number of nodes of the tree.
        batch_size (`int`): Number of rows.
        num_heads (`int`): Number of key/value heads.
        head_dim (`int`): Size of a head.
        dtype (`torch.dtype`): Type of keys and values.
        device (`torch.device`): Device of all tensors.
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
        # position of the token in each slot; a negative position marks an empty slot
        self.positions = torch.full((batch_size, self.spare + 1), -1, device=device)
        self._rows = torch.arange(batch_size, device=device)[:, None]

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and positions."""
        return sum(states.numel() * states.element_size() for states in (self.keys, self.values, self.positions))

    def fill(self, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor) -> None:
        """Store T tokens per row at their positions.

        Args:
            keys (`torch.Tensor` of shape `(B, K, T, D)`): Keys of at most `window` tokens.
            values (`torch.Tensor` of shape `(B, K, T, D)`): Values of these tokens.
            positions (`torch.LongTensor` of shape `(B, T)`): Positions of these tokens; a negative one marks padding.
        """
        slots = torch.where(positions >= 0, positions % self.window, self.spare)
        self.keys[self._rows, :, slots] = keys.transpose(1, 2)
        self.values[self._rows, :, slots] = values.transpose(1, 2)
        self.positions.scatter_(1, slots, positions)

    def stage(self, keys: torch.Tensor, values: torch.Tensor, first_node: int) -> None:
        """Store keys and values `(B, K, n, D)` of n nodes of the tree, from node `first_node` on."""
        slots = slice(self.window + first_node, self.window + first_node + keys.shape[2])
        self.keys[:, :, slots] = keys
        self.values[:, :, slots] = values

    def keep(self, path: torch.Tensor, counts: torch.Tensor, lengths: torch.Tensor) -> None:
        """Move the accepted nodes into the ring.

        Args:
            path (`torch.LongTensor` of shape `(B, M)`): Nodes of the accepted path, root first; M is at most `window`.
            counts (`torch.LongTensor` of shape `(B,)`): Number of nodes that each row keeps.
            lengths (`torch.LongTensor` of shape `(B,)`): Position of the root.
        """
        places = torch.arange(path.shape[1], device=path.device)
        positions = torch.where(places < counts[:, None], lengths[:, None] + places, -1)
        source = self.window + path
        # advanced indices around a slice give the shape (B, M, K, D)
        keys, values = self.keys[self._rows, :, source], self.values[self._rows, :, source]
        self.fill(keys.transpose(1, 2), values.transpose(1, 2), positions)

    def visible(self, positions: torch.Tensor) -> torch.Tensor:
        """Return which slots of the ring queries at `positions` `(B, 1)` attend to, `(B, window)`."""
        stored = self.positions[:, : self.window]
        return (stored >= 0) & (stored > positions - self.window)
