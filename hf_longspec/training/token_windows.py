"""TokenWindows: rows cut from a stream of tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset


class TokenWindows(Dataset):
    """Rows of equal length cut one after the other from documents that were tokenized and joined before.

    Args:
        tokens (`Sequence[int]`):
            Documents with the end-of-text token behind each. A tensor or a `numpy.ndarray`, also a
            memory-mapped one, is read row by row.
        length (`int`): Tokens of a row. What remains at the end is left out.

    Raises:
        ValueError: If there are fewer tokens than one row has.

    >>> TokenWindows([5, 6, 7, 8, 9], 2)[1]["input_ids"].tolist()
    [7, 8]
    """

    def __init__(self, tokens: Sequence[int] | Any, length: int):
        if length < 2:
            raise ValueError(f"length={length}: a row needs 2 tokens, one to see and one to predict.")
        if len(tokens) < length:
            raise ValueError(f"the stream has {len(tokens)} tokens, fewer than one row of length={length}.")
        self.tokens = tokens
        self.length = length

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        row = self.tokens[index * self.length : (index + 1) * self.length]
        if not isinstance(row, torch.Tensor):
            row = torch.from_numpy(np.array(row, dtype=np.int64))
        return {"input_ids": row.long()}
