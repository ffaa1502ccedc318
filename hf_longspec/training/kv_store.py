"""What the target computes on the training rows, written once and read instead of running it."""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from tqdm.auto import tqdm

FACTS_FILE = "store.json"
# Which dimension of a row's tensor counts its tokens.
STATES = {"position_ids": 0, "keys": 1, "values": 1, "hidden": 0}

Row = dict[str, torch.Tensor]


class KVStore(Dataset):
    """Rows with the target's states, one safetensors file each.

    A row's file has `input_ids` and `labels` of shape `(L,)`, and what its training method reads of the target:
    `hidden` `(L, hidden)`, or `keys` and `values` `(K, L, D)` with the `position_ids` `(L,)` that the keys carry the
    rotation of.

    For an 8B target in bfloat16 a token takes 8 to 12 KB: a store pays for rows that are trained on several times.

    Args:
        folder (`str` or `os.PathLike`): Where the files are, or will be.
        num_rows (`int`): Rows of the dataset.
        facts (`dict[str, Any]`): What the states depend on. A folder is used only for the same facts.

    Raises:
        ValueError: If the folder was written for other facts.
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

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self.num_rows:
            raise IndexError(f"row {index} of {self.num_rows}")
        return load_file(self._file(index))

    def fill(self, row: Callable[[int], Row], share: tuple[int, int], silent: bool = False) -> None:
        """Write the rows that are missing.

        Args:
            row (`Callable`): From the number of a row to its tensors.
            share (`tuple[int, int]`): Number of this process and how many there are: the rows are dealt out in turn.
            silent (`bool`, *optional*, defaults to `False`): Show no progress bar.
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
        # clones: safetensors refuses tensors that share memory, as tokens and labels may
        save_file({name: tensor.cpu().clone().contiguous() for name, tensor in row.items()}, partial)
        partial.replace(self._file(number))  # a file is there whole or not at all

    def _file(self, number: int) -> Path:
        return self.folder / f"row-{number:08d}.safetensors"


def padded_states(rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Stored states of some rows as a batch; empty if the rows have none."""
    batch = {}
    for name, dimension in STATES.items():
        if name in rows[0]:
            by_token = pad_sequence([row[name].movedim(dimension, 0) for row in rows], batch_first=True)
            batch[name] = by_token.movedim(1, 1 + dimension)
    return batch


def digest(tokens: torch.Tensor) -> str:
    """A short name of tokens, to recognize a dataset by its first row."""
    return hashlib.blake2b(tokens.numpy().tobytes(), digest_size=8).hexdigest()
