"""Training rows in bytes: text, passages that return, and tasks whose answer stands far back in the row.

A byte is its own token id. `Rows` draws from streams of text, one stream per novel or per Python package, so that a row
of any length is one continuous piece of one work.
"""

import random
import string
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedModel

# Pieces of a passage that returns, in bytes. Shorter ones can be guessed, longer ones teach nothing new.
PASSAGE = 24, 160


@dataclass
class Rows:
    """Draw rows of bytes from weighted groups of streams.

    Args:
        groups (`dict[str, list[np.ndarray]]`): Streams of bytes by group, for instance novels and packages.
        shares (`dict[str, float]`): Share of every group among rows of text.
        seed (`int`): Seed of everything that is drawn.
    """

    groups: dict[str, list[np.ndarray]]
    shares: dict[str, float]
    seed: int
    _rng: np.random.Generator = field(init=False)
    _choose: random.Random = field(init=False)

    def __post_init__(self):
        self._rng, self._choose = np.random.default_rng(self.seed), random.Random(self.seed)

    def batch(self, rows: int, length: int, repeats: float, tasks: float, noise: float) -> np.ndarray:
        """Return rows of bytes, `(rows, length)`.

        Args:
            repeats (`float`): Share of rows that contain passages twice or more often.
            tasks (`float`): Share of rows that contain tasks.
            noise (`float`): Share of rows with repeats that are made of random bytes instead of text.
        """
        made = []
        for draw in self._rng.random(rows):
            if draw < repeats:
                filler = self._noise(length) if self._rng.random() < noise else self.text(length)
                made.append(self._tiled(filler) if self._rng.random() < 0.5 else self._quoted(filler))
            elif draw < repeats + tasks:
                made.append(self._with_tasks(self.text(length)))
            else:
                made.append(self.text(length))
        return np.stack(made)

    def positions(self, rows: int, length: int, limit: int, jumps: float) -> np.ndarray:
        """Return positions `(rows, length)`: 0, 1, 2, ..., and in a share of the rows a jump at a random place.

        Args:
            limit (`int`): Number of positions; the last byte of a row with a jump stands below it.
            jumps (`float`): Share of rows with a jump.
        """
        positions = np.tile(np.arange(length), (rows, 1))
        for row in np.flatnonzero(self._rng.random(rows) < jumps):
            positions[row, self._choose.randrange(length // 4, length) :] += self._choose.randrange(limit - length + 1)
        return positions

    def text(self, length: int) -> np.ndarray:
        """Return one piece of `length` bytes of one stream that is long enough."""
        names = list(self.shares)
        streams = self.groups[self._choose.choices(names, [self.shares[name] for name in names])[0]]
        long_enough = [stream for stream in streams if len(stream) >= length]
        stream = self._choose.choices(long_enough, [len(stream) for stream in long_enough])[0]
        start = self._choose.randrange(len(stream) - length + 1)
        return np.array(stream[start : start + length])

    def _noise(self, length: int) -> np.ndarray:
        alphabet = self._rng.permutation(256)[: int(self._rng.integers(16, 257))]
        return alphabet[self._rng.integers(0, len(alphabet), length)].astype(np.uint8)

    def _tiled(self, row: np.ndarray) -> np.ndarray:
        """Repeat a short segment of the row throughout."""
        period = int(self._rng.integers(8, max(9, min(len(row) // 2, 2048))))
        return np.resize(row[:period], len(row))

    def _quoted(self, row: np.ndarray) -> np.ndarray:
        """Copy passages to later places of the row, one in about every 400 bytes."""
        for _ in range(max(1, len(row) // 400)):
            size = int(self._rng.integers(min(PASSAGE[0], len(row) // 5), min(PASSAGE[1], len(row) // 3) + 1))
            start, target = sorted(int(place) for place in self._rng.integers(0, len(row) - size, 2))
            row[target : target + size] = row[start : start + size].copy()
        return row

    def _with_tasks(self, row: np.ndarray) -> np.ndarray:
        """Put the material of one kind of task into the row, and the questions with their answers at its end."""
        make: Callable[[np.ndarray], tuple[list[bytes], list[bytes]]]
        make = self._choose.choice((self._values, self._quotations, self._definitions, self._table))
        material, questions = make(row)
        tail = b"".join(questions)[-len(row) // 3 :]
        body = len(row) - len(tail)
        for piece in material:
            if len(piece) < body:
                place = self._choose.randrange(body - len(piece))
                row[place : place + len(piece)] = np.frombuffer(piece, np.uint8)
        row[body:] = np.frombuffer(tail, np.uint8)
        return row

    def _count(self, row: np.ndarray) -> int:
        return min(24, max(1, len(row) // 500))

    def _word(self, size: int) -> str:
        return "".join(self._choose.choices(string.ascii_lowercase, k=size))

    def _values(self, row: np.ndarray) -> tuple[list[bytes], list[bytes]]:
        """Return material and questions of key-value recall."""
        pairs = [(self._word(6), self._word(10)) for _ in range(self._count(row))]
        material = [f"\n{key} = {value}\n".encode() for key, value in pairs]
        self._choose.shuffle(pairs)
        return material, [f"\nvalue of {key}: {key} = {value}\n".encode() for key, value in pairs]

    def _quotations(self, row: np.ndarray) -> tuple[list[bytes], list[bytes]]:
        """Quote the passage that begins with given words; the passages are already in the row."""
        questions = []
        for _ in range(self._count(row)):
            size = self._choose.randint(60, 200)
            if len(row) // 2 <= size:
                break
            start = self._choose.randrange(len(row) // 2 - size)
            questions.append(b"\nquote: " + row[start : start + size].tobytes() + b"\n")
        return [], questions

    def _definitions(self, row: np.ndarray) -> tuple[list[bytes], list[bytes]]:
        """Repeat function definitions."""
        material = []
        for _ in range(self._count(row)):
            names = [self._word(self._choose.randint(3, 8)) for _ in range(4)]
            material.append("\ndef {0}({1}, {2}):\n    {3} = {1} + {2}\n    return {3}\n".format(*names).encode())
        questions = list(material)
        self._choose.shuffle(questions)
        return material, [b"\n# as above" + text for text in questions]

    def _table(self, row: np.ndarray) -> tuple[list[bytes], list[bytes]]:
        """Continue a table: rows with the columns of earlier rows, in another order."""
        lines = [
            f"| {self._word(5)} | {self._choose.randrange(10_000)} | {self._word(4)} |\n".encode()
            for _ in range(self._count(row))
        ]
        again = list(lines)
        self._choose.shuffle(again)
        return [b"\n" + b"".join(lines)], again


def quoted_row(text: Callable[[int], np.ndarray], distance: int, size: int, cue: int) -> tuple[np.ndarray, slice]:
    """Return a row whose end repeats a passage that began `distance` bytes earlier, and where the passage returns.

    Args:
        text (`Callable`): Gives a number of bytes of text; the passage and what surrounds it.
        distance (`int`): Bytes from the passage to its copy.
        size (`int`): Bytes of the passage.
        cue (`int`): First bytes of the copy that are given, not asked for.

    Returns:
        The row, and the slice of it that has to be recalled.
    """
    margin = min(64, distance // 4)  # bytes before the passage
    row = text(margin + distance + size)
    row[-size:] = row[margin : margin + size]
    return row, slice(len(row) - size + cue, len(row))


@torch.no_grad()
def recalled(
    model: PreTrainedModel, text: Callable[[int], np.ndarray], distance: int, count: int, size: int, cue: int
) -> tuple[float, float]:
    """Return nats per byte, and the share of bytes named right, of passages that return after `distance` bytes.

    Args:
        model (`PreTrainedModel`): A model whose tokens are bytes.
        text (`Callable`), distance (`int`), size (`int`), cue (`int`): As of [`quoted_row`].
        count (`int`): Number of passages.
    """
    nats, right = [], []
    for _ in range(count):
        row, asked = quoted_row(text, distance, size, cue)
        ids = torch.from_numpy(row.astype(np.int64))[None]
        logits = model(ids, use_cache=False, logits_to_keep=size - cue + 1).logits[0, :-1].float()
        wanted = ids[0, asked]
        nats.append(torch.nn.functional.cross_entropy(logits, wanted).item())
        right.append((logits.argmax(-1) == wanted).float().mean().item())
    return sum(nats) / count, sum(right) / count
