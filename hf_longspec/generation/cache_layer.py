"""Preallocated keys and values of one layer: plain updates, staged writes behind every row's own length, moves."""

import torch
from transformers.cache_utils import CacheLayerMixin

from .lazy_zeros import lazy_zeros
from .row_lengths import RowLengths


class SpeculativeLayer(CacheLayerMixin):
    """Keys and values of one layer, allocated from the first tensors it sees and again when they no longer fit.

    Sliding-window layers are stored at full length too: the attention backend applies the window, and a rejected
    node can therefore never have pushed a committed one out.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, rows: RowLengths, capacity: int):
        super().__init__()
        self.rows = rows
        self.capacity = capacity
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate from the shapes seen: under tensor parallelism a rank holds fewer heads than the config says."""
        batch_size = key_states.shape[0]
        if batch_size != self.rows.batch_size:
            raise ValueError(
                f"the cache was made for batch_size={self.rows.batch_size}, but the model ran on {batch_size} rows. "
                f"Make it with SpeculativeCache(config, batch_size={batch_size}, max_length=...)."
            )
        self._allocate(key_states, value_states, self.capacity)
        self.device = key_states.device
        self.is_initialized = True

    def _allocate(self, key_states: torch.Tensor, value_states: torch.Tensor, capacity: int) -> None:
        """Buffers of `capacity` slots with the rows, heads, widths and dtypes of these states."""
        # Zeros: masked slots are multiplied by probability 0, and 0 x NaN would be NaN.
        keys, values = (
            lazy_zeros(states, *states.shape[:2], capacity, states.shape[-1]) for states in (key_states, value_states)
        )
        self.keys, self.values = keys, values

    def reserve(self, capacity: int) -> None:
        """Have at least `capacity` slots; a buffer that is too small is replaced by one larger by at least half."""
        if capacity <= self.capacity:
            return
        capacity = max(capacity, self.capacity + self.capacity // 2)
        if self.is_initialized:
            keys, values = self.keys, self.values
            self._allocate(keys, values, capacity)
            self.keys[:, :, : self.length] = keys[:, :, : self.length]
            self.values[:, :, : self.length] = values[:, :, : self.length]
        self.capacity = capacity

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new entries; return views of every slot written so far, the new ones included."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        count = key_states.shape[2]
        if self.rows.staged:
            return self._stage(key_states, value_states, count)
        if self.rows.equal_length is None:
            raise ValueError(
                f"the rows hold {self.rows.host} tokens, and plain generation needs rows of one length. Continue each "
                "row in a cache of its own, or start a new cache."
            )
        end = self.length + count
        self.reserve(end)
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _stage(self, keys: torch.Tensor, values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = self.rows.equal_length
        if start is not None:
            self.keys[:, :, start : start + count] = keys
            self.values[:, :, start : start + count] = values
        else:
            row, slot = self.rows.slots(count, self.keys.device)
            self.keys[row, :, slot] = keys.transpose(1, 2)
            self.values[row, :, slot] = values.transpose(1, 2)
        end = self.rows.longest + count
        return self.keys[:, :, :end], self.values[:, :, :end]

    def move(self, path: torch.Tensor) -> None:
        """Copy the staged nodes of `path` to the slots right behind the prefix, in place."""
        path = path.to(self.keys.device)
        row, target = self.rows.slots(path.shape[1], self.keys.device)
        source = target[:, :1] + path
        # One temporary at a time, of M nodes: far below one layer.
        self.keys[row, :, target] = self.keys[row, :, source]
        self.values[row, :, target] = self.values[row, :, source]

    def get_seq_length(self) -> int:
        """Tokens stored; with rows of unequal length, the longest."""
        return self.length

    def get_max_length(self) -> int:
        """Slots of the buffers, staging slots included."""
        return self.capacity

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Key length and offset of the mask that transformers builds for `query_length` new tokens."""
        return self.length + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens (a negative number, as in transformers)."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): pass the number of tokens to remove as a negative integer.")
        self.length = max(0, self.length + tokens_to_remove)

    def reset(self) -> None:
        """Forget every token; the buffers stay."""
        self.length = 0

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorder the rows in place, for beam search."""
        if self.is_initialized:
            self.keys.copy_(self.keys.index_select(0, beam_idx.to(self.keys.device)))
            self.values.copy_(self.values.index_select(0, beam_idx.to(self.values.device)))
