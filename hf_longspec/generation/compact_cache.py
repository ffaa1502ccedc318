"""The cache of a drafting forward of the target: for every layer a short buffer with some entries of the full cache."""

import torch
from transformers.cache_utils import Cache

from ..attention_backends.contexts import SparseContext, StepContext
from .cache import Rows, SpeculativeCache, SpeculativeLayer
from .draft_tree import DraftTree
from .target import TargetView


class CompactCache(Cache):
    """Hold copies of some entries of the target's cache, and free slots after them for drafted tokens.

    A subclass chooses the entries of each layer, writes them to `keys` and `values` of the layer, and sets `used`.
    Layers in `dense_layers` read the target's cache. Their drafted tokens are written to the slots after the committed
    tokens, where the next verification overwrites them.

    Args:
        cache ([`SpeculativeCache`]): The target's cache.
        dense_layers (`frozenset[int]`): Indices of the layers that attend to the full cache.

    Attributes:
        used ([`Rows`]): Number of entries of every row in the buffers.
        dense_used ([`Rows`]): Number of entries of every row in dense layers.
    """

    def __init__(self, cache: SpeculativeCache, dense_layers: frozenset[int]):
        self.cache = cache
        self.dense_layers = dense_layers
        self.used = Rows(cache.batch_size)
        self.dense_used = Rows(cache.batch_size)
        self.used.staged = self.dense_used.staged = True
        super().__init__(
            layers=[
                SpeculativeLayer(self.dense_used if index in dense_layers else self.used, layer.capacity)
                for index, layer in enumerate(cache.layers)
            ]
        )

    @property
    def sparse_layers(self) -> list[int]:
        """Indices of the layers whose entries are selected, without layers that share the cache of another layer."""
        return [
            index
            for index, layer in enumerate(self.cache.layers)
            if layer.is_initialized and index not in self.dense_layers
        ]

    @property
    def layout(self) -> tuple[int, ...]:
        """Numbers that change when a buffer is replaced."""
        return self.used.layout, self.dense_used.layout

    @property
    def nbytes(self) -> int:
        """Size of the copies in bytes; dense layers have none."""
        own = [self.layers[index] for index in self.sparse_layers if self.layers[index].is_initialized]
        return sum(part.numel() * part.element_size() for layer in own for part in (layer.keys, layer.values))

    def share_dense(self) -> None:
        """Let the dense layers read the target's cache at its present length."""
        self.dense_used.lengths = self.cache.lengths
        for index in self.dense_layers:
            source, layer = self.cache.layers[index], self.layers[index]
            if source.is_initialized and layer.keys is not source.keys:
                layer.place(source.keys, source.values)

    def context(self, target: TargetView, positions: torch.Tensor) -> StepContext:
        """Return the context of a drafting step at `positions` `(B, 1)`."""
        used, dense = self.used.lengths.plus(1), self.dense_used.lengths.plus(1)
        return SparseContext(used, positions, dense, dense_layers=self.dense_layers, windows=target.windows)

    def advance(self) -> None:
        """Count one drafted token that was written in every row."""
        for rows in (self.used, self.dense_used):
            rows.lengths = rows.lengths.plus(1)

    def step(
        self,
        target: TargetView,
        token: torch.Tensor,
        max_length: int,
        with_hidden: bool = False,
        fixed_shape: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the target on one token per row, which attends to the entries and to itself.

        Keys and values of the token are written to the slot after the used entries.

        Args:
            target ([`TargetView`]): The target.
            token (`torch.LongTensor` of shape `(batch_size,)`): One token per row.
            max_length (`int`): Bound on positions; the token's true position is clamped below it.
            with_hidden (`bool`, *optional*, defaults to `False`): Whether to return the input of the final norm.
            fixed_shape (`bool`, *optional*, defaults to `True`): Whether the step may run compiled or captured.

        Returns:
            `tuple`: Logits `(batch_size, vocab_size)`, and the input of the final norm `(batch_size, hidden_size)` if
            `with_hidden`, else `None`.
        """
        device = token.device
        dense = self.dense_used.lengths
        position = dense.on(device)[:, None]
        if dense.longest >= max_length:
            position = position.clamp_max(max_length - 1)
        context = self.context(target, position)
        mask = DraftTree.root_only(token).mask[:, None]
        logits, hidden = target.step(token[:, None], position, self, mask, context, fixed_shape, with_hidden)
        return logits[:, 0], None if hidden is None else hidden[:, 0]


def gather_entries(buffer: torch.Tensor, slots: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return `buffer[b, h, slots[b, h]]` as one copy of whole rows, `(B, K, n, D)`.

    Args:
        buffer (`torch.Tensor` of shape `(B, K, capacity, D)`): Keys or values.
        slots (`torch.LongTensor` of shape `(B, K, n)` or `(B, 1, n)`): Slots to copy.
        out (`torch.Tensor` of shape `(B, K, n, D)`, *optional*): Contiguous memory of the result.
    """
    batch, heads, capacity, width = buffer.shape
    row = torch.arange(batch * heads, device=buffer.device).view(batch, heads, 1) * capacity
    flat = (row + slots).flatten()
    rows = None if out is None else out.view(-1, width)
    return torch.index_select(buffer.view(-1, width), 0, flat, out=rows).view(batch, heads, -1, width)
