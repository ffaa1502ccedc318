# Published with a draft by hf_longspec, Apache-2.0.
"""The token sequences of a batch: appending, stopping and streaming, exact to the token in every row."""

from array import array
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from .generation_ranks import Ranks


class Sequences:
    """Prompts and what was generated, one row per prompt, rows growing at their own pace.

    Args:
        input_ids (`torch.LongTensor` of shape `(batch, P)`):
            Prompts as the user gave them, left padding included: processors and criteria see them as in plain
            `generate`.
        stopping_criteria (`StoppingCriteriaList`):
            Checked after every single token of every row. Criteria other than length and end-of-sequence are called
            with one row, `(1, length)`. One that raises StopIteration ends all rows where they stand.
        pad_token_id (`int`): Fills finished rows.
        max_length (`int`): Most tokens of a row, prompt included.
        reach (`int`): Most tokens a step may try out beyond what is emitted.
        streamer (`BaseStreamer`, *optional*): Receives the prompt's continuation, each token once.
        ranks ([`Ranks`], *optional*): Processes that must stop together: the first one's criteria decide.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        stopping_criteria: StoppingCriteriaList,
        pad_token_id: int,
        max_length: int,
        reach: int,
        streamer: BaseStreamer | None = None,
        ranks: Ranks | None = None,
    ):
        batch_size, prompt_length = input_ids.shape
        self.prompt_length = prompt_length
        self.pad_token_id = pad_token_id
        self.max_length = max_length
        self.tokens = input_ids.new_full((batch_size, max_length + reach), pad_token_id)
        self.tokens[:, :prompt_length] = input_ids
        # what has been emitted; `tokens` repeats it for processors and criteria, with candidates behind it
        self.generated: list[array[int]] = [array("q") for _ in range(batch_size)]
        self.done = [False] * batch_size
        self.interrupted = False
        self._eos: set[int] = set()
        self._slow: list[Any] = []
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
    def finished(self) -> bool:
        """Whether every row is done."""
        return all(self.done)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row, padded prompt included."""
        return [self.prompt_length + len(tokens) for tokens in self.generated]

    def growing_rows_by_length(self) -> dict[int, list[int]]:
        """Unfinished rows, grouped by their length."""
        groups: dict[int, list[int]] = defaultdict(list)
        for row, length in enumerate(self.lengths):
            if not self.done[row]:
                groups[length].append(row)
        return groups

    def try_out(self, depth: int, tokens: torch.Tensor) -> None:
        """Write candidate tokens `(batch,)` at `depth` places behind what is emitted, for processors to see."""
        columns = torch.tensor(self.lengths, device=tokens.device) + depth
        self.tokens[torch.arange(self.batch_size, device=tokens.device), columns] = tokens

    def append(self, accepted: Sequence[Sequence[int]], scores: torch.Tensor | None = None) -> list[int]:
        """Emit tokens until a row stops; returns how many each row really emitted.

        Args:
            accepted (`Sequence[Sequence[int]]`): Tokens of each row, in order.
            scores (`torch.Tensor` of shape `(batch, M, vocab)`, *optional*): What custom criteria get as `scores`.
        """
        counts = [0] * self.batch_size
        for row, tokens in enumerate(accepted):
            start = len(self.generated[row])
            for token in tokens:
                if self.done[row]:
                    break
                self.generated[row].append(token)
                counts[row] += 1
                if self._slow:
                    self.tokens[row, self.prompt_length + len(self.generated[row]) - 1] = token
                self.done[row] = self._stops(row, token, scores, counts[row])
            begin = self.prompt_length + start
            new = self.generated[row][start:].tolist()
            self.tokens[row, begin : begin + len(new)] = torch.tensor(new, dtype=torch.long)
        if self._streamer is not None:
            self._stream(self._streamer)
        return counts

    def _stops(self, row: int, token: int, scores: torch.Tensor | None, count: int) -> bool:
        length = self.prompt_length + len(self.generated[row])
        if token in self._eos or length >= self.max_length:
            return True
        if not self._slow:
            return False
        ids = self.tokens[row : row + 1, :length]
        seen = None if scores is None else tuple(scores[row : row + 1, :count].unbind(1))
        stop = False
        try:
            for criterion in self._slow:  # not any(): a generator turns StopIteration into another error
                if bool(torch.as_tensor(criterion(ids, seen)).any()):
                    stop = True
                    break
        except (KeyboardInterrupt, StopIteration) as error:
            self.interrupt(error)
        if self._ranks is not None:  # a criterion may look at the clock, and ranks that disagree wait for ever
            stop = bool(self._ranks.first([stop])[0])
        return stop or self.interrupted

    def interrupt(self, error: BaseException) -> None:
        """End all rows where they stand. A second interruption, or one before the first token, is raised."""
        if self.interrupted or not any(self.generated):
            raise error
        self.interrupted = True
        self.done = [True] * self.batch_size

    def _stream(self, streamer: BaseStreamer) -> None:
        """Hand on every position that all rows have reached; a finished row contributes padding."""
        growing = [len(tokens) for tokens, done in zip(self.generated, self.done, strict=True) if not done]
        ready = min(growing, default=max(len(tokens) for tokens in self.generated))
        while self._streamed < ready:
            place = self._streamed
            try:
                column = [row[place] if place < len(row) else self.pad_token_id for row in self.generated]
                streamer.put(torch.tensor(column, dtype=torch.long))
                self._streamed = place + 1
            except KeyboardInterrupt as error:
                # whether it was taken is unknown: nothing more is handed on, so that no token comes twice or is missing
                self._streamed = self.max_length
                self.interrupt(error)

    def end(self) -> torch.Tensor:
        """End the stream; returns prompts and continuations, `(batch, longest)`, finished rows padded."""
        if self._streamer is not None:
            self._stream(self._streamer)  # an interruption may have come between emitting and streaming
            self._streamer.end()
        output = self.tokens[:, : max(self.lengths)].clone()
        for row, length in enumerate(self.lengths):
            output[row, self.prompt_length : length] = torch.tensor(self.generated[row].tolist(), dtype=torch.long)
            output[row, length:] = self.pad_token_id
        return output
