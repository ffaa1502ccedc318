"""From a row of a dataset to tokens and labels."""

from collections.abc import Mapping
from typing import Any

import torch

from .arguments import DraftTrainingArguments

IGNORED = -100  # a label that nothing is predicted for, as in transformers


class DocumentEncoder:
    """Turns rows into tokens: a text, a conversation, or `input_ids` (and possibly `labels`) as they are.

    A text gets the end-of-text token behind it, which is predicted like any other token.

    Args:
        args ([`DraftTrainingArguments`]): Names of the columns, `max_length` and `assistant_only`.
        tokenizer (*optional*): Needed unless rows have `input_ids`.
    """

    def __init__(self, args: DraftTrainingArguments, tokenizer: Any = None):
        self.text_column = args.text_column
        self.messages_column = args.messages_column
        self.assistant_only = args.assistant_only
        self.max_length = args.max_length
        self.tokenizer = tokenizer

    def __call__(self, row: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and labels of a row, `(L,)` each; labels are not shifted.

        Raises:
            ValueError: If the row has none of the columns, or cannot be tokenized.
        """
        if "input_ids" in row:
            tokens = torch.as_tensor(row["input_ids"], dtype=torch.long)
            labels = torch.as_tensor(row["labels"], dtype=torch.long) if "labels" in row else tokens
            return tokens, labels
        self.check(row)
        tokens, labels = self._text(row) if self.text_column in row else self._conversation(row)
        return tokens[: self.max_length], labels[: self.max_length]

    def check(self, columns: Any) -> None:
        """Refuse a dataset with these columns if there is nothing to train on.

        Raises:
            ValueError: With the columns that there are.
        """
        if "input_ids" in columns:
            return
        if self.text_column not in columns and self.messages_column not in columns:
            raise ValueError(
                f"the dataset has the columns {sorted(columns)}, and neither text_column={self.text_column!r} nor "
                f"messages_column={self.messages_column!r} nor input_ids is among them: name the right column."
            )
        if self.tokenizer is None:
            raise ValueError("the dataset has texts, and no tokenizer was given: pass processing_class=tokenizer.")
        if self.text_column in columns and self.tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no end-of-text token to set behind a text: set tokenizer.eos_token.")

    def _text(self, row: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        ids = self.tokenizer(row[self.text_column], verbose=False)["input_ids"]
        end = self.tokenizer.eos_token_id
        tokens = torch.tensor(ids if ids and ids[-1] == end else [*ids, end])
        return tokens, tokens

    def _conversation(self, row: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        encoded = self.tokenizer.apply_chat_template(
            row[self.messages_column],
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=self.assistant_only,
        )
        tokens = torch.tensor(encoded["input_ids"])
        if not self.assistant_only:
            return tokens, tokens
        said = torch.tensor(encoded["assistant_masks"], dtype=torch.bool)
        if not said.any():
            raise ValueError(
                "assistant_only=True, and the chat template marks nothing as the assistant's: put what the assistant "
                "says between {% generation %} and {% endgeneration %}, or set assistant_only=False."
            )
        return tokens, tokens.masked_fill(~said, IGNORED)
