"""Stream a long text while it is generated, in time linear in its length.

Transformers' `TextStreamer` decodes all tokens since the last line break again for every token. If a model stops
breaking lines, streaming then takes more time than decoding.
"""

from typing import Any, TextIO

import torch
from transformers.generation.streamers import BaseStreamer

# Decoders return this in place of bytes that are no character, or an incomplete one.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A character has at most 4 bytes, so at most this many tokens hold an incomplete character and nothing else.
INCOMPLETE_TOKENS = 3
# Tokens without a complete character that are kept before they are treated as broken bytes.
MAX_PENDING = 32


class IncrementalDecoder:
    """Decode a growing sequence of tokens piece by piece.

    The text of a token depends on its neighbours: a character may be spread over several byte-level tokens, and some
    decoders drop the space of a first token. New tokens are therefore decoded together with a few earlier ones, and
    tokens that end inside a character are kept until it is complete. The pieces joined are `tokenizer.decode(tokens)`,
    without `clean_up_tokenization_spaces`, for any tokens of a byte-level tokenizer and for valid text of any other
    tokenizer.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Tokenizer of the model.
        skip_special_tokens (`bool`, *optional*, defaults to `False`): Whether to leave special tokens out.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = False):
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        # tokens whose text has been returned
        self._context: list[int] = []
        self._pending: list[int] = []
        # number of pending tokens without an incomplete character; 0 unless the first tokens have no text
        self._settled = 0
        # text of the context, and the part of the pending tokens' text that has been returned
        self._given = ""

    def feed(self, token: int) -> str:
        """Add a token, and return the text that is now complete and has not been returned before."""
        self._pending.append(token)
        text = self._decode(self._context + self._pending)
        follows = text.startswith(self._given)
        if follows and not text.endswith(REPLACEMENT):
            return self._complete(text)
        if len(self._pending) >= MAX_PENDING:
            return self._shorten(text)
        if not follows or len(self._pending) - self._settled <= INCOMPLETE_TOKENS:
            return ""
        # more bytes than a character has: all replacement characters but the last are final
        certain = max(len(text) - 1, len(self._given))
        piece, self._given = text[len(self._given) : certain], text[:certain]
        return piece

    def end(self) -> str:
        """Return the remaining text, and reset the decoder for another text."""
        piece = self._rest(self._decode(self._context + self._pending))
        self._reset()
        return piece

    def _reset(self) -> None:
        self._context, self._pending, self._settled, self._given = [], [], 0, ""

    def _complete(self, text: str) -> str:
        """Return the rest of a `text` without an incomplete character; its tokens become context of the next ones."""
        piece = text[len(self._given) :]
        if piece:
            self._context, self._pending = self._pending, []
            self._given = self._decode(self._context)
        elif self._context or len(self._pending) >= MAX_PENDING:
            self._pending = []  # skipped special tokens; first tokens without text may be a space that appears later
        self._settled = len(self._pending)
        return piece

    def _shorten(self, text: str) -> str:
        """Cut the tokens where both parts can be decoded alone, so that decoding broken bytes stays cheap."""
        for cut in range(len(self._pending) - 1, len(self._pending) - 1 - INCOMPLETE_TOKENS, -1):
            head = self._decode(self._context + self._pending[:cut])
            if text.startswith(self._given) and text == head + self._decode(self._pending[cut:]):
                piece = head[len(self._given) :]
                self._context, self._pending, self._given = [], self._pending[cut:], self._given[len(head) :]
                self._settled = 0
                return piece
        piece = self._rest(text)
        self._reset()
        return piece

    def _rest(self, text: str) -> str:
        """Return the part of `text` that has not been returned."""
        return text[len(self._given) :] if text.startswith(self._given) else self._decode(self._pending)

    def _decode(self, tokens: list[int]) -> str:
        text: str = self.tokenizer.decode(
            tokens, skip_special_tokens=self.skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text


class FileStreamer(BaseStreamer):
    """Write the text to a file while `generate` emits it, in complete characters.

    ```python
    with open("story.txt", "w", encoding="utf-8") as file:
        target.generate(**inputs, assistant_model=draft, streamer=FileStreamer(tokenizer, file), max_new_tokens=100_000)
    ```

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Tokenizer of the model.
        file (`TextIO`): File opened for writing text, such as `sys.stdout`. Flushed after every piece, never closed.
        skip_prompt (`bool`, *optional*, defaults to `True`): Whether to write the continuation only.
        skip_special_tokens (`bool`, *optional*, defaults to `True`): Whether to leave special tokens out.
    """

    def __init__(self, tokenizer: Any, file: TextIO, skip_prompt: bool = True, skip_special_tokens: bool = True):
        self.file = file
        self.skip_prompt = skip_prompt
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens)
        self._expects_prompt = True

    def put(self, value: torch.Tensor) -> None:
        """Write the prompt `(1, P)` or a token `(1,)`; called by `generate`.

        Raises:
            ValueError: If the prompt has more than one row.
        """
        is_prompt, self._expects_prompt = self._expects_prompt, False
        if is_prompt and value.dim() > 1 and value.shape[0] > 1:
            raise ValueError(f"{value.shape[0]} rows cannot be written to one file: generate one row per call.")
        if not (is_prompt and self.skip_prompt):
            self._write("".join(map(self._decoder.feed, value.flatten().tolist())))

    def end(self) -> None:
        """Write the remaining text; called by `generate` after the last token. The streamer can be used again."""
        self._write(self._decoder.end())
        self._expects_prompt = True

    def _write(self, piece: str) -> None:
        if piece:
            self.file.write(piece)
            self.file.flush()
