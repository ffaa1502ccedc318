"""Prompts out of documents: data sets in the files in which they are published, windows of a length, whole texts.

A layout is recognized by its keys. The question about a document is kept apart as its tail, so that a prompt that is
cut to a length still ends with the question.
"""

import json
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch

BUILTIN = "builtin"
# Modules of the standard library that examples/train_tiny_target.py leaves out of its training text.
HELD_OUT = ("argparse", "statistics", "tarfile", "turtle", "typing", "zipfile", "decimal", "_pydecimal", "mailbox")
TEXT_SUFFIXES = {".txt", ".py", ".md", ".rst"}
JSON_SUFFIXES = {".jsonl", ".json"}
RECORD_SUFFIXES = JSON_SUFFIXES | {".parquet", ".csv"}
# Documents that are tokenized; a benchmark needs some dozens of prompts.
MAX_DOCUMENTS = 256
# Share of a prompt that the tail of a document may take.
TAIL_SHARE = 0.25
# Text of SPEED-Bench in place of prompts that its preparation has to fetch from other data sets.
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
# Stands for the text of a user where a chat template is split.
MARK = "<<<text>>>"
# Stands for prompts of their own length among the numbers of `--context`.
OWN_LENGTH = 0


@dataclass(frozen=True)
class Document:
    """A text to continue."""

    name: str  # file and line, without folders
    body: str  # may be cut
    tail: str = ""  # follows what is left of the body
    category: str = ""  # category of the data set, or the name of the file


class Prompt(NamedTuple):
    """Token ids `(length,)`, and the category of their document."""

    ids: torch.Tensor
    category: str


@dataclass(frozen=True)
class Layout:
    """One way to write a data set as JSON objects."""

    name: str  # the data sets that use this layout
    keys: Mapping[str, Any]  # keys that every object has, with the type of their values or several
    split: Callable[[Mapping[str, Any]], tuple[str, str]]  # body and tail of an object

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


def _with_input(record: Mapping[str, Any]) -> tuple[str, str]:
    return record["context"], f"\n\n{record['input']}\n" if record["input"] else ""


def _turns(record: Mapping[str, Any]) -> tuple[str, str]:
    turns = record["turns"]
    return (turns if isinstance(turns, str) else turns[0]), ""


def _messages(record: Mapping[str, Any]) -> tuple[str, str]:
    """The first message of the user. A tail of images or tools has no text, and is refused by its type."""
    content = next(message["content"] for message in record["messages"] if message["role"] == "user")
    return content + "", ""


# The first that fits is taken, so those with more keys come first.
LAYOUTS = (
    Layout("LongBench-v2", {"context": str, "question": str, "choice_A": str}, _multiple_choice),
    Layout("LongBench, also its RepoBench-P and LCC", {"context": str, "input": str}, _with_input),
    Layout("RepoBench-P", {"context": list, "import_statement": str, "code": str}, _repository),
    Layout("LCC", {"context": str, "gt": str}, lambda record: (record["context"], "")),
    Layout("QMSum", {"meeting_transcripts": list}, _meeting),
    Layout("Spec-Bench and SPEED-Bench", {"turns": (list, str)}, _turns),
    Layout("conversations", {"messages": list}, _messages),
    Layout("AIME", {"problem": str, "answer": object}, lambda record: (record["problem"], "")),
    Layout("CodeElo", {"description": str, "input": str, "output": str}, _contest),
    Layout("texts, such as PG-19", {"text": str}, lambda record: (record["text"], "")),
)


def read_source(source: str, column: str | None = None) -> tuple[list[Document], str]:
    """Read the documents of `--data`.

    Args:
        source (`str`): A text file; a JSON file, JSON lines, a parquet or a CSV file in a known layout; a folder of
            either; or `builtin`: modules of this Python's standard library.
        column (`str`, *optional*): Take the texts of this key or column, whatever the layout.

    Returns:
        The documents, and the name of their layout.

    Raises:
        ValueError: If there is no such file, nothing in it, or no layout that fits, with the layouts and the keys.
    """
    if source == BUILTIN:
        library = Path(sysconfig.get_paths()["stdlib"])
        paths = [path for name in HELD_OUT if (path := library / f"{name}.py").exists()]
        return _texts(paths), "modules of the standard library"
    path = Path(source)
    if path.is_file():
        return _records_file(path, column) if path.suffix in RECORD_SUFFIXES else (_texts([path]), "one text")
    if not path.is_dir():
        raise ValueError(f"--data {source}: there is no such file or folder. Pass one, or {BUILTIN}.")
    files = sorted(path.rglob("*"))
    if texts := [file for file in files if file.suffix in TEXT_SUFFIXES]:
        return _texts(texts), "folder of texts"
    parts = [_records_file(file, column) for file in files if file.suffix in RECORD_SUFFIXES]
    if not parts:
        known = ", ".join(sorted(TEXT_SUFFIXES | RECORD_SUFFIXES))
        raise ValueError(f"--data {path}: no file there ends with one of {known}. Pass a folder that has some.")
    layouts = " and ".join(dict.fromkeys(name for _, name in parts))
    return [document for documents, _ in parts for document in documents], layouts


def read_sources(sources: Sequence[str], column: str | None = None) -> tuple[list[Document], str]:
    """Read several `--data`, in turns, as the first documents are used. Documents without a category get its name.

    Raises:
        ValueError: As in [`read_source`].
    """
    parts, layouts = [], []
    for source in sources:
        documents, layout = read_source(source, column)
        if len(sources) > 1:
            documents = [replace(document, category=document.category or Path(source).stem) for document in documents]
        parts.append(documents)
        layouts.append(layout)
    turns = [document for group in zip_longest(*parts) for document in group if document is not None]
    return turns, " and ".join(dict.fromkeys(layouts))


def _texts(paths: Sequence[Path]) -> list[Document]:
    return [Document(path.name, path.read_text(encoding="utf-8", errors="ignore")) for path in paths]


def _records_file(path: Path, column: str | None) -> tuple[list[Document], str]:
    records = _json(path) if path.suffix in JSON_SUFFIXES else _table(path)
    if not records:
        raise ValueError(f"--data {path}: the file is empty. Pass one with documents.")
    if column is None:
        layout = next((layout for layout in LAYOUTS if layout.fits(records[0][1])), None)
    else:
        layout = Layout(f"column {column}", {column: str}, lambda record: (record[column], ""))
    documents = []
    for line, record in records:
        where = f"--data {path}, line {line}"
        if layout is None or not layout.fits(record):
            expected = "; ".join(map(str, LAYOUTS)) if layout is None else str(layout)
            keys = ", ".join(record) if isinstance(record, dict) else f"none, it is a {type(record).__name__}"
            raise ValueError(
                f"{where}: its keys are {keys}; expected {expected}. Convert the file, or name the key that holds the "
                "text with --column."
            )
        try:
            body, tail = layout.split(record)
        except (LookupError, AttributeError, TypeError, StopIteration) as error:
            raise ValueError(
                f"{where}: its keys are those of {layout}, and what they hold is not. Correct it, or leave it out."
            ) from error
        if PLACEHOLDER in body:
            raise ValueError(
                f"{where}: the text is a placeholder of SPEED-Bench, {body[:60]!r}. Fetch the texts with the data "
                "set's preparation script (prepare_data of specdec_bench), and pass the file that it writes."
            )
        category = record.get("category")
        documents.append(Document(f"{path.name}:{line}", body, tail, category if isinstance(category, str) else ""))
    assert layout is not None
    return documents, layout.name


def _table(path: Path) -> list[tuple[int, Any]]:
    """Every row of a parquet or CSV file, with its number from 1."""
    try:
        from datasets import Dataset
        from datasets.exceptions import DatasetGenerationError
    except ImportError as error:
        raise ValueError(f"--data {path} needs datasets, which is not installed: pip install datasets.") from error
    read = Dataset.from_parquet if path.suffix == ".parquet" else Dataset.from_csv
    try:
        return list(enumerate(read(str(path)), 1))
    except (DatasetGenerationError, ValueError) as error:
        raise ValueError(f"--data {path} cannot be read as {path.suffix[1:]} ({error}). Check the file.") from error


def _json(path: Path) -> list[tuple[int, Any]]:
    """Every object with its line, or its place in an array; `datasets` would not give the line of a broken one."""
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
        try:
            records += [(number, json.loads(line))] if line.strip() else []
        except json.JSONDecodeError as error:
            raise ValueError(
                f"--data {path}, line {number}: no JSON object ({error.msg}). Pass one object per line."
            ) from error
    return records


class DocumentPrompts:
    """Prompts from documents, tokenized once.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer of the target.
        documents (`Sequence[Document]`): The first 256 are used.
        chat (`bool`, *optional*, defaults to `False`): Write each document as the message of a user, by the tokenizer's
            chat template. Its beginning and its end are part of every prompt.

    Raises:
        ValueError: If there is no chat template, or it changes the text of a message.
    """

    def __init__(self, tokenizer: Any, documents: Sequence[Document], chat: bool = False):
        used = documents[:MAX_DOCUMENTS]
        before, after = around_a_message(tokenizer) if chat else ("", "")
        self.head = encode(tokenizer, before)
        self.bodies = [encode(tokenizer, document.body) for document in used]
        self.tails = [encode(tokenizer, document.tail + after) for document in used]
        self.categories = [document.category for document in used]
        parts = zip(self.bodies, self.tails, strict=True)
        self.sizes = [len(self.head) + len(body) + len(tail) for body, tail in parts]

    def windows(self, length: int, count: int) -> list[Prompt]:
        """`count` prompts of `length` tokens: part of a body, then its tail, spread over the documents.

        Raises:
            ValueError: If no document is long enough.
        """
        room, kept = length - len(self.head), int(TAIL_SHARE * length)
        tails = [tail[max(len(tail) - kept, 0) :] for tail in self.tails]
        lengths = [len(self.head) + len(body) + len(tail) for body, tail in zip(self.bodies, tails, strict=True)]
        return [
            Prompt(
                torch.cat([self.head, self.bodies[at][offset:][: room - len(tails[at])], tails[at]]),
                self.categories[at],
            )
            for at, offset in window_starts(lengths, length, count)
        ]

    def own(self, count: int, limit: int) -> list[Prompt]:
        """`count` whole documents of at most `limit` tokens, from the beginning again where there are fewer.

        Raises:
            ValueError: If there is none.
        """
        parts = zip(self.bodies, self.tails, self.categories, self.sizes, strict=True)
        fitting = [
            Prompt(torch.cat([self.head, body, tail]), category)
            for body, tail, category, size in parts
            if 0 < size <= limit
        ]
        if not fitting:
            raise ValueError(f"--context own: no document has between 1 and {limit} tokens. Pass a number of tokens.")
        return list(islice(cycle(fitting), count))

    def describe(self, lengths: Sequence[int]) -> dict[str, Any]:
        """Numbers of documents and tokens, and how many windows of each length do not overlap."""
        disjoint = {str(length): num_disjoint(self.sizes, length) for length in lengths if length != OWN_LENGTH}
        return {"documents": len(self.sizes), "tokens": sum(self.sizes), "disjoint_windows": disjoint}


def around_a_message(tokenizer: Any) -> tuple[str, str]:
    """Return what a chat template writes before and after the message of a user.

    Raises:
        ValueError: If there is no template, or it changes the message.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("--chat: the tokenizer of the target has no chat template. Leave the option out.")
    message = [{"role": "user", "content": MARK}]
    written = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    before, found, after = written.partition(MARK)
    if not found:
        raise ValueError(f"--chat: the chat template writes {MARK!r} as {written!r}. Leave the option out.")
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
    rounds = range(max(shares.values()))
    return [(d, offsets[turn]) for turn in rounds for d, offsets in starts.items() if turn < len(offsets)]


def _spread(room: int, count: int) -> list[int]:
    return [room // 2] if count == 1 else [round(index * room / (count - 1)) for index in range(count)]


def cut_windows(documents: Sequence[torch.Tensor], window: int, count: int) -> torch.Tensor:
    """`(count, window)` token ids, see [`window_starts`]."""
    starts = window_starts([len(document) for document in documents], window, count)
    return torch.stack([documents[index][offset : offset + window] for index, offset in starts])


def num_disjoint(lengths: Sequence[int], window: int) -> int:
    """Number of windows that fit into the documents without overlapping."""
    return sum(length // window for length in lengths)


def left_padded(prompts: Sequence[torch.Tensor], pad_token_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`(B, T)` token ids and attention mask.

    >>> [part.tolist() for part in left_padded([torch.tensor([5]), torch.tensor([6, 7])], 0)]
    [[[0, 5], [6, 7]], [[0, 1], [1, 1]]]
    """
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), pad_token_id)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    return ids, mask
