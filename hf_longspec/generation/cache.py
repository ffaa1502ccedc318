"""Preallocated key/value cache with per-row lengths, staged writes and an in-place commit."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from ..attention_backends.triton.commit import can_move, move_nodes
from .cache_layer import SpeculativeLayer
from .row_lengths import RowLengths

# Nodes that one verification may stage behind the committed tokens.
DEFAULT_TREE_SLOTS = 80


class SpeculativeCache(Cache):
    """Key/value cache for speculative decoding: rolled back for free, committed in place.

    Works as `past_key_values` of plain `model.generate` too, and can be passed back for a second turn. A call that
    needs more room reallocates the buffers once, larger by at least half. On a CPU the buffers take memory as tokens
    are stored, so a generous `max_length` costs nothing; other devices take all of it at the first step.

    Args:
        config (`PreTrainedConfig`):
            Configuration of the target model.
        batch_size (`int`):
            Number of rows.
        max_length (`int`):
            Committed tokens that a row can hold without reallocation, prompt included.
        tree_slots (`int`, *optional*, defaults to 80):
            Nodes that one verification may stage behind the committed tokens.
    """

    # A marker instead of isinstance: the installed package and a copy loaded from the Hub have different classes.
    _is_longspec_cache = True

    def __init__(
        self, config: PreTrainedConfig, batch_size: int, max_length: int, tree_slots: int = DEFAULT_TREE_SLOTS
    ):
        text_config = config.get_text_config(decoder=True)
        if batch_size < 1 or max_length < 1 or tree_slots < 1:
            raise ValueError(
                f"batch_size={batch_size}, max_length={max_length}, tree_slots={tree_slots}: each must be at least 1."
            )
        self.rows = RowLengths(batch_size)
        self.tree_slots = tree_slots
        capacity = max_length + tree_slots
        super().__init__(layers=[SpeculativeLayer(self.rows, capacity) for _ in range(text_config.num_hidden_layers)])

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        return self.rows.batch_size

    @property
    def host_lengths(self) -> tuple[int, ...]:
        """Committed tokens of each row."""
        return self.rows.host

    @property
    def max_length(self) -> int:
        """Committed tokens that a row can hold without reallocation."""
        return min(layer.capacity for layer in self.layers) - self.tree_slots

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Declare how many tokens each row holds: what a right-padded prefill wrote beyond them is forgotten."""
        if len(lengths) != self.batch_size:
            raise ValueError(f"{len(lengths)} lengths for a cache of {self.batch_size} rows.")
        self.rows.set(lengths)
        for layer in self.layers:
            layer.length = self.rows.longest

    def require(self, input_ids: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Check that this cache can continue `input_ids` `(batch, P)`, padded where `mask` is 0.

        Raises:
            ValueError: If it was made for another batch, or its rows cannot be continued.
        """
        stored = self.get_seq_length()
        if input_ids.shape[0] != self.batch_size:
            raise ValueError(
                f"past_key_values has {self.batch_size} rows and input_ids {input_ids.shape[0]}. Pass the "
                "cache of these "
                "rows, or leave past_key_values out."
            )
        padded = mask is not None and not bool(mask.all())
        if stored and (self.rows.equal_length is None or padded):
            raise ValueError(
                f"past_key_values holds {self.host_lengths} tokens: a further turn needs batch size 1, or rows of "
                "equal length without padding. Continue each row in a cache of its own."
            )
        if stored >= input_ids.shape[1]:
            raise ValueError(
                f"past_key_values holds {stored} tokens and input_ids has {input_ids.shape[1]}: pass the whole "
                "conversation, which must be longer than what is stored."
            )

    def reserve(self, max_length: int, tree_slots: int) -> None:
        """Make room for `max_length` committed tokens and `tree_slots` staged ones; reallocates at most once."""
        self.tree_slots = max(self.tree_slots, tree_slots)
        for layer in self.layers:
            layer.reserve(max_length + self.tree_slots)

    def stage(self, num_nodes: int) -> None:
        """Let the next forward write `num_nodes` nodes behind the committed tokens without committing them."""
        if num_nodes > self.tree_slots or self.rows.longest + num_nodes > self.max_length + self.tree_slots:
            raise ValueError(
                f"{num_nodes} nodes do not fit behind {self.rows.longest} committed tokens in a cache of "
                f"max_length={self.max_length} and tree_slots={self.tree_slots}. Raise whichever is too small."
            )
        self.rows.staged = True

    def commit(self, path: torch.Tensor | None, num_nodes: Sequence[int]) -> None:
        """Keep the accepted nodes: move them right behind the prefix and add `num_nodes[b]` to every row's length.

        Args:
            path (`torch.LongTensor` of shape `(batch, M)`, *optional*):
                Indices of the staged nodes to keep, node 0 first; entries at and beyond `num_nodes[b]` are ignored.
                `None` when the kept nodes are the first ones of every row, as in a chain: nothing moves.
            num_nodes (`Sequence[int]`):
                Nodes to keep of each row.
        """
        longest = max(num_nodes)
        if path is not None and longest > 1:
            self._move(path[:, :longest], num_nodes)
        self.rows.staged = False
        self.set_lengths([length + count for length, count in zip(self.rows.host, num_nodes, strict=True)])

    def _move(self, path: torch.Tensor, num_nodes: Sequence[int]) -> None:
        """Copy the nodes of `path` behind the prefix: where there is Triton in one launch per device."""
        together: dict[torch.device, list[torch.Tensor]] = {}
        for layer in self.layers:
            if layer.is_initialized and can_move(layer.keys.device):
                together.setdefault(layer.keys.device, []).extend((layer.keys, layer.values))
            elif layer.is_initialized:
                layer.move(path)
        for device, buffers in together.items():
            counts = torch.tensor(num_nodes, device=device)
            move_nodes(buffers, path.to(device), self.rows.on(device), counts)

    def rollback(self) -> None:
        """Drop what is staged. The slots keep their junk until the next step overwrites them."""
        self.rows.staged = False

    def reset(self) -> None:
        """Forget every token; the buffers stay."""
        self.rollback()
        self.set_lengths([0] * self.batch_size)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens of every row."""
        super().crop(tokens_to_remove)
        self.rows.set([max(0, length + tokens_to_remove) for length in self.rows.host])

    @property
    def nbytes(self) -> int:
        """Bytes of the allocated buffers."""
        return sum(
            tensor.numel() * tensor.element_size()
            for layer in self.layers
            if layer.is_initialized
            for tensor in (layer.keys, layer.values)
        )
