"""WindowRing: the last keys and values of a draft that has its own attention, in memory of a fixed size."""

import torch


class WindowRing:
    """Store keys and values of the first and the last committed tokens of every row, and those of a draft tree.

    The `sinks` first tokens of a text stay in the first slots. The token at a later position p lies in slot
    `sinks + (p - sinks) % (window + room)`, node i of the tree in slot `size + i`. One spare slot takes the writes that
    a row does not keep, so that all rows run the same operations.

    Args:
        window (`int`): Positions that a query attends to, its own included.
        tree_slots (`int`): Number of nodes of the tree.
        batch_size (`int`): Number of rows.
        num_heads (`int`): Number of key/value heads.
        head_dim (`int`): Size of a head.
        dtype (`torch.dtype`): Type of keys and values.
        device (`torch.device`): Device of all tensors.
        sinks (`int`, *optional*, defaults to 0): First positions of a text that all queries attend to.
        room (`int`, *optional*, defaults to 0): Tokens that may be stored before the queries of the first of them run.

    Attributes:
        size (`int`): Number of slots before those of the tree.
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
        sinks: int = 0,
        room: int = 0,
    ):
        self.window = window
        self.sinks = sinks
        self.size = sinks + window + room
        self.spare = self.size + tree_slots
        shape = (batch_size, num_heads, self.spare + 1, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        # position of the token in each slot; a negative position marks an empty slot
        self.positions = torch.full((batch_size, self.spare + 1), -1, device=device)
        self._rows = torch.arange(batch_size, device=device)[:, None]

    def clear(self) -> None:
        """Mark all slots as empty."""
        self.positions.fill_(-1)

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and positions."""
        return sum(states.numel() * states.element_size() for states in (self.keys, self.values, self.positions))

    def fill(self, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor) -> None:
        """Store T tokens per row at their positions.

        Args:
            keys (`torch.Tensor` of shape `(B, K, T, D)`): Keys. If there are too many, the newest are kept.
            values (`torch.Tensor` of shape `(B, K, T, D)`): Values of these tokens.
            positions (`torch.LongTensor` of shape `(B, T)`): Positions of these tokens; a negative one marks padding.
        """
        capacity = self.size - self.sinks
        if positions.shape[1] > capacity:
            newest = positions.amax(1, keepdim=True)
            positions = torch.where((positions > newest - capacity) | (positions < self.sinks), positions, -1)
        slots = (positions - self.sinks) % capacity + self.sinks
        slots = torch.where(positions < self.sinks, positions, slots) if self.sinks else slots
        slots = torch.where(positions >= 0, slots, self.spare)
        # other dtypes than those of the ring come from autocast
        self.keys[self._rows, :, slots] = keys.transpose(1, 2).to(self.keys.dtype)
        self.values[self._rows, :, slots] = values.transpose(1, 2).to(self.values.dtype)
        self.positions.scatter_(1, slots, positions)

    def stage(self, keys: torch.Tensor, values: torch.Tensor, first_node: int) -> None:
        """Store keys and values `(B, K, n, D)` of n nodes of the tree, from node `first_node` on."""
        slots = slice(self.size + first_node, self.size + first_node + keys.shape[2])
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
        source = self.size + path
        # advanced indices around a slice give the shape (B, M, K, D)
        keys, values = self.keys[self._rows, :, source], self.values[self._rows, :, source]
        self.fill(keys.transpose(1, 2), values.transpose(1, 2), positions)

    def visible(self, positions: torch.Tensor) -> torch.Tensor:
        """Return which slots queries at `positions` `(B, n)` attend to, `(B, n, size)`, the tree's excluded."""
        return visible(self.positions[:, : self.size], positions, self.window, self.sinks)


def visible(stored: torch.Tensor, positions: torch.Tensor, window: int, sinks: int = 0) -> torch.Tensor:
    """Return which keys queries attend to, `(B, n, T)`.

    Args:
        stored (`torch.LongTensor` of shape `(B, T)`): Positions of the keys; a negative one marks padding.
        positions (`torch.LongTensor` of shape `(B, n)`): Positions of the queries.
        window (`int`): Positions that a query attends to, its own included.
        sinks (`int`, *optional*, defaults to 0): First positions that all queries attend to.
    """
    stored, query = stored[:, None], positions[..., None]
    seen = stored > query - window
    if sinks:
        seen = seen | (stored < sinks)
    return (stored >= 0) & (stored <= query) & seen
