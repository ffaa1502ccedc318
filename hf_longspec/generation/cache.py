"""A preallocated key/value cache with per-row lengths, staged writes and an in-place commit."""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..attention_backends.lengths import SeqLens
from ..attention_backends.triton.commit import can_move, move_nodes
from .draft_tree import DraftTree

# Name of a cache among the arguments and outputs of `generate` and of forwards: `cache` from transformers 5.24 on.
CACHE_NAME = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"
# Types of devices on which Triton moves nodes, if `can_move` says so.
TRITON_DEVICES = {"cuda"}


class Rows:
    """State that the layers of a cache share.

    Args:
        batch_size (`int`): Number of rows.

    Attributes:
        lengths ([`SeqLens`]): Committed tokens of every row.
        staged (`bool`): Whether the next update writes nodes after the committed tokens without committing them.
        layout (`int`): Number of times that a buffer of these layers was replaced.
        padding (`torch.LongTensor` of shape `(batch,)`, *optional*):
            Number of columns without a token before the last committed token of each padded text. `None` if there are
            none.
        plain (*optional*): The forwards of plain `generate`, for special cases whose layers depend on them.
        offsets (`torch.LongTensor` of shape `(batch, 1)`, *optional*): See [`SpeculativeCache.position_ids`].
    """

    def __init__(self, batch_size: int):
        self.batch_size = batch_size
        self.lengths = SeqLens((0,) * batch_size)
        self.staged = False
        self.layout = 0
        self.padding: torch.Tensor | None = None
        self.plain: Any = None
        self.offsets: torch.Tensor | None = None


# Bytes. Addresses of torch's own allocations are multiples of this.
ALIGNMENT = 64


def lazy_zeros(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return zeros of the given shape, with dtype and device of `like`.

    On a CPU, a page takes memory when it is first written. `torch.zeros` writes every zero, so a text of 100 tokens in
    a buffer for 100,000 would take all of the buffer's memory. numpy gets pages of zeros from the system instead. On
    other devices the whole buffer is allocated at once.

    >>> lazy_zeros(torch.ones(1, dtype=torch.bfloat16), 2, 3).tolist()
    [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    """
    if torch.compiler.is_compiling():
        return like.new_zeros(shape)
    with torch.inference_mode(False):  # a cache outlives the call, which may run under inference mode
        if like.device.type != "cpu":
            return like.new_zeros(shape)
        size = math.prod(shape) * like.element_size()
        pages = np.zeros(size + ALIGNMENT, np.uint8)
        start = -pages.ctypes.data % ALIGNMENT
        return torch.from_numpy(pages[start : start + size]).view(like.dtype).view(shape)


class SpeculativeLayer(CacheLayerMixin):
    """Keys and values of one layer, allocated with the shapes of the first update and replaced by larger ones if full.

    Sliding-window layers are stored at full length too, and the attention backend applies the window. A rejected node
    therefore never evicts a committed one.

    A layer of capacity 0 with tokens is packed: its tensors have the size of the tokens and may be those of another
    cache. They are never written to, as `reserve` moves the tokens to buffers before.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, rows: Rows, capacity: int):
        super().__init__()
        self.rows = rows
        self.capacity = capacity
        self.length = 0

    def like(self, rows: Rows) -> "SpeculativeLayer":
        """Return an empty layer of this kind for a cache with rows of its own."""
        return type(self)(rows, self.capacity)

    @property
    def buffers(self) -> list["SpeculativeLayer"]:
        """The parts of this layer that hold an entry for each token."""
        return [self]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate with the shapes of these states, as under tensor parallelism a rank holds a part of the heads."""
        batch_size = key_states.shape[0]
        if batch_size != self.rows.batch_size:
            raise ValueError(
                f"the cache was made for batch_size={self.rows.batch_size}, but the model ran on {batch_size} rows. "
                f"Make it with SpeculativeCache(config, batch_size={batch_size}, max_length=...)."
            )
        self._allocate(key_states, value_states, self.capacity)

    def _allocate(self, key_states: torch.Tensor, value_states: torch.Tensor, capacity: int) -> None:
        """Allocate buffers of `capacity` slots with the rows, heads, widths and dtypes of these states."""
        # Zeros, because masked slots are multiplied by probability 0, and 0 x NaN would be NaN.
        keys, values = (
            lazy_zeros(states, *states.shape[:2], capacity, states.shape[-1]) for states in (key_states, value_states)
        )
        self.place(keys, values)

    def place(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Use these buffers `(B, K, S, D)`."""
        self.keys, self.values, self.is_initialized, self.device = keys, values, True, keys.device
        self.rows.layout += 1

    def reserve(self, capacity: int) -> None:
        """Make room for at least `capacity` slots; a buffer that is too small grows by at least half."""
        if capacity <= self.capacity:
            return
        capacity = max(capacity, self.capacity + self.capacity // 2)
        if self.is_initialized:
            self._move_to(self.keys, self.values, capacity)
        self.capacity = capacity

    def _move_to(self, key_states: torch.Tensor, value_states: torch.Tensor, capacity: int) -> None:
        """Move all entries to new buffers of `capacity` slots with the dtypes of these states."""
        keys, values = self.keys, self.values
        self._allocate(key_states, value_states, capacity)
        self.keys[:, :, : self.length] = keys[:, :, : self.length]
        self.values[:, :, : self.length] = values[:, :, : self.length]

    def _widen(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Move all entries to buffers of a wider dtype if new states have one, as concatenating both would do.

        A cache that was filled under autocast holds half precision, and so does one from a model in that precision.
        """
        keys, values = (
            buffer[:, :, :0].to(torch.promote_types(buffer.dtype, new.dtype))
            for buffer, new in ((self.keys, key_states), (self.values, value_states))
        )
        if (keys.dtype, values.dtype) != (self.keys.dtype, self.values.dtype):
            self._move_to(keys, values, self.capacity)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new entries, and return views of all slots written so far, the new ones included."""
        count, lengths, is_staged = key_states.shape[2], self.rows.lengths, self.rows.staged
        if not is_staged:
            if lengths.is_ragged or self.rows.padding is not None:
                raise ValueError(
                    f"the rows hold {lengths.host} tokens, and plain generate needs rows of equal length without "
                    "padding. Continue each row in its own cache, or start a new cache."
                )
            self.reserve(self.length + count)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.dtype != self.keys.dtype or value_states.dtype != self.values.dtype:
            self._widen(key_states, value_states)
        if (start := lengths.shared if is_staged else self.length) is not None:
            self.keys[:, :, start : start + count] = key_states
            self.values[:, :, start : start + count] = value_states
        else:
            row, slot = lengths.slots(count, self.keys.device)
            self.keys[row, :, slot] = key_states.transpose(1, 2).to(self.keys.dtype)
            self.values[row, :, slot] = value_states.transpose(1, 2).to(self.values.dtype)
        self.length += 0 if is_staged else count
        end = lengths.longest + count if is_staged else self.length
        return self.keys[:, :, :end], self.values[:, :, :end]

    def move(self, path: torch.Tensor) -> None:
        """Copy the staged nodes of `path` to the slots right after the prefix, in place."""
        path = path.to(self.keys.device)
        row, target = self.rows.lengths.slots(path.shape[1], self.keys.device)
        source = target[:, :1] + path
        # one temporary of M nodes at a time, which is far smaller than a layer
        self.keys[row, :, target] = self.keys[row, :, source]
        self.values[row, :, target] = self.values[row, :, source]

    def get_seq_length(self) -> int:
        """Return the number of tokens stored: that of the longest row if lengths differ."""
        return self.length

    def get_max_length(self) -> int:
        """Return the number of slots of the buffers, staging slots included."""
        return max(self.capacity, self.length)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return key length and offset of the mask that transformers builds for `query_length` new tokens."""
        return self.length + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens (a negative number, as in transformers)."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): pass the number of tokens to remove as a negative integer.")
        self.length = max(0, self.length + tokens_to_remove)

    def reset(self) -> None:
        """Remove all tokens, and keep the buffers."""
        self.length = 0

    def entries(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return views of keys and values of all tokens; `None` if there are none yet."""
        if not self.is_initialized:
            return None, None
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]


# What a layer of a type keeps, if it is not keys and values alone: a function of the shared rows and a capacity.
LAYERS: dict[str, Callable[[Rows, int], Any]] = {}


def parts_of(cache: Any) -> list[Any]:
    """Return what a cache holds beside keys and values, of the kinds that its layers name as `part_class`.

    A part is staged, committed and dropped with them, see [`RecurrentStates`].
    """
    kinds = dict.fromkeys(layer.part_class for layer in cache.layers if hasattr(layer, "part_class"))
    return [kind(cache) for kind in kinds]


def layers_of(config: Any, rows: Rows, capacity: int, of_keys: Callable[..., Any] = SpeculativeLayer) -> list[Any]:
    """Return the layers of a cache for this text config; those with keys and values alone are made by `of_keys`."""
    kinds = getattr(config, "layer_types", None) or ()
    if LAYERS.keys().isdisjoint(kinds):
        kinds = [""] * config.num_hidden_layers
    return [LAYERS.get(kind, of_keys)(rows, capacity) for kind in kinds]


# Nodes that one verification may stage after the committed tokens.
DEFAULT_TREE_SLOTS = 80
# Fields of a config that leave keys, values and states as they are.
WITHOUT_EFFECT = {"architectures", "output_attentions", "output_hidden_states", "return_dict", "transformers_version"}
WITHOUT_EFFECT |= {"use_cache"}


def fingerprint_of(config: PreTrainedConfig) -> str:
    """Return a hash of the fields of a config that keys, values and states depend on."""
    fields = config.get_text_config(decoder=True).to_dict()
    kept = {
        name: value
        for name, value in fields.items()
        if name not in WITHOUT_EFFECT and not name.startswith("_") and not name.endswith("_token_id")
    }
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()


class SpeculativeCache(Cache):
    """Key/value cache for speculative decoding, with rollback at no cost and commit in place.

    It also works as `past_key_values` of plain `model.generate`, and can be passed again for a second turn. A call that
    needs more room reallocates the buffers once, larger by at least half. On a CPU the buffers take memory as tokens
    are stored, so a generous `max_length` costs nothing. Other devices allocate all of it at the first step. Copies,
    pickles and files of a cache have the size of its tokens.

    Args:
        config (`PreTrainedConfig`): Configuration of the target model.
        batch_size (`int`): Number of rows.
        max_length (`int`): Committed tokens that a row can hold without reallocation, prompt included.
        tree_slots (`int`, *optional*, defaults to 80): Nodes that one verification may stage after the committed ones.
    """

    def __init__(
        self, config: PreTrainedConfig, batch_size: int, max_length: int, tree_slots: int = DEFAULT_TREE_SLOTS
    ):
        self.config = text_config = config.get_text_config(decoder=True)
        if batch_size < 1 or max_length < 1 or tree_slots < 1:
            raise ValueError(
                f"batch_size={batch_size}, max_length={max_length}, tree_slots={tree_slots}: each must be at least 1."
            )
        self.rows = Rows(batch_size)
        self.tree_slots = tree_slots
        super().__init__(layers=layers_of(text_config, self.rows, max_length + tree_slots))
        self.key_layers = [part for layer in self.layers for part in getattr(layer, "buffers", ())]
        self.parts = parts_of(self)
        # lengths at the start of the call, if they alone do not lead back to it
        self._start: SeqLens | None = None

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        return self.rows.batch_size

    @property
    def lengths(self) -> SeqLens:
        """Committed tokens of each row."""
        return self.rows.lengths

    def position_ids(self, places: torch.Tensor) -> torch.Tensor:
        """Return the position ids of tokens at `places` `(batch, N)` of their texts.

        They are the places themselves, plus an offset for each row after images with M-RoPE, see [`Prompts`].
        """
        return places if self.rows.offsets is None else places + self.rows.offsets.to(places.device)

    @property
    def layout(self) -> tuple[int, ...]:
        """Numbers that change when a buffer is replaced."""
        return (self.rows.layout,)

    @property
    def max_length(self) -> int:
        """Committed tokens that a row can hold without reallocation; 0 if the cache is packed."""
        return max(self._slots - self.tree_slots, 0)

    @property
    def _slots(self) -> int:
        return min(layer.capacity for layer in self.key_layers)

    def set_lengths(self, lengths: SeqLens | Sequence[int]) -> None:
        """Set the number of tokens that each row holds; entries beyond it, as of right padding, are dropped.

        Raises:
            ValueError: If a part of the cache cannot be shortened, such as recurrent states.
        """
        lengths = SeqLens.of(lengths)
        if len(lengths.host) != self.batch_size:
            raise ValueError(f"{len(lengths.host)} lengths for a cache of {self.batch_size} rows.")
        for part in self.parts:
            if (reason := part.why_not_lengths(lengths)) is not None:
                raise ValueError(reason)
        self._set_lengths(lengths)

    def _set_lengths(self, lengths: SeqLens) -> None:
        self.rows.lengths = lengths
        for layer in self.key_layers:
            layer.length = self.lengths.longest

    def reserve(self, max_length: int, tree_slots: int) -> None:
        """Make room for `max_length` committed tokens and `tree_slots` staged ones, with at most one reallocation."""
        self.tree_slots = max(self.tree_slots, tree_slots)
        for layer in self.key_layers:
            layer.reserve(max_length + self.tree_slots)

    def stage(self, num_nodes: int, tree: DraftTree | None = None) -> None:
        """Let the next forward write `num_nodes` nodes after the committed tokens without committing them.

        Some parts of a cache need the `tree` of the nodes.
        """
        if num_nodes > self.tree_slots or self.lengths.longest + num_nodes > self._slots:
            raise ValueError(
                f"{num_nodes} nodes do not fit after {self.lengths.longest} committed tokens in a cache of "
                f"max_length={self.max_length} and tree_slots={self.tree_slots}. Raise whichever is too small."
            )
        self.rows.staged = True
        for part in self.parts:
            part.stage(tree, self.lengths)

    def commit(self, path: torch.Tensor | None, num_nodes: SeqLens | Sequence[int]) -> None:
        """Keep the accepted nodes: move them right after the prefix and add `num_nodes[b]` to every row's length.

        Args:
            path (`torch.LongTensor` of shape `(batch, M)`, *optional*):
                Indices of the staged nodes to keep, node 0 first. Entries from `num_nodes[b]` on are ignored. `None`
                if the first nodes of every row are kept, as in a chain: nothing moves.
            num_nodes ([`SeqLens`] or `Sequence[int]`):
                Number of nodes to keep of each row.
        """
        counts = SeqLens.of(num_nodes)
        if path is not None and counts.longest > 1:
            self._move(path[:, : counts.longest], counts)
        for part in self.parts:
            part.commit(path, counts)
        self.rows.staged = False
        self.set_lengths(self.lengths.plus(counts))

    def _move(self, path: torch.Tensor, counts: SeqLens) -> None:
        """Copy the nodes of `path` to the slots after the prefix, with Triton in one launch per device."""
        together: dict[torch.device, list[torch.Tensor]] = {}
        for layer in self.key_layers:
            if not layer.is_initialized:
                continue
            device = layer.keys.device
            if device.type in TRITON_DEVICES and can_move(device):
                together.setdefault(device, []).extend(x for x in (layer.keys, layer.values) if x.numel())
            else:
                layer.move(path)
        for device, buffers in together.items():
            move_nodes(buffers, path.to(device), self.lengths.on(device), counts.on(device))

    def rollback(self) -> None:
        """Drop the staged nodes. Their slots keep stale entries until the next step overwrites them."""
        self.rows.staged = False
        for part in self.parts:
            part.drop()

    def remember(self) -> None:
        """Keep what leads back to the present text, beside the lengths of layers with keys."""
        if self.parts:
            self._start = self.lengths
        for part in self.parts:
            part.remember()

    def go_back(self) -> None:
        """Return to the tokens of [`SpeculativeCache.remember`]."""
        self.rollback()
        if self._start is not None:
            for part in self.parts:
                part.go_back()
            self._set_lengths(self._start)

    def shorten(self, lengths: Sequence[int]) -> bool:
        """Drop all but the first `lengths[b]` tokens of every row, and return `True`.

        A cache with a part that cannot be shortened goes back to the tokens of [`SpeculativeCache.remember`], and the
        result is `False`.
        """
        self.rollback()
        if not all(part.can_shorten(lengths) for part in self.parts):
            self.go_back()
            return False
        self.set_lengths(lengths)
        return True

    def take_row(self, row: int, other: "SpeculativeCache", of: int = 0) -> None:
        """Replace the text of a row by that of row `of` of another cache. Keys that it does not have stay hidden."""
        lengths, length = list(self.lengths.host), other.lengths.host[of]
        for own, taken in zip(self.key_layers, other.key_layers, strict=True):
            if taken.is_initialized:
                if not own.is_initialized:
                    shapes = (x[:1, :, :0].expand(self.batch_size, -1, -1, -1) for x in (taken.keys, taken.values))
                    own.lazy_initialization(*shapes)
                own.keys[row, :, :length] = taken.keys[of, :, :length]
                own.values[row, :, :length] = taken.values[of, :, :length]
        for part, taken_part in zip(self.parts, other.parts, strict=True):
            part.take_row(row, taken_part, of)
        lengths[row] = length
        self._set_lengths(SeqLens(lengths))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens stored: that of the longest row if lengths differ."""
        # the first layer may have no keys
        return max(layer.length for layer in self.key_layers) if self.parts else super().get_seq_length(layer_idx)

    def entries(self) -> dict[str, torch.Tensor]:
        """Return views of all that is held, `(B, ...)` each, by names that only caches of one config share."""
        found = {"padding": self.rows.padding, "offsets": self.rows.offsets}
        for index, layer in enumerate(self.key_layers):
            found[f"{index}.keys"], found[f"{index}.values"] = layer.entries()
        for part in self.parts:
            found |= part.entries()
        return {name: entry for name, entry in found.items() if entry is not None}

    def hold(self, entries: dict[str, torch.Tensor], lengths: Sequence[int]) -> None:
        """Hold `entries` of rows with these lengths, and nothing else. The cache is packed then."""
        self.rollback()
        self.rows.batch_size = len(lengths)
        self.rows.padding, self.rows.offsets = entries.get("padding"), entries.get("offsets")
        for index, layer in enumerate(self.key_layers):
            if (keys := entries.get(f"{index}.keys")) is not None:
                layer.place(keys, entries[f"{index}.values"])
            layer.capacity = 0
        for part in self.parts:
            part.hold(entries)
        self._start = None
        self._set_lengths(SeqLens.of(lengths))

    @classmethod
    def holding(
        cls,
        config: PreTrainedConfig,
        entries: dict[str, torch.Tensor],
        lengths: Sequence[int],
        tree_slots: int = DEFAULT_TREE_SLOTS,
    ) -> "SpeculativeCache":
        """Return a cache that holds `entries` of rows with these lengths."""
        cache = cls(config, len(lengths), 1, tree_slots)
        cache.hold(entries, lengths)
        return cache

    @property
    def counts(self) -> list[int]:
        """Tokens of each row, also after plain generation, which adds as many to all rows and not to `lengths`."""
        stored = self.get_seq_length()
        return list(self.lengths.host) if self.lengths.longest == stored else [stored] * self.batch_size

    def pack(self) -> None:
        """Copy the tokens to tensors of their size, and drop the buffers."""
        self.hold({name: entry.clone() for name, entry in self.entries().items()}, self.counts)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`, in their order; the cache is packed then."""
        rows, counts = torch.arange(self.batch_size)[torch.as_tensor(indices).cpu()], self.counts
        entries = {name: entry.index_select(0, rows.to(entry.device)) for name, entry in self.entries().items()}
        self.hold(entries, [counts[row] for row in rows.tolist()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times, as for several questions about one text; the cache is packed then."""
        self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorder the rows, for beam search."""
        self.batch_select_indices(beam_idx)

    def __iter__(self) -> Iterator[tuple[torch.Tensor | None, torch.Tensor | None, None]]:
        """Yield views of keys and values of each layer, and no window, as in a `DynamicCache` without windows."""
        for layer in self.layers:
            yield *(layer.entries() if isinstance(layer, SpeculativeLayer) else (None, None)), None

    def __reduce__(self) -> Any:
        """Let copies and pickles hold the tokens alone, packed."""
        entries = {name: entry.clone() for name, entry in self.entries().items()}
        return type(self).holding, (self.config, entries, self.counts, self.tree_slots)

    def save(self, path: str | os.PathLike) -> None:
        """Write all that is held to a file of safetensors, with the lengths of the rows and a hash of the config.

        A file of this name is replaced once the new one is whole.
        """
        entries = {name: entry.contiguous() for name, entry in self.entries().items()}
        metadata = {"format": "pt", "config": fingerprint_of(self.config), "lengths": json.dumps(self.counts)}
        part = f"{os.fspath(path)}.part"
        save_file(entries, part, metadata)
        os.replace(part, path)

    @classmethod
    def load(cls, path: str | os.PathLike, config: PreTrainedConfig, device: Any = "cpu") -> "SpeculativeCache":
        """Read a cache that [`SpeculativeCache.save`] has written for a model of this config.

        Raises:
            ValueError: If the file was written for another config.
        """
        with safe_open(path, "pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            if "lengths" not in metadata:
                raise ValueError(f"{path} holds no cache. Pass a file that SpeculativeCache.save has written.")
            if metadata["config"] != (wanted := fingerprint_of(config)):
                raise ValueError(
                    f"{path} holds a cache of another config: its fingerprint is {metadata['config'][:12]}, and that "
                    f"of this config {wanted[:12]}. Load it with the config of its model, or read the text again."
                )
            entries = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        return cls.holding(config, entries, json.loads(metadata["lengths"]))

    def reset(self) -> None:
        """Remove all tokens, and keep the buffers."""
        self.rollback()
        for part in self.parts:
            part.reset()
        self.rows.padding = None
        self.set_lengths([0] * self.batch_size)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens of every row."""
        super().crop(tokens_to_remove)
        self.rows.lengths = SeqLens([max(0, length + tokens_to_remove) for length in self.lengths.host])

    @property
    def nbytes(self) -> int:
        """Bytes of the allocated buffers."""
        keys = sum(layer.keys.nbytes + layer.values.nbytes for layer in self.key_layers if layer.is_initialized)
        return keys + sum(part.nbytes for part in self.parts)


def slots_of(states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the entries of keys or values `(B, K, S, D)` in the slots `places` `(B, T)`, `(B, K, T, D)`."""
    index = places.to(states.device)[:, None, :, None]
    return states.gather(2, index.expand(-1, states.shape[1], -1, states.shape[3]))


def shifted(states: torch.Tensor, by: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Return the slots from `first + by[b]` to `last + by[b]` of row b of keys or values `(B, K, S, D)`.

    Slots that do not exist have any entry.
    """
    places = torch.arange(first, last, device=states.device) + by.to(states.device)[:, None]
    return slots_of(states, places.clamp(0, states.shape[2] - 1))
