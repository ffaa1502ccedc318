"""Training data: documents and token streams become rows, and rows become batches."""

import json
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from .arguments import DraftTrainingArguments
from .stored_states import padded_states

IGNORED = -100  # a label that is not trained on, as in transformers
DOCUMENTS_PER_BATCH = 1000
# Columns beside a conversation that decide its text.
TEMPLATE_COLUMNS = ("tools", "documents", "chat_template_kwargs")


def document_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text, the last of which is the tokenizer's end-of-text token."""
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    end = tokenizer.eos_token_id
    return ids if ids and ids[-1] == end else [*ids, end]


class DocumentEncoder:
    """Tokenizes rows: a text, a conversation, or `input_ids` (and optionally `labels`), which are used as they are.

    The end-of-text token is appended to a text and predicted like any other token. Rows with `input_ids` need no
    tokenizer.
    """

    def __init__(self, args: DraftTrainingArguments, tokenizer: Any = None):
        self.text_column = args.text_column
        self.messages_column = args.messages_column
        self.assistant_only = args.assistant_only
        self.max_length = args.max_length
        self.tokenizer = tokenizer

    def __call__(self, row: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens and the labels of a row, `(L,)` each. The labels are not shifted."""
        if "input_ids" in row:
            tokens = torch.as_tensor(row["input_ids"], dtype=torch.long)
            labels = torch.as_tensor(row["labels"], dtype=torch.long) if "labels" in row else tokens
            return tokens, labels
        self.check(row)
        tokens, labels = self._text(row) if self.text_column in row else self._conversation(row)
        return tokens[: self.max_length], labels[: self.max_length]

    def check(self, columns: Any) -> None:
        """Refuse a dataset if none of its columns can be trained on."""
        if "input_ids" in columns:
            return
        if self.text_column not in columns and self.messages_column not in columns:
            raise ValueError(
                f"the dataset has the columns {sorted(columns)}, but not text_column={self.text_column!r}, "
                f"messages_column={self.messages_column!r} or input_ids: set text_column or messages_column."
            )
        if self.tokenizer is None:
            raise ValueError("a dataset of texts needs a tokenizer: pass processing_class=tokenizer.")
        if self.text_column in columns and self.tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no end-of-text token to append to a text: set tokenizer.eos_token.")

    def _text(self, row: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.tensor(document_ids(self.tokenizer, row[self.text_column]))
        return tokens, tokens

    def _conversation(self, row: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        messages = row[self.messages_column]
        self._check_messages(messages)
        beside = {name: row[name] for name in TEMPLATE_COLUMNS if row.get(name)}
        beside = {name: json.loads(value) if isinstance(value, str) else value for name, value in beside.items()}
        encoded = self.tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=self.assistant_only, **beside
        )
        tokens = torch.tensor(encoded["input_ids"])
        if not self.assistant_only:
            return tokens, tokens
        is_assistant = torch.tensor(encoded["assistant_masks"], dtype=torch.bool)
        if not is_assistant.any():
            raise ValueError(
                "assistant_only=True, but the chat template marks no tokens of the assistant: put the assistant's "
                "messages between {% generation %} and {% endgeneration %}, or set assistant_only=False."
            )
        return tokens, tokens.masked_fill(~is_assistant, IGNORED)

    def _check_messages(self, messages: Sequence[Any]) -> None:
        """Refuse messages that a chat template would write as nothing."""
        for message in messages:
            keys = sorted(message) if isinstance(message, Mapping) else message
            if not isinstance(message, Mapping) or "role" not in keys or not {"content", "tool_calls"} & message.keys():
                raise ValueError(
                    f"{self.messages_column} has a message {keys!r}, expected the keys role and content. Rename them, "
                    "as in {'role': 'user', 'content': message['value']}."
                )


# Most rows of a dataset that are counted.
COUNTED = 100_000


def most_frequent(rows: Any, encoder: DocumentEncoder, vocab_size: int, count: int) -> list[int]:
    """Return the `count` most frequent tokens of a dataset's first rows; of equally frequent ones the smallest.

    >>> rows = TokenWindows([5, 3, 3, 5, 1, 3], 2)
    >>> most_frequent(rows, DocumentEncoder(DraftTrainingArguments("runs")), 8, 2)
    [3, 5]
    """
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for row in islice(rows, COUNTED):
        counts += torch.bincount(encoder(row)[0], minlength=vocab_size)
    frequent: list[int] = counts.argsort(descending=True, stable=True)[:count].tolist()
    return frequent


class TokenWindows(Dataset):
    """Rows of equal length, cut one after the other from a stream of tokenized documents.

    Args:
        tokens (`Sequence[int]`): Documents, each followed by the end-of-text token. A tensor or a `numpy.ndarray`,
            which may be memory-mapped, is read row by row.
        length (`int`): Tokens per row. An incomplete last row is dropped.

    >>> TokenWindows([5, 6, 7, 8, 9], 2)[1]["input_ids"].tolist()
    [7, 8]
    """

    def __init__(self, tokens: Sequence[int] | Any, length: int):
        _check_row_length(length)
        if len(tokens) < length:
            raise ValueError(
                f"the stream has {len(tokens)} tokens, fewer than one row of length={length}: shorten the rows."
            )
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


def pack(dataset: Any, tokenizer: Any, args: DraftTrainingArguments, length: int) -> Any:
    """Concatenate tokenized documents and cut them into rows of equal length.

    The end-of-text token is appended to every document. A row holds several documents or part of one. Documents are
    packed 1,000 at a time, and the last row of each 1,000 may be shorter. Returns a dataset of the same kind,
    `datasets.Dataset` or `datasets.IterableDataset`, with `input_ids` and `labels`.
    """
    _check_row_length(length)
    encoder = DocumentEncoder(args, tokenizer)
    encoder.max_length = None  # not truncated: a document continues in the next row
    columns = dataset.column_names or list(next(iter(dataset)))
    encoder.check(columns)

    def rows(batch: dict[str, list[Any]]) -> dict[str, list[list[int]]]:
        count = len(next(iter(batch.values())))
        documents = [encoder({name: batch[name][index] for name in batch}) for index in range(count)]
        packed = {}
        for name, parts in zip(("input_ids", "labels"), zip(*documents, strict=True), strict=True):
            stream = [token for part in parts for token in part.tolist()]
            packed[name] = [stream[start : start + length] for start in range(0, len(stream), length)]
        return packed

    return dataset.map(rows, batched=True, batch_size=DOCUMENTS_PER_BATCH, remove_columns=columns)


def _check_row_length(length: int) -> None:
    if length < 2:
        raise ValueError(f"length={length}: a row needs 2 tokens, one to read and one to predict.")


class DraftCollator:
    """Pads the rows of a batch on the right.

    Every token attends to all earlier tokens of its row, also across documents, because a draft reads the target's
    whole cache at inference. No mask is needed for the padding either: it comes after all tokens that are trained on.
    """

    def __init__(self, encoder: DocumentEncoder, vocab_size: int, pad_token_id: int = 0):
        self.encoder = encoder
        self.vocab_size = vocab_size
        self.pad_token_id = pad_token_id

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Return `input_ids`, `attention_mask` and `labels`, `(B, L)`: not shifted, -100 where nothing is predicted.

        For rows of a [`KVStore`], the batch also holds their positions and the target's states.
        """
        tokens, labels = zip(*(self.encoder(row) for row in rows), strict=True)
        if not all(map(len, tokens)):
            raise ValueError("a row has no tokens: remove empty rows from the dataset.")
        low, high = min(int(row.min()) for row in tokens), max(int(row.max()) for row in tokens)
        if low < 0 or high >= self.vocab_size:
            raise ValueError(
                f"token {low if low < 0 else high} is outside of the target's vocabulary, 0 to {self.vocab_size - 1}: "
                "use the target's tokenizer."
            )
        return {
            "input_ids": pad_sequence(list(tokens), batch_first=True, padding_value=self.pad_token_id),
            "labels": pad_sequence(list(labels), batch_first=True, padding_value=IGNORED),
            "attention_mask": pad_sequence([torch.ones_like(row) for row in tokens], batch_first=True),
            **padded_states(rows),
        }
