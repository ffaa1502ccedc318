"""The token sequences of a batch: appending, stopping and streaming, token by token in every row."""

import copy
from array import array
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from ..attention_backends.lengths import on_device


class TextBuffer:
    """Prompts and generated tokens on the device of the prompts, which gets new tokens when it is read.

    Args:
        input_ids (`torch.LongTensor` of shape `(batch, P)`): Prompts.
        generated (`list[array[int]]`): Generated tokens of every row, which grow on the host.
        width (`int`): Number of columns.
        pad_token_id (`int`): Token in all other places.
    """

    def __init__(self, input_ids: torch.Tensor, generated: "list[array[int]]", width: int, pad_token_id: int):
        self.generated = generated
        self.prompt_length = input_ids.shape[1]
        self.tokens = input_ids.new_full((len(generated), width), pad_token_id)
        self.tokens[:, : self.prompt_length] = input_ids
        self._copied = [0] * len(generated)

    def read(self, anew: bool = False) -> torch.Tensor:
        """Return the buffer `(batch, width)` with all tokens; `anew` copies those again that it had before."""
        copied = [0] * len(self.generated) if anew else self._copied
        new = [
            (row, self.prompt_length + place, tokens[place])
            for row, tokens in enumerate(self.generated)
            for place in range(copied[row], len(tokens))
        ]
        if new:
            row, column, token = on_device(new, self.tokens.device).unbind(1)
            self.tokens[row, column] = token
            self._copied = list(map(len, self.generated))
        return self.tokens

    def write(self, columns: Sequence[int], tokens: torch.Tensor) -> None:
        """Write one token of every row, `(batch,)`, and widen the buffer if it has too few columns."""
        missing = max(columns) + 1 - self.tokens.shape[1]
        if missing > 0:
            self.tokens = torch.nn.functional.pad(self.tokens, (0, missing))
        rows = torch.arange(len(columns), device=self.tokens.device)
        self.tokens[rows, on_device(columns, self.tokens.device)] = tokens

    def copy(self) -> "TextBuffer":
        """Return a buffer of its own for the same text."""
        other = copy.copy(self)
        other.tokens = self.read().clone()
        other._copied = self._copied
        return other


class Sequences:
    """Prompts and generated tokens, one row per prompt. Each row grows at its own pace.

    Args:
        input_ids (`torch.LongTensor` of shape `(batch, P)`):
            Prompts of the user, left padding included, so that processors and criteria get the same input as in plain
            `generate`.
        stopping_criteria (`StoppingCriteriaList`):
            Checked after every single token of every row. Criteria other than length and end of sequence are called
            with the whole batch `(batch, length)`, once for all rows that have just reached this length. Longer rows
            are cut, shorter ones padded. A result per row applies to the rows of this length. A single result ends all
            rows at their present length, and so does a criterion that raises StopIteration.

            Without a criterion that has an `eos_token_id`, a stopped row keeps growing until all rows have been
            stopped, as in `generate`, which has no token to pad with then.
        pad_token_id (`int`): Token that fills finished rows.
        max_length (`int`): Maximum number of tokens of a row, prompt included.
        streamer (`BaseStreamer`, *optional*): Receives the prompt's continuation, each token once.
        ranks ([`Ranks`], *optional*): Processes that must stop together. The criteria of the first one decide.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        stopping_criteria: StoppingCriteriaList,
        pad_token_id: int,
        max_length: int,
        streamer: BaseStreamer | None = None,
        ranks: Any = None,
    ):
        batch_size, prompt_length = input_ids.shape
        self.prompt_length = prompt_length
        self.pad_token_id = pad_token_id
        self.max_length = max_length
        self.generated: list[array[int]] = [array("q") for _ in range(batch_size)]
        self.buffer = TextBuffer(input_ids, self.generated, max_length, pad_token_id)
        self.done = [False] * batch_size
        self.interrupted = False
        self._eos: set[int] = set()
        self._slow: list[Any] = []
        # length at which a criterion first stopped a row
        self._stopped: list[int | None] = [None] * batch_size
        self._rows_pause = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        for criterion in stopping_criteria:
            if type(criterion) is EosTokenCriteria:
                self._eos.update(criterion.eos_token_id.flatten().tolist())
            elif type(criterion) is not MaxLengthCriteria:
                self._slow.append(criterion)
        self._streamer = streamer
        self._ranks = ranks
        self._streamed = 0

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        return len(self.done)

    @property
    def device(self) -> torch.device:
        """Device of the prompts."""
        return self.buffer.tokens.device

    @property
    def tokens(self) -> torch.Tensor:
        """Prompts and generated tokens `(batch, max_length)` for processors and criteria, with padding after them."""
        return self.buffer.read()

    @property
    def finished(self) -> bool:
        """Whether every row is done."""
        return all(self.done)

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each row, padded prompt included."""
        return [self.prompt_length + len(tokens) for tokens in self.generated]

    def growing_rows_by_length(self) -> dict[int, list[int]]:
        """Return the unfinished rows, grouped by length."""
        groups: dict[int, list[int]] = defaultdict(list)
        for row, length in enumerate(self.lengths):
            if not self.done[row]:
                groups[length].append(row)
        return groups

    def append(self, accepted: Sequence[Sequence[int]], scores: torch.Tensor | None = None) -> list[int]:
        """Emit the tokens of each row up to its stop, and return how many each row emitted.

        Args:
            accepted (`Sequence[Sequence[int]]`): Tokens of each row, in order.
            scores (`torch.Tensor` of shape `(batch, M, vocab)`, *optional*): Argument `scores` of custom criteria.
        """
        counts = [0] * self.batch_size
        for place in range(max(map(len, accepted))):
            grown = [row for row, tokens in enumerate(accepted) if place < len(tokens) and not self.done[row]]
            for row in grown:
                token = accepted[row][place]
                self.generated[row].append(token)
                counts[row] += 1
                length = self.prompt_length + len(self.generated[row])
                if token in self._eos or length >= self.max_length:
                    self._stop(row, length)
            if self._slow:
                self._ask_criteria(grown, None if scores is None else tuple(scores[:, : place + 1].unbind(1)))
            self._end_together()
        if self._streamer is not None:
            self._stream(self._streamer)
        return counts

    def _stop(self, row: int, length: int) -> None:
        if self._stopped[row] is None:
            self._stopped[row] = length
        self.done[row] = self._rows_pause or length >= self.max_length

    def _ask_criteria(self, grown: list[int], scores: tuple[torch.Tensor, ...] | None) -> None:
        """Call the user's criteria for the rows that have a new token, once per length."""
        groups: dict[int, list[int]] = defaultdict(list)
        for row in grown:
            if self._stopped[row] is None:
                groups[self.prompt_length + len(self.generated[row])].append(row)
        for length, rows in groups.items():
            ids = self.tokens[:, :length]
            try:
                answers = [self._answer(criterion(ids, scores)) for criterion in self._slow]
            except StopIteration:
                self.interrupt()
                return
            stops = [any(column) for column in zip(*answers, strict=True)]
            if self._ranks is not None:  # a criterion may depend on the clock, and ranks that disagree would deadlock
                stops = list(map(bool, self._ranks.first(stops)))
            *of_rows, of_all = stops
            for row, own in enumerate(self.lengths):
                if of_all or (row in rows and of_rows[row]):
                    self._stop(row, own)

    def interrupt(self) -> None:
        """End all rows at their present length."""
        self.interrupted = True
        self.done = [True] * self.batch_size

    def _answer(self, answer: Any) -> list[bool]:
        """Return the result of a criterion as one value for each row, followed by one for all rows."""
        given = torch.as_tensor(answer).bool().flatten().tolist()
        if len(given) == self.batch_size:
            return [*given, False]
        if len(given) == 1:
            return [False] * self.batch_size + given
        raise ValueError(
            f"a stopping criterion returned {len(given)} values for {self.batch_size} rows: expected one for each row, "
            "or a single one. Correct the criterion."
        )

    def _end_together(self) -> None:
        """End all rows at the length at which the last of them was stopped, if there is no end token."""
        if self._rows_pause or None in self._stopped:
            return
        length = max(stopped for stopped in self._stopped if stopped is not None)
        self.max_length = length
        self.done = [own >= length for own in self.lengths]
        if self.finished:
            for tokens in self.generated:
                del tokens[length - self.prompt_length :]

    def _stream(self, streamer: BaseStreamer) -> None:
        """Stream every position that all rows have reached, with padding for finished rows."""
        growing = [len(tokens) for tokens, done in zip(self.generated, self.done, strict=True) if not done]
        ready = min(growing, default=max(len(tokens) for tokens in self.generated))
        while self._streamed < ready:
            place = self._streamed
            column = [row[place] if place < len(row) else self.pad_token_id for row in self.generated]
            # Set before the call: if the streamer raises, it is unknown whether it took the token, and no token may be
            # streamed twice.
            self._streamed = self.max_length
            streamer.put(torch.tensor(column, dtype=torch.long))
            self._streamed = place + 1

    def end(self) -> None:
        """Stream the remaining tokens, and end the stream."""
        if self._streamer is not None:
            self._stream(self._streamer)  # an interruption may have come between emitting and streaming
            self._streamer.end()

    def output(self) -> torch.Tensor:
        """Return prompts and continuations `(batch, longest)`, with finished rows padded."""
        # all of them anew, as processors and criteria may have written to the buffer
        output = self.buffer.read(anew=True)[:, : max(self.lengths)].clone()
        for row, length in enumerate(self.lengths):
            output[row, length:] = self.pad_token_id
        return output
