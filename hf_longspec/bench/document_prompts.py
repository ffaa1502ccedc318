"""Prompts of a given length, or of their own, out of documents."""

from collections.abc import Sequence
from typing import Any

import torch

from .prompts import num_disjoint, window_starts
from .readers import Document

# Documents that are tokenized; a benchmark needs some dozens of prompts.
MAX_DOCUMENTS = 256
# Share of a prompt that the tail of a document may take.
TAIL_SHARE = 0.25
# Stands for prompts of their own length among the numbers of `--context`.
OWN_LENGTH = 0


class DocumentPrompts:
    """Prompts from documents, tokenized once.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): That of the target.
        documents (`Sequence[Document]`): The first 256 are used.
    """

    def __init__(self, tokenizer: Any, documents: Sequence[Document]):
        used = documents[:MAX_DOCUMENTS]
        self.bodies = [_ids(tokenizer, document.body) for document in used]
        self.tails = [_ids(tokenizer, document.tail) for document in used]
        self.longest = max(len(body) + len(tail) for body, tail in zip(self.bodies, self.tails, strict=True))

    def windows(self, length: int, count: int) -> list[torch.Tensor]:
        """`count` prompts of `length` tokens: part of a body, then its tail, spread over the documents.

        Raises:
            ValueError: If no document is long enough.
        """
        tails = [tail[-int(TAIL_SHARE * length) :] if int(TAIL_SHARE * length) else tail[:0] for tail in self.tails]
        lengths = [len(body) + len(tail) for body, tail in zip(self.bodies, tails, strict=True)]
        prompts = []
        for index, offset in window_starts(lengths, length, count):
            tail = tails[index]
            prompts.append(torch.cat([self.bodies[index][offset : offset + length - len(tail)], tail]))
        return prompts

    def own(self, count: int, limit: int) -> list[torch.Tensor]:
        """`count` whole documents of at most `limit` tokens, from the beginning again where there are fewer.

        Raises:
            ValueError: If there is none.
        """
        whole = [torch.cat(parts) for parts in zip(self.bodies, self.tails, strict=True)]
        whole = [prompt for prompt in whole if 0 < len(prompt) <= limit]
        if not whole:
            raise ValueError(f"--context own: no document has between 1 and {limit} tokens. Pass a number of tokens.")
        return [whole[index % len(whole)] for index in range(count)]

    def describe(self, lengths: Sequence[int]) -> dict[str, Any]:
        """What a reader must know of the prompts: how many windows of a length do not overlap."""
        sizes = [len(body) + len(tail) for body, tail in zip(self.bodies, self.tails, strict=True)]
        disjoint = {str(length): num_disjoint(sizes, length) for length in lengths if length != OWN_LENGTH}
        return {"documents": len(sizes), "tokens": sum(sizes), "disjoint_windows": disjoint}


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


def _ids(tokenizer: Any, text: str) -> torch.Tensor:
    # verbose=False: texts longer than the model are meant to be cut
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] if text else []
    return torch.tensor(ids, dtype=torch.long)
