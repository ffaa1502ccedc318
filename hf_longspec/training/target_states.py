"""States of the frozen target on the training rows: computed by a forward, or read from files."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from tqdm.auto import tqdm
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from ..generation.cache import SpeculativeCache
from ..generation.target_modules import LayerInputs, TargetParts

FACTS_FILE = "store.json"
# States that a store may hold, and the dimension of a row's tensor that counts its tokens.
STATES = {"position_ids": 0, "keys": 1, "values": 1, "hidden": 0}

Row = dict[str, torch.Tensor]


@dataclass
class TargetStates:
    """Keys, values and hidden states of a target on whole rows.

    Args:
        keys (`torch.Tensor` of shape `(B, K, L, D)`): Keys of the KV layer, as in the target's cache.
        values (`torch.Tensor` of shape `(B, K, L, D)`): Values of the KV layer.
        hidden (`torch.Tensor` of shape `(B, L, hidden)`, *optional*): Input of the target's language-model head.
    """

    keys: torch.Tensor
    values: torch.Tensor
    hidden: torch.Tensor | None


class TargetPass:
    """Runs the frozen target over whole rows, without its head, and keeps the keys and values of one layer.

    Args:
        parts ([`TargetParts`]): The target, and the layer to keep.
        chunk_size (`int`, *optional*): Tokens per forward; by default a whole row. Between chunks the cache of every
            layer is in memory, after the last chunk only that of the KV layer.
        hidden (`bool`, *optional*, defaults to `False`): Whether to return the final hidden states.
    """

    def __init__(self, parts: TargetParts, chunk_size: int | None = None, hidden: bool = False):
        self.parts = parts
        self.chunk_size = chunk_size
        self.hidden = hidden

    @torch.no_grad()
    def __call__(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> TargetStates:
        """Return the states for `input_ids` at `position_ids`, both `(B, L)`. Padding must be on the right."""
        length, decoder = input_ids.shape[1], self.parts.decoder
        if self.chunk_size is None or self.chunk_size >= length:
            cache = OneLayerCache(self.parts.config.num_hidden_layers, self.parts.kv_layer)
            (output,) = forwards(decoder, input_ids, position_ids, cache, length)
            return TargetStates(cache.keys, cache.values, output.last_hidden_state if self.hidden else None)
        stored = SpeculativeCache(self.parts.config, len(input_ids), length, tree_slots=1)
        outputs = forwards(decoder, input_ids, position_ids, stored, self.chunk_size)
        hidden = [output.last_hidden_state for output in outputs]
        layer = stored.layers[self.parts.kv_layer]
        keys, values = layer.keys[:, :, :length], layer.values[:, :, :length]
        return TargetStates(keys, values, torch.cat(hidden, 1) if self.hidden else None)


class HiddenPass:
    """Runs the frozen target over whole rows, without its head, and keeps the input of its final norm, or of layers.

    Args:
        target (`PreTrainedModel`): The target.
        chunk_size (`int`, *optional*): Tokens per forward; by default a whole row. Between chunks the cache of every
            layer is in memory; without chunks no cache is used.
        wanted (`bool` or `tuple[int, ...]`, *optional*, defaults to `True`): Layers whose inputs are kept, one after
            another, in place of the final norm's.
    """

    def __init__(self, target: PreTrainedModel, chunk_size: int | None = None, wanted: bool | tuple[int, ...] = True):
        self.target = target
        self.wanted = wanted
        self.config = target.config.get_text_config(decoder=True)
        self.chunk_size = chunk_size

    @torch.no_grad()
    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return `(B, L, hidden)` for `input_ids` `(B, L)` at positions 0, 1, 2, ... Padding must be on the right."""
        length, decoder = input_ids.shape[1], self.target.get_decoder()
        with LayerInputs(self.target, self.wanted) as caught:
            if self.chunk_size is None or self.chunk_size >= length:
                decoder(input_ids=input_ids, use_cache=False)
                return caught.hidden
            cache = SpeculativeCache(self.config, len(input_ids), length, tree_slots=1)
            positions = torch.arange(length, device=input_ids.device).expand_as(input_ids)
            chunks = forwards(decoder, input_ids, positions, cache, self.chunk_size)
            return torch.cat([caught.hidden for _ in chunks], 1)


def forwards(
    decoder: Any, input_ids: torch.Tensor, position_ids: torch.Tensor, cache: Cache, chunk_size: int
) -> Iterator[Any]:
    """Run a decoder over rows in chunks of `chunk_size` tokens, and yield the output of every chunk.

    A cache is always passed. Without one, transformers takes a jump of the positions for the beginning of another text
    and masks everything before it.
    """
    chunks = zip(input_ids.split(chunk_size, 1), position_ids.split(chunk_size, 1), strict=True)
    for tokens, positions in chunks:
        yield decoder(input_ids=tokens, position_ids=positions, past_key_values=cache, use_cache=True)


class OneLayerCache(Cache):
    """A cache for a single forward that keeps the keys and values of one layer.

    Args:
        num_layers (`int`): Number of layers of the model.
        kv_layer (`int`): The layer to keep.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, num_layers: int, kv_layer: int):
        super().__init__(layers=[DynamicLayer() for _ in range(num_layers)])
        self.kv_layer = kv_layer

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of this forward: there are no earlier ones."""
        if layer_idx == self.kv_layer:
            self.keys, self.values = key_states, value_states
        return key_states, value_states


class KVStore(Dataset):
    """Training rows with the target's states, in one safetensors file per row.

    The file of a row holds `input_ids` and `labels` of shape `(L,)` and the states that its training method reads:
    `hidden` `(L, hidden)`, or `keys` and `values` `(K, L, D)` with the `position_ids` `(L,)` that the keys are rotated
    by.

    For an 8B target in bfloat16, a token takes 8 to 12 KB. A store pays for rows that are trained on several times.

    Args:
        folder (`str` or `os.PathLike`): Folder of the files; [`~KVStore.fill`] creates it.
        num_rows (`int`): Number of rows of the dataset.
        facts (`dict[str, Any]`): Everything that the states depend on. A folder is only used with equal facts.

    Raises:
        ValueError: If the folder was written with other facts.
    """

    def __init__(self, folder: str | os.PathLike, num_rows: int, facts: dict[str, Any]):
        self.folder = Path(folder)
        self.num_rows = num_rows
        self.facts = json.loads(json.dumps({"num_rows": num_rows, **facts}))
        file = self.folder / FACTS_FILE
        if file.is_file():
            found = json.loads(file.read_text(encoding="utf-8"))
            for name, value in self.facts.items():
                if found.get(name) != value:
                    raise ValueError(
                        f"target_kv_dir={str(folder)!r} was written with {name}={found.get(name)!r}, and this run has "
                        f"{value!r}: name another folder, or delete this one."
                    )

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < self.num_rows:
            raise IndexError(f"row {index} of {self.num_rows}")
        return load_file(self._file(index))

    def fill(self, row: Callable[[int], Row], share: tuple[int, int], silent: bool = False) -> None:
        """Write the files that are missing.

        Args:
            row (`Callable`): Returns the tensors of a row, given its number.
            share (`tuple[int, int]`): Index of this process, and the number of processes. Each process writes every
                n-th row.
            silent (`bool`, *optional*, defaults to `False`): Whether to hide the progress bar.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        if share[0] == 0:
            (self.folder / FACTS_FILE).write_text(json.dumps(self.facts, indent=1), encoding="utf-8")
        mine = range(share[0], self.num_rows, share[1])
        missing = [number for number in mine if not self._file(number).is_file()]
        for number in tqdm(missing, desc="states of the target", disable=silent):
            self._write(number, row(number))

    def _write(self, number: int, row: Row) -> None:
        partial = self._file(number).with_suffix(".partial")
        # cloned: safetensors refuses tensors that share memory, as tokens and labels may
        save_file({name: tensor.cpu().clone().contiguous() for name, tensor in row.items()}, partial)
        partial.replace(self._file(number))  # an interrupted write leaves no file of this name

    def _file(self, number: int) -> Path:
        return self.folder / f"row-{number:08d}.safetensors"


def padded_states(rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad and stack the stored states of some rows. The result is empty if the rows have none."""
    batch = {}
    for name, dimension in STATES.items():
        if name in rows[0]:
            by_token = pad_sequence([row[name].movedim(dimension, 0) for row in rows], batch_first=True)
            batch[name] = by_token.movedim(1, 1 + dimension)
    return batch


def digest(tokens: torch.Tensor) -> str:
    """Hash tokens. The hash of its first row identifies a dataset."""
    return hashlib.blake2b(tokens.numpy().tobytes(), digest_size=8).hexdigest()
