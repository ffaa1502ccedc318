"""Prompts out of documents: cut into windows of a length, or taken whole."""

from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from .results import OWN_LENGTH
from .sources import MAX_DOCUMENTS, Document

# Stands for the text of a user where a chat template is split.
MARK = "<<<text>>>"


class Prompt(NamedTuple):
    """Token ids `(length,)`, and the category of their document."""

    ids: torch.Tensor
    category: str


class DocumentPrompts:
    """Prompts from the first 256 documents, tokenized once.

    With `chat`, each document is the message of a user in the tokenizer's chat template, whose beginning and end are
    part of every prompt.
    """

    def __init__(self, tokenizer: Any, documents: Sequence[Document], chat: bool = False):
        before, after = around_a_message(tokenizer) if chat else ("", "")
        self.head, self.tail = encode(tokenizer, before), encode(tokenizer, after)
        self.texts = [encode(tokenizer, document.text) for document in documents[:MAX_DOCUMENTS]]
        self.categories = [document.category for document in documents[:MAX_DOCUMENTS]]
        self.sizes = [len(self.head) + len(text) + len(self.tail) for text in self.texts]

    def windows(self, length: int, count: int) -> list[Prompt]:
        """`count` prompts of `length` tokens, spread over the documents."""
        room = length - len(self.head) - len(self.tail)
        return [
            self._prompt(at, slice(offset, offset + room)) for at, offset in window_starts(self.sizes, length, count)
        ]

    def own(self, count: int, limit: int) -> list[Prompt]:
        """`count` whole documents of at most `limit` tokens, from the beginning again where there are fewer."""
        fitting = [self._prompt(at, slice(None)) for at, size in enumerate(self.sizes) if 0 < size <= limit]
        if not fitting:
            raise ValueError(f"--context own: no document has between 1 and {limit} tokens. Pass a number of tokens.")
        return list(islice(cycle(fitting), count))

    def _prompt(self, at: int, part: slice) -> Prompt:
        return Prompt(torch.cat([self.head, self.texts[at][part], self.tail]), self.categories[at])

    def describe(self, lengths: Sequence[int]) -> dict[str, Any]:
        """Numbers of documents and tokens, and how many windows of each length do not overlap."""
        disjoint = {str(length): num_disjoint(self.sizes, length) for length in lengths if length != OWN_LENGTH}
        return {"documents": len(self.sizes), "tokens": sum(self.sizes), "disjoint_windows": disjoint}


def around_a_message(tokenizer: Any) -> tuple[str, str]:
    """Return what a chat template writes before and after the message of a user."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("--chat: the tokenizer of the target has no chat template. Drop --chat.")
    message = [{"role": "user", "content": MARK}]
    written = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    before, mark, after = written.partition(MARK)
    if not mark:
        raise ValueError(f"--chat: the chat template writes {MARK!r} as {written!r}. Drop --chat.")
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
    ids = pad_sequence(list(prompts), True, pad_token_id, padding_side="left")
    return ids, pad_sequence([torch.ones_like(prompt) for prompt in prompts], True, padding_side="left")
