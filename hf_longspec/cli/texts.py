"""The texts of `--data`: files, folders, JSON lines, datasets. Only the last need torch."""

import json
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

BUILTIN = "builtin"
# Modules of the standard library that recipes/train_tiny_target.py leaves out of its training text.
HELD_OUT = ("argparse", "statistics", "tarfile", "turtle", "typing", "zipfile", "decimal", "_pydecimal", "mailbox")
TEXT_SUFFIXES = {".txt", ".py", ".md", ".rst"}
# Documents that are read; a benchmark needs some dozens of prompts.
MAX_DOCUMENTS = 256
# Text of SPEED-Bench in place of prompts that its preparation has to fetch from other datasets.
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"


@dataclass(frozen=True)
class Document:
    """A text to continue."""

    name: str  # file or data set, and number
    text: str


def read_source(source: str, column: str | None = None) -> list[Document]:
    """Read the documents of `--data`: texts under a key or column, by default `text`; of a list the first one.

    A source is a text file, a folder of them, JSON lines, a data set as `datasets` names it, with `:` and its
    configuration if there are several, or `builtin`: modules of this Python's standard library.
    """
    path = Path(source)
    if source == BUILTIN:
        library = Path(sysconfig.get_paths()["stdlib"])
        return _texts([file for name in HELD_OUT if (file := library / f"{name}.py").exists()])
    if path.is_dir() and (files := sorted(file for file in path.rglob("*") if file.suffix in TEXT_SUFFIXES)):
        return _texts(files)
    if path.is_file() and path.suffix not in (".jsonl", ".json"):
        return _texts([path])
    documents = []
    for number, row in islice(enumerate(read_rows(source), 1), MAX_DOCUMENTS):
        value = row.get(column or "text") if isinstance(row, dict) else None
        text = value[0] if isinstance(value, list) and value else value
        if not isinstance(text, str):
            keys = ", ".join(row) if isinstance(row, dict) else f"none, it is a {type(row).__name__}"
            raise ValueError(
                f"--data {source}, row {number}: {column or 'text'} is not a text; the keys are {keys}. Pass the "
                "key of the texts as --column."
            )
        if PLACEHOLDER in text:
            raise ValueError(
                f"--data {source}, row {number}: the text is a placeholder of SPEED-Bench. Write the texts with its "
                "prepare_data script, and pass that file."
            )
        documents.append(Document(f"{path.name}:{number}", text))
    if not documents:
        raise ValueError(f"--data {source} has no rows. Pass a source with documents.")
    return documents


def prompts_of(source: str, column: str | None) -> Iterator[str | None]:
    """Yield the prompts; `None` for a row without one. The first row must have one, as it shows a wrong column."""
    name = column or "prompt"
    for number, row in enumerate(read_rows(source)):
        text = row.get(name) if isinstance(row, dict) else None
        if not number and not isinstance(text, str):
            keys = ", ".join(row) if isinstance(row, dict) else f"none, it is a {type(row).__name__}"
            raise ValueError(f"--data {source}: {name} is not a text; the keys are {keys}. Pass --column.")
        yield text if isinstance(text, str) and text else None


def read_rows(source: str) -> Any:
    """The rows of JSON lines, or of a data set."""
    return _json_lines(Path(source)) if Path(source).is_file() else _dataset(source)


def _texts(paths: Sequence[Path]) -> list[Document]:
    return [Document(path.name, path.read_text(encoding="utf-8", errors="ignore")) for path in paths]


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
