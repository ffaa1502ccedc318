"""Writing a long text while it is generated, in time linear in its length.

Transformers' `TextStreamer` decodes everything since the last line break again for every token. A model that has
stopped breaking lines then costs more for streaming than for decoding.
"""

from typing import Any, TextIO

import torch
from transformers.generation.streamers import BaseStreamer

# What decoders put in place of bytes that are no character, or not yet.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A character has at most 4 bytes, so this many tokens may hold a part of one and nothing else.
INCOMPLETE_TOKENS = 3
# Tokens that wait for a complete character before they are taken for what they are: no text.
MAX_PENDING = 32


class IncrementalDecoder:
    """The text of a growing sequence of tokens, piece by piece.

    What a token adds depends on its neighbours: a character may be spread over several byte-level tokens, and some
    decoders drop the space of a first token. So a few tokens in front of the new ones are decoded with them, and tokens
    that end inside a character wait for its rest. The pieces together are `tokenizer.decode(tokens)`, without
    `clean_up_tokenization_spaces`, for any tokens of a byte-level tokenizer and for valid text with any other.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Decodes.
        skip_special_tokens (`bool`, *optional*, defaults to `False`): Leave special tokens out.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = False):
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        # tokens whose text has been returned
        self._context: list[int] = []
        self._pending: list[int] = []
        # of the pending tokens, how many have no open character: none, but for textless first ones
        self._settled = 0
        # text of the context, and what has been returned of the pending tokens'
        self._given = ""

    def feed(self, token: int) -> str:
        """The text that is certain with one more token, and was not before."""
        self._pending.append(token)
        text = self._decode(self._context + self._pending)
        follows = text.startswith(self._given)
        if follows and not text.endswith(REPLACEMENT):
            return self._complete(text)
        if len(self._pending) >= MAX_PENDING:
            return self._shorten(text)
        if not follows or len(self._pending) - self._settled <= INCOMPLETE_TOKENS:
            return ""
        # more bytes than a character has: all but the last of these replacements stay what they are
        certain = max(len(text) - 1, len(self._given))
        piece, self._given = text[len(self._given) : certain], text[:certain]
        return piece

    def end(self) -> str:
        """What has waited for tokens that do not come; the decoder can be used for another text then."""
        piece = self._rest(self._decode(self._context + self._pending))
        self._reset()
        return piece

    def _reset(self) -> None:
        self._context, self._pending, self._settled, self._given = [], [], 0, ""

    def _complete(self, text: str) -> str:
        """No character is open: the pending tokens become the context of the next ones."""
        piece = text[len(self._given) :]
        if piece:
            self._context, self._pending = self._pending, []
            self._given = self._decode(self._context)
        elif self._context or len(self._pending) >= MAX_PENDING:
            self._pending = []  # special tokens that are left out; first tokens may be a space in waiting
        self._settled = len(self._pending)
        return piece

    def _shorten(self, text: str) -> str:
        """Cut the tokens where they can be decoded apart, so that decoding stays cheap in a text of broken bytes."""
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
        """What of `text` has not been returned."""
        return text[len(self._given) :] if text.startswith(self._given) else self._decode(self._pending)

    def _decode(self, tokens: list[int]) -> str:
        text: str = self.tokenizer.decode(
            tokens, skip_special_tokens=self.skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text


class FileStreamer(BaseStreamer):
    """Writes the text to a file, character by complete character, as `generate` emits it.

    ```python
    with open("story.txt", "w", encoding="utf-8") as file:
        target.generate(**inputs, assistant_model=draft, streamer=FileStreamer(tokenizer, file), max_new_tokens=100_000)
    ```

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Decodes.
        file (`TextIO`): Open for writing text, `sys.stdout` for instance. Flushed after every piece, never closed.
        skip_prompt (`bool`, *optional*, defaults to `True`): Write the continuation only.
        skip_special_tokens (`bool`, *optional*, defaults to `True`): Leave special tokens out.

    Raises:
        ValueError: From `put`, if there is more than one row.
    """

    def __init__(self, tokenizer: Any, file: TextIO, skip_prompt: bool = True, skip_special_tokens: bool = True):
        self.file = file
        self.skip_prompt = skip_prompt
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens)
        self._expects_prompt = True

    def put(self, value: torch.Tensor) -> None:
        """Called by `generate` with the prompt `(1, P)`, then with every token `(1,)`."""
        is_prompt, self._expects_prompt = self._expects_prompt, False
        if is_prompt and value.dim() > 1 and value.shape[0] > 1:
            raise ValueError(f"{value.shape[0]} rows cannot be written to one file: generate one row per call.")
        if not (is_prompt and self.skip_prompt):
            self._write("".join(map(self._decoder.feed, value.flatten().tolist())))

    def end(self) -> None:
        """Called by `generate` behind the last token; the streamer can be used again."""
        self._write(self._decoder.end())
        self._expects_prompt = True

    def _write(self, piece: str) -> None:
        if piece:
            self.file.write(piece)
            self.file.flush()
