"""Stream a long text while it is generated, in time linear in its length.

For every token, transformers' `TextStreamer` decodes all tokens since the last line break, which is slow for long
lines.
"""

from typing import Any, TextIO

import torch
from tokenizers.decoders import DecodeStream
from transformers.generation.streamers import BaseStreamer

# Decoders return this in place of bytes that are no character, or an incomplete one.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class IncrementalDecoder:
    """Decode a sequence of tokens incrementally.

    The text of a token depends on its neighbours: a character may be spread over several byte-level tokens, and some
    decoders drop the space of a first token. Tokens that end inside a character are kept until it is complete. The
    pieces joined are `tokenizer.decode(tokens)`, without `clean_up_tokenization_spaces`, for any tokens of a byte-level
    tokenizer and for valid text of any other tokenizer.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Tokenizer of the model. Without a backend in Rust, all tokens are decoded
            again for each new one.
        skip_special_tokens (`bool`, *optional*, defaults to `False`): Whether to leave special tokens out.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = False):
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        self._stream: DecodeStream | None
        self._reset()

    def feed(self, token: int) -> str:
        """Add a token, and return the text that is now complete and has not been returned before."""
        self._tokens.append(token)
        if self._stream is not None:
            try:
                piece = self._stream.step(self._backend, token) or ""
            except Exception:  # invalid text: decoded in `end`
                self._stream, piece = None, ""
        else:
            text = "" if self._backend is not None else self._decode(self._tokens)
            is_complete = text.startswith(self._output) and not text.endswith(REPLACEMENT)
            piece = text[len(self._output) :] if is_complete else ""
        self._output += piece
        if piece:
            self._last = len(self._tokens)
        return piece

    def end(self) -> str:
        """Return the remaining text, and reset the decoder for another text."""
        text = self._decode(self._tokens)
        is_continued = text.startswith(self._output)
        piece = text[len(self._output) :] if is_continued else self._decode(self._tokens[self._last :])
        self._reset()
        return piece

    def _reset(self) -> None:
        self._tokens: list[int] = []
        self._output, self._last = "", 0  # text that was returned, and the number of tokens when that last happened
        self._stream = None if self._backend is None else DecodeStream(skip_special_tokens=self.skip_special_tokens)

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(
            tokens, skip_special_tokens=self.skip_special_tokens, clean_up_tokenization_spaces=False
        )


class FileStreamer(BaseStreamer):
    """Write the text to a file while `generate` emits it, in complete characters.

    ```python
    with open("story.txt", "w", encoding="utf-8") as file:
        target.generate(**inputs, assistant_model=draft, streamer=FileStreamer(tokenizer, file), max_new_tokens=100_000)
    ```

    Args:
        file (`TextIO`): File opened for writing text, such as `sys.stdout`. Flushed after every piece, never closed.
        skip_prompt (`bool`, *optional*, defaults to `True`): Whether to write the continuation only.
    """

    def __init__(self, tokenizer: Any, file: TextIO, skip_prompt: bool = True, skip_special_tokens: bool = True):
        self.file = file
        self.skip_prompt = skip_prompt
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens)
        self._expects_prompt = True

    def put(self, value: torch.Tensor) -> None:
        """Write the prompt `(1, P)` or a token `(1,)`; called by `generate`."""
        is_prompt, self._expects_prompt = self._expects_prompt, False
        if is_prompt and value.dim() > 1 and value.shape[0] > 1:
            raise ValueError(
                f"a prompt of {value.shape[0]} rows: FileStreamer writes one row. Generate one row per call."
            )
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
