"""Token ids of prompts: windows out of documents, what a chat template adds, rows of several lengths."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

# Stands for the text of a user where a chat template is split.
MARK = "<<<text>>>"


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


def left_padded(prompts: Sequence[torch.Tensor], pad_token_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`(B, T)` token ids and attention mask.

    >>> [part.tolist() for part in left_padded([torch.tensor([5]), torch.tensor([6, 7])], 0)]
    [[[0, 5], [6, 7]], [[0, 1], [1, 1]]]
    """
    ids = pad_sequence(list(prompts), True, pad_token_id, padding_side="left")
    return ids, pad_sequence([torch.ones_like(prompt) for prompt in prompts], True, padding_side="left")
