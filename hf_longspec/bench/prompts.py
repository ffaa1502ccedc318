"""Held-out text as prompts: windows at different offsets, spread over all documents."""

import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

STDLIB = "stdlib"
# Modules of the standard library that examples/train_tiny_target.py leaves out of its training text.
HELD_OUT = ("argparse", "statistics", "tarfile", "turtle", "typing", "zipfile", "decimal", "_pydecimal", "mailbox")
SUFFIXES = {".txt", ".py", ".md", ".rst"}


def read_documents(source: str) -> dict[str, str]:
    """Texts by file name.

    Args:
        source (`str`): A folder of text files, or `stdlib`: the held-out modules of this Python's standard library.

    Raises:
        ValueError: If there are none.
    """
    if source == STDLIB:
        folder = Path(sysconfig.get_paths()["stdlib"])
        paths = [path for name in HELD_OUT if (path := folder / f"{name}.py").exists()]
    else:
        paths = sorted(path for path in Path(source).rglob("*") if path.suffix in SUFFIXES)
    if not paths:
        raise ValueError(f"no text files ({', '.join(sorted(SUFFIXES))}) in {source!r}. Name a folder that has some.")
    return {path.name: path.read_text(encoding="utf-8", errors="ignore") for path in paths}


def encode(tokenizer: Any, documents: dict[str, str]) -> list[torch.Tensor]:
    """Token ids of every document, `(length,)` each, without special tokens."""
    encoded = (tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in documents.values())
    return [torch.tensor(ids, dtype=torch.long) for ids in encoded]


def window_starts(lengths: Sequence[int], window: int, count: int) -> list[tuple[int, int]]:
    """Where to take `count` windows of `window` tokens: `(document, offset)`, interleaved over the documents.

    Long documents give more windows than short ones, and those of one document are spread evenly over it, so they
    overlap only where the text is too short for disjoint ones.

    Raises:
        ValueError: If no document is long enough.

    >>> window_starts([100, 30, 9], window=10, count=4)
    [(0, 0), (1, 10), (0, 45), (0, 90)]
    """
    shares = {document: 0 for document, length in enumerate(lengths) if length >= window}
    if not shares:
        raise ValueError(
            f"no document has {window} tokens, the longest has {max(lengths, default=0)}. Pass longer texts with "
            "--data, or shorter lengths."
        )
    for _ in range(count):
        # the document whose windows would lie furthest apart
        shares[max(shares, key=lambda document: lengths[document] / (shares[document] + 1))] += 1
    starts = {document: _spread(lengths[document] - window, share) for document, share in shares.items() if share}
    rounds = max(len(offsets) for offsets in starts.values())
    return [(d, offsets[turn]) for turn in range(rounds) for d, offsets in starts.items() if turn < len(offsets)]


def _spread(room: int, count: int) -> list[int]:
    if count == 1:
        return [room // 2]
    return [round(index * room / (count - 1)) for index in range(count)]


def cut_windows(documents: Sequence[torch.Tensor], window: int, count: int) -> torch.Tensor:
    """`(count, window)` token ids, see [`window_starts`]."""
    starts = window_starts([len(document) for document in documents], window, count)
    return torch.stack([documents[index][offset : offset + window] for index, offset in starts])


def num_disjoint(lengths: Sequence[int], window: int) -> int:
    """How many windows fit into the documents without overlapping."""
    return sum(length // window for length in lengths)


def load_prompts(
    tokenizer: Any, sources: Sequence[str], window: int, count: int
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Prompts `(count, window)` from every source in turn, and where they come from, for the result file.

    A source without a text of `window` tokens is left out.

    Raises:
        ValueError: If no source has one.
    """
    found, described = [], []
    for source in sources:
        documents = encode(tokenizer, read_documents(source))
        lengths = [len(document) for document in documents]
        room = num_disjoint(lengths, window)
        described.append({"source": Path(source).name, "tokens": sum(lengths), "disjoint_windows": room})
        if max(lengths) >= window:
            found.append(documents)
    if not found:
        raise ValueError(f"no text of {window} tokens in {list(sources)}. Pass longer texts with --data.")
    parts = [cut_windows(documents, window, -(-count // len(found))) for documents in found]
    turns = torch.stack(parts, dim=1).flatten(0, 1)[:count]
    return turns, {"sources": described, "prompts": count, "window": window}
