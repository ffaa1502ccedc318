"""The texts of `--data`, and prompts out of them: windows, what a chat template adds, rows of several lengths."""

import json
import sysconfig
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch

from . import BUILTIN

# Modules of the standard library that recipes/train_tiny_target.py leaves out of its training text.
HELD_OUT = ("argparse", "statistics", "tarfile", "turtle", "typing", "zipfile", "decimal", "_pydecimal", "mailbox")
TEXT_SUFFIXES = {".txt", ".py", ".md", ".rst"}
# Documents that are read; a benchmark needs some dozens of prompts.
MAX_DOCUMENTS = 256
# Stands for the text of a user where a chat template is split.
MARK = "<<<text>>>"


def read_source(source: str, column: str | None = None) -> list[str]:
    """Read the documents of `--data`: texts under a key or column, by default `text`; of a list the first one.

    A source is a text file, a folder of them, JSON lines, a data set as `datasets` names it, with `:` and its
    configuration if there are several, or `builtin`: modules of this Python's standard library.
    """
    path = Path(source)
    if source == BUILTIN:
        library = Path(sysconfig.get_paths()["stdlib"])
        if not (modules := [file for name in HELD_OUT if (file := library / f"{name}.py").exists()]):
            raise ValueError("this Python has no sources of its library. Pass a text.")
        return _texts(modules)
    if path.is_dir() and (files := sorted(file for file in path.rglob("*") if file.suffix in TEXT_SUFFIXES)):
        return _texts(files)
    if path.is_file() and path.suffix not in (".jsonl", ".json"):
        return _texts([path])
    rows = islice(enumerate(read_rows(source), 1), MAX_DOCUMENTS)
    return [_text_of(row, column or "text", f"--data {source}, row {number}") for number, row in rows]


def prompts_of(source: str, column: str | None) -> Iterator[str | None]:
    """Yield the prompts; `None` for a row without one. The first row must have one, as it shows a wrong column."""
    for number, row in enumerate(read_rows(source)):
        try:
            yield _text_of(row, column or "prompt", f"--data {source}") or None
        except ValueError:
            if not number:
                raise
            yield None


def _text_of(row: Any, column: str, where: str) -> str:
    value = row.get(column) if isinstance(row, dict) else None
    text = value[0] if isinstance(value, list) and value else value
    if not isinstance(text, str):
        keys = ", ".join(row) if isinstance(row, dict) else f"none, it is a {type(row).__name__}"
        raise ValueError(
            f"{where}: {column} is not a text; the keys are {keys}. Pass the key of the texts as --column."
        )
    return text


def read_rows(source: str) -> Any:
    """The rows of JSON lines, or of a data set."""
    rows = iter(_json_lines(Path(source)) if Path(source).is_file() else _dataset(source))
    if (first := next(rows, None)) is None:
        raise ValueError(f"--data {source} has no rows. Pass a source with texts.")
    return chain([first], rows)


def _texts(paths: Sequence[Path]) -> list[str]:
    return [path.read_text(encoding="utf-8", errors="ignore") for path in paths]


def _json_lines(path: Path) -> list[Any]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"--data {path} is not UTF-8 text. Convert it, or unpack it first.") from error
    rows = []
    # not splitlines(): JSON strings may hold U+2028 and other separators as they are
    for number, line in enumerate(lines, 1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except json.JSONDecodeError as error:
            raise ValueError(
                f"--data {path}, line {number}: not JSON ({error.msg}). Pass one object per line."
            ) from error
    return rows


def _dataset(source: str) -> Any:
    """The rows of the test split, or of the first, which are downloaded as they are read."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(f"--data {source} needs datasets, which is not installed: pip install datasets.") from error
    name, _, configuration = source.partition(":")
    try:
        splits = load_dataset(name, configuration or None, streaming=True)
    except Exception as error:  # of files, of the network, of the Hub
        what = " ".join(str(error).split()).rstrip(".")
        raise ValueError(f"--data {source}: neither a file nor a dataset ({what}). Pass one, or {BUILTIN}.") from error
    return splits.get("test") or next(iter(splits.values()))


def as_message(tokenizer: Any, text: str) -> str:
    """Return the text as the message of a user, as the chat template of a tokenizer writes it."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("--chat: the tokenizer of the target has no chat template. Drop --chat.")
    message = [{"role": "user", "content": text}]
    return str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))


def around_a_message(tokenizer: Any) -> tuple[str, str]:
    """Return what a chat template writes before and after the message of a user."""
    before, mark, after = as_message(tokenizer, MARK).partition(MARK)
    if not mark:
        raise ValueError(f"--chat: the chat template does not write {MARK!r} as it is. Drop --chat.")
    return before, after


def encode(tokenizer: Any, text: str) -> torch.Tensor:
    """Token ids `(length,)`, without special tokens."""
    # verbose=False: texts longer than the model are meant to be cut
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] if text else []
    return torch.tensor(ids, dtype=torch.long)


def window_starts(lengths: Sequence[int], window: int, count: int) -> list[tuple[int, int]]:
    """Choose `count` windows of `window` tokens: `(document, offset)`, interleaved over the documents.

    Long documents give more windows than short ones, and those of one document are spread evenly over it, so they
    overlap only where the text is too short for disjoint ones.

    >>> window_starts([100, 30, 9], window=10, count=4)
    [(0, 0), (1, 10), (0, 45), (0, 90)]
    """
    shares = {document: 0 for document, length in enumerate(lengths) if length >= window}
    if not shares:
        raise ValueError(
            f"no text has {window} tokens, the longest has {max(lengths, default=0)}. Pass a longer text, or a shorter "
            "--context."
        )
    for _ in range(count):
        # the document whose windows would lie furthest apart
        shares[max(shares, key=lambda document: lengths[document] / (shares[document] + 1))] += 1
    starts = {document: _spread(lengths[document] - window, share) for document, share in shares.items() if share}
    rounds = range(max(shares.values()))
    return [(d, offsets[turn]) for turn in rounds for d, offsets in starts.items() if turn < len(offsets)]


def _spread(room: int, count: int) -> list[int]:
    return [room // 2] if count == 1 else [round(index * room / (count - 1)) for index in range(count)]


def cut_windows(documents: Sequence[torch.Tensor], window: int, count: int) -> torch.Tensor:
    """`(count, window)` token ids, see [`window_starts`]."""
    starts = window_starts([len(document) for document in documents], window, count)
    return torch.stack([documents[index][offset : offset + window] for index, offset in starts])
