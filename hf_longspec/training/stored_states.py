"""States of the target on the training rows, in files that later steps and runs read instead of running it."""

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
# States that a store may hold, and the dimension of a row's tensor that counts its tokens.
STATES = {"position_ids": 0, "keys": 1, "values": 1, "hidden": 0}

Row = dict[str, torch.Tensor]


class KVStore(Dataset):
    """Training rows with the target's states, in one safetensors file per row.

    The file of a row holds `input_ids` and `labels` of shape `(L,)` and the states that its training method reads:
    `hidden` `(L, hidden)`, or `keys` and `values` `(K, L, D)` with the `position_ids` `(L,)` that the keys are rotated
    by.

    For an 8B target in bfloat16, a token takes 8 to 12 KB. A store pays for rows that are trained on several times. A
    folder is only used with equal `facts`, which are everything that the states depend on.
    """

    def __init__(self, folder: str | os.PathLike, num_rows: int, facts: dict[str, Any]):
        self.folder = Path(folder)
        self.num_rows = num_rows
        self.facts = json.loads(json.dumps({"num_rows": num_rows, **facts}))
        file = self.folder / FACTS_FILE
        if file.is_file():
            old = json.loads(file.read_text(encoding="utf-8"))
            for name, value in self.facts.items():
                if old.get(name) != value:
                    raise ValueError(
                        f"target_kv_dir={str(folder)!r} was written with {name}={old.get(name)!r}, but this run has "
                        f"{value!r}: use another folder, or delete this one."
                    )

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < self.num_rows:
            raise IndexError(f"row {index} of {self.num_rows}")
        return load_file(self._file(index))

    def fill(self, row: Callable[[int], Row], share: tuple[int, int], silent: bool = False) -> None:
        """Write the files that are missing, of the tensors that `row` returns for a number.

        `share` is the index of this process, and the number of processes, each of which writes every n-th row.
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
