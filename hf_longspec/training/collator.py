"""DraftCollator: batches of whole rows."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from .documents import IGNORED, DocumentEncoder
from .kv_store import padded_states


class DraftCollator:
    """Pads rows on the right.

    Each token of a row attends to all before it, also across documents: at inference a draft reads whatever the target
    has in its cache. Padding on the right is behind everything that counts, so no mask is needed for it either.

    Args:
        encoder ([`DocumentEncoder`]): Turns a row into tokens and labels.
        vocab_size (`int`): Tokens that the target embeds.
        pad_token_id (`int`, *optional*, defaults to 0): Any of them.
    """

    def __init__(self, encoder: DocumentEncoder, vocab_size: int, pad_token_id: int = 0):
        self.encoder = encoder
        self.vocab_size = vocab_size
        self.pad_token_id = pad_token_id

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """`input_ids`, `labels` (not shifted, -100 where nothing is predicted) and `attention_mask`, each `(B, L)`.

        Rows of a [`KVStore`] bring their positions and the target's states.

        Raises:
            ValueError: If a row is empty, or has a token that the target does not have.
        """
        tokens, labels = zip(*(self.encoder(row) for row in rows), strict=True)
        if not all(map(len, tokens)):
            raise ValueError("a row has no tokens: filter empty rows out of the dataset.")
        low, high = min(int(row.min()) for row in tokens), max(int(row.max()) for row in tokens)
        if low < 0 or high >= self.vocab_size:
            raise ValueError(
                f"a row has the token {low if low < 0 else high}, and the target's vocabulary is 0 to "
                f"{self.vocab_size - 1}: use the target's tokenizer."
            )
        return {
            "input_ids": pad_sequence(list(tokens), batch_first=True, padding_value=self.pad_token_id),
            "labels": pad_sequence(list(labels), batch_first=True, padding_value=IGNORED),
            "attention_mask": pad_sequence([torch.ones_like(row) for row in tokens], batch_first=True),
            **padded_states(rows),
        }
