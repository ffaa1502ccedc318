"""The cache a drafting forward of the target runs on: for every layer a short buffer with some of its entries."""

import torch
from transformers.cache_utils import Cache

from ..attention_backends.contexts import SparseContext
from .cache import SpeculativeCache
from .cache_layer import SpeculativeLayer
from .row_lengths import RowLengths
from .target import TargetView


class CompactCache(Cache):
    """Copies of some entries of the target's cache, and room behind them for what is drafted.

    Subclasses decide which entries a layer holds, write them to `keys` and `values` of its layer, and set `used`.
    Layers in `dense_layers` keep reading the target's cache; what they draft is written to the slots behind the
    committed tokens, where the next verification overwrites it.

    Args:
        cache ([`SpeculativeCache`]): The target's cache.
        dense_layers (`frozenset[int]`): Layers that keep their own attention.

    Attributes:
        used (`RowLengths`): Entries of every row in the buffers.
        dense_used (`RowLengths`): The same for dense layers.
    """

    def __init__(self, cache: SpeculativeCache, dense_layers: frozenset[int]):
        self.cache = cache
        self.dense_layers = dense_layers
        self.used = RowLengths(cache.batch_size)
        self.dense_used = RowLengths(cache.batch_size)
        self.used.staged = self.dense_used.staged = True
        super().__init__(
            layers=[
                SpeculativeLayer(self.dense_used if index in dense_layers else self.used, layer.capacity)
                for index, layer in enumerate(cache.layers)
            ]
        )

    @property
    def sparse_layers(self) -> list[int]:
        """Layers whose entries are selected; layers that share another one's cache hold nothing and are left out."""
        return [
            index
            for index, layer in enumerate(self.cache.layers)
            if layer.is_initialized and index not in self.dense_layers
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of the copies; layers that keep their own attention have none."""
        own = [self.layers[index] for index in self.sparse_layers if self.layers[index].is_initialized]
        return sum(part.numel() * part.element_size() for layer in own for part in (layer.keys, layer.values))

    def share_dense(self) -> None:
        """Let the dense layers read what the target's cache holds now."""
        self.dense_used.set(self.cache.host_lengths)
        for index in self.dense_layers:
            source, layer = self.cache.layers[index], self.layers[index]
            layer.keys, layer.values, layer.is_initialized = source.keys, source.values, source.is_initialized

    def step(
        self, target: TargetView, token: torch.Tensor, max_length: int, with_hidden: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the target on one token `(batch,)` per row, which sees the entries and itself.

        Its position is the true one, clamped below `max_length`. Its keys and values go behind the used entries.

        Returns:
            `(batch, vocab)` logits, and `(batch, hidden)`, what the final norm was given, if `with_hidden`.
        """
        device = token.device
        position = (self.dense_used.on(device)[:, None]).clamp_max(max_length - 1)
        context = SparseContext(
            lengths=self.used.on(device) + 1,
            host_lengths=tuple(length + 1 for length in self.used.host),
            positions=position,
            dense_lengths=self.dense_used.on(device) + 1,
            dense_host_lengths=tuple(length + 1 for length in self.dense_used.host),
            dense_layers=self.dense_layers,
            windows=target.windows,
        )
        mask = torch.ones(len(token), 1, 1, 1, dtype=torch.bool, device=device)
        logits, hidden = target.step(token[:, None], position, self, mask, context, True, with_hidden)
        return logits[:, 0], None if hidden is None else hidden[:, 0]


def gather_entries(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """`buffer[b, h, slots[b, h]]` as one copy of whole rows; `slots` may have one head for all."""
    batch, heads, capacity, width = buffer.shape
    row = torch.arange(batch * heads, device=buffer.device).view(batch, heads, 1) * capacity
    flat = (row + slots).flatten()
    return buffer.view(-1, width).index_select(0, flat).view(batch, heads, -1, width)
