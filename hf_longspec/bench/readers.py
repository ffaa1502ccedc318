"""Documents for prompts, from the files in which the papers' data sets are published.

A layout is known by its keys. What is asked about a document is kept apart as its tail, so that a prompt that is cut to
a length still ends with the question.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .prompts import STDLIB, SUFFIXES
from .prompts import read_documents as read_texts

BUILTIN = "builtin"
JSON_SUFFIXES = {".jsonl", ".json"}


@dataclass(frozen=True)
class Document:
    """A text to continue.

    Args:
        name (`str`): File and line, without folders.
        body (`str`): May be cut.
        tail (`str`): Comes behind whatever is left of the body.
    """

    name: str
    body: str
    tail: str = ""


@dataclass(frozen=True)
class Layout:
    """One way to write a data set as JSON objects.

    Args:
        name (`str`): Data sets that are written so.
        keys (`Mapping[str, type]`): Keys that every object has, with the type of their values.
        split (`Callable`): Body and tail of an object.
    """

    name: str
    keys: Mapping[str, type]
    split: Callable[[Mapping[str, Any]], tuple[str, str]]

    def fits(self, record: Any) -> bool:
        """Whether an object has the keys."""
        return isinstance(record, dict) and all(isinstance(record.get(key), kind) for key, kind in self.keys.items())

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.keys)})"


def _multiple_choice(record: Mapping[str, Any]) -> tuple[str, str]:
    choices = [f"({letter}) {record[key]}" for letter in "ABCD" if (key := f"choice_{letter}") in record]
    return record["context"], "\n".join(["", "", record["question"], *choices, "Answer:"])


def _repository(record: Mapping[str, Any]) -> tuple[str, str]:
    files = [f"# {part.get('path', '')}\n{part.get('snippet', '')}" for part in record["context"]]
    return "\n\n".join(files), f"\n\n{record['import_statement']}\n\n{record['code']}\n"


def _meeting(record: Mapping[str, Any]) -> tuple[str, str]:
    turns = [f"{turn.get('speaker', '')}: {turn.get('content', '')}" for turn in record["meeting_transcripts"]]
    queries = [*record.get("general_query_list", ()), *record.get("specific_query_list", ())]
    return "\n".join(turns), f"\n\n{queries[0]['query']}\n" if queries else ""


def _contest(record: Mapping[str, Any]) -> tuple[str, str]:
    parts = [record["description"]]
    for title in ("input", "output", "interaction", "note"):  # the data set's card: these may be empty
        if record.get(title):
            parts.append(f"{title.capitalize()}\n{record[title]}")
    return "\n\n".join(parts), ""


# The first that fits is taken, so those with more keys come first.
LAYOUTS = (
    Layout("LongBench-v2", {"context": str, "question": str, "choice_A": str}, _multiple_choice),
    Layout("LongBench, also its RepoBench-P and LCC", {"context": str, "input": str}, lambda r: _joined(r, "input")),
    Layout("RepoBench-P", {"context": list, "import_statement": str, "code": str}, _repository),
    Layout("LCC", {"context": str, "gt": str}, lambda record: (record["context"], "")),
    Layout("QMSum", {"meeting_transcripts": list}, _meeting),
    Layout("Spec-Bench", {"turns": list}, lambda record: (record["turns"][0], "")),
    Layout("AIME", {"problem": str, "answer": object}, lambda record: (record["problem"], "")),
    Layout("CodeElo", {"description": str, "input": str, "output": str}, _contest),
    Layout("texts, such as PG-19", {"text": str}, lambda record: (record["text"], "")),
)


def _joined(record: Mapping[str, Any], key: str) -> tuple[str, str]:
    return record["context"], f"\n\n{record[key]}\n" if record[key] else ""


def read_source(source: str) -> tuple[list[Document], str]:
    """The documents of `--data` and the name of their layout.

    Args:
        source (`str`): A text file, a JSON file or JSON lines in a known layout, a folder of either, or `builtin`:
            modules of this Python's standard library.

    Raises:
        ValueError: If there is no such file, nothing in it, or no layout that fits, with the layouts and the keys.
    """
    if source == BUILTIN:
        return _texts(STDLIB), "modules of the standard library"
    path = Path(source)
    if path.is_dir():
        return _folder(path)
    if not path.is_file():
        raise ValueError(f"--data {source}: there is no such file or folder. Pass one, or {BUILTIN}.")
    if path.suffix in JSON_SUFFIXES:
        return _json_file(path)
    return [Document(path.name, path.read_text(encoding="utf-8", errors="ignore"))], "one text"


def _folder(folder: Path) -> tuple[list[Document], str]:
    """Its texts; its JSON files if it has none."""
    if any(path.suffix in SUFFIXES for path in folder.rglob("*")):
        return _texts(str(folder)), "folder of texts"
    parts = [_json_file(path) for path in sorted(folder.rglob("*")) if path.suffix in JSON_SUFFIXES]
    if not parts:
        known = ", ".join(sorted(SUFFIXES | JSON_SUFFIXES))
        raise ValueError(f"--data {folder}: no file there ends with one of {known}. Pass a folder that has some.")
    return [document for documents, _ in parts for document in documents], " and ".join(
        dict.fromkeys(name for _, name in parts)
    )


def _texts(source: str) -> list[Document]:
    return [Document(name, text) for name, text in read_texts(source).items()]


def _json_file(path: Path) -> tuple[list[Document], str]:
    records = _records(path)
    if not records:
        raise ValueError(f"--data {path}: the file is empty. Pass one with documents.")
    layout = next((layout for layout in LAYOUTS if layout.fits(records[0][1])), None)
    documents = []
    for line, record in records:
        if layout is None or not layout.fits(record):
            expected = "; ".join(map(str, LAYOUTS)) if layout is None else str(layout)
            keys = ", ".join(record) if isinstance(record, dict) else f"none, it is a {type(record).__name__}"
            raise ValueError(f"--data {path}, line {line}: its keys are {keys}; expected {expected}. Convert the file.")
        try:
            documents.append(Document(f"{path.name}:{line}", *layout.split(record)))
        except (LookupError, AttributeError, TypeError) as error:
            raise ValueError(
                f"--data {path}, line {line}: its keys are those of {layout}, and what they hold is not. Correct the "
                "line, or leave it out."
            ) from error
    assert layout is not None
    return documents, layout.name


def _records(path: Path) -> list[tuple[int, Any]]:
    """Every object with its line, or its place in an array."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--data {path} is not UTF-8 text. Convert it, or unpack it first.") from error
    if path.suffix == ".json":
        try:
            content = json.loads(text)
        except json.JSONDecodeError:
            pass  # some data sets call their JSON lines .json
        else:
            return list(enumerate(content if isinstance(content, list) else [content], 1))
    records = []
    # not splitlines(): JSON strings may hold U+2028 and other separators as they are
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                records.append((number, json.loads(line)))
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"--data {path}, line {number}: no JSON object ({error.msg}). Pass one object per line."
                ) from error
    return records
