"""The token sequences of a batch: appending, stopping and streaming, token by token in every row, and the results.

Results are the sequences, scores and logits per position if they are requested, and the statistics of the call.
"""

import copy
import os
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..attention_backends.lengths import on_device
from .cache import CACHE_NAME
from .verification import along_path

# A machine is busy if its load average is above so many times its cores, to which the threads of this process belong,
# or if a computation of some seconds gets less than this share of one core.
MOST_LOAD, LEAST_SHARE, LEAST_SECONDS = 1.25, 0.7, 2.0


def busy_machine(seconds: float = 0.0, processor_seconds: float = 0.0) -> str | None:
    """Return what shows that other programs take the processor from a computation; `None` if nothing does.

    The threads of torch wait for each other in every operation, so two on a busy machine can be many times slower than
    one.

    Args:
        seconds (`float`, *optional*): Time of the computation.
        processor_seconds (`float`, *optional*): Processor time of this process in it, all threads together.
    """
    cores, load = os.cpu_count() or 1, os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > MOST_LOAD * cores:
        return f"load {load:.1f} on {cores} core{'s' if cores > 1 else ''}"
    if seconds > LEAST_SECONDS and processor_seconds < LEAST_SHARE * seconds:
        return f"{processor_seconds / seconds:.0%} of one core's time"
    return None


@dataclass
class SpeculationStats:
    """Counts and times of one call, summed over the rows of the batch. They are complete when the call has returned.

    The first token comes from the forward of the prompt and belongs to the prefill. All later tokens are counted here.
    A *row-step* is one row of one verification in which the row was still growing. It is *plain* if the gate had the
    root alone verified; such a step emits one token and is counted in `num_plain_steps` only.
    """

    method: str = ""  # name of the draft on the command line, such as `ngram`
    reason: str | None = None  # why the call was decoded without the draft, see `on_unsupported`. All counts are 0.
    num_spec_steps: int = 0  # number of row-steps, without plain ones
    num_plain_steps: int = 0  # number of plain row-steps
    num_forwards: int = 0  # number of verification forwards of the target, plain ones included. One serves all rows.
    num_draft_tokens: int = 0  # number of drafted tokens that were verified, padding excluded
    num_accepted_draft_tokens: int = 0  # number of drafted tokens that were emitted
    # number of these that only n-grams proposed. TokenSwift's beta also credits n-grams with tokens that another
    # candidate proposed too.
    num_accepted_ngram_tokens: int = 0
    # number of tokens of the text that the draft cannot propose, because its vocabulary is smaller than the target's
    num_out_of_draft_vocabulary: int = 0
    # number of tokens that verifications emitted, bonus tokens included, without those of plain steps. Tokens of
    # earlier steps that a stopping criterion cut off are included.
    num_emitted_tokens: int = 0
    # entry k is the number of row-steps that emitted k drafted tokens
    acceptance_histogram: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0  # time to the first token
    draft_seconds: float = 0.0  # time in the drafter, its update after each verification included
    # time in verification forwards. On a GPU these return before their kernels have finished, and the wait for the
    # kernels is part of `rest_seconds`.
    verify_seconds: float = 0.0
    # time on the host of grammars, also while drafting, and of all processors if one of them is not known
    processor_seconds: float = 0.0
    num_processed_nodes: int = 0  # number of verified columns and drafted nodes that they were asked about
    decode_seconds: float = 0.0  # time after the first token
    draft_state_bytes: int = 0  # bytes that the drafter kept besides the target's cache
    num_expected_tokens: float = 0.0  # like `num_emitted_tokens`, as the gate expected before each verification
    # tokens per second over those of plain steps, by the times that the gate measured; `None` if it measured none
    speedup: float | None = None
    # on a processor, what shows that other programs slowed the call, see `busy_machine`
    busy: str | None = field(default=None, compare=False)
    interrupted: bool = False  # whether Ctrl-C, or a stopping criterion that raised StopIteration, ended the call
    # `(batch, length)`: after Ctrl-C, prompts and generated tokens, as `generate` would have returned them. `None` if
    # no token was generated.
    partial_sequences: torch.Tensor | None = field(default=None, repr=False, compare=False)
    # 2 bytes per step each: 0.4 MB for 100,000 steps
    # for each row of the batch, the number of tokens that each of its row-steps emitted. The last token of a step is
    # the target's own, those before it were drafted. Rows after the last one that had a row-step are missing.
    emitted_per_step: list["array[int]"] = field(default_factory=list, repr=False)
    # likewise, the number of drafted tokens that were verified
    drafted_per_step: list["array[int]"] = field(default_factory=list, repr=False)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per row-step (tau), the bonus token included; 0 before the first verification."""
        return self.num_emitted_tokens / self.num_spec_steps if self.num_spec_steps else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Share of the drafted tokens that were emitted."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_num_nodes(self) -> float:
        """Nodes per row-step that speculated, root included; 0 before the first verification."""
        return 1 + self.num_draft_tokens / self.num_spec_steps if self.num_spec_steps else 0.0

    @property
    def rest_seconds(self) -> float:
        """Decoding time outside of drafting and verification: acceptance, commit, stopping, streaming."""
        return max(0.0, self.decode_seconds - self.draft_seconds - self.verify_seconds)

    @property
    def tokens_per_second(self) -> float:
        """Tokens emitted per second of decoding, all rows together, without prefill and first token."""
        tokens = self.num_emitted_tokens + self.num_plain_steps
        return tokens / self.decode_seconds if self.decode_seconds else 0.0

    def record(self, emitted: Sequence[int], drafted: Sequence[int] | None, ngrams: Sequence[int]) -> None:
        """Count one verification. All lists have one entry per row; `drafted` is `None` for a plain step."""
        self.num_forwards += 1
        while len(self.emitted_per_step) < max((row + 1 for row, count in enumerate(emitted) if count), default=0):
            self.emitted_per_step.append(array("H"))
            self.drafted_per_step.append(array("H"))
        for row, count in enumerate(emitted):
            if not count:
                continue
            self.emitted_per_step[row].append(count)
            self.drafted_per_step[row].append(0 if drafted is None else drafted[row])
            if drafted is None:
                self.num_plain_steps += 1
                continue
            accepted = count - 1
            self.num_spec_steps += 1
            self.num_draft_tokens += drafted[row]
            self.num_emitted_tokens += count
            self.num_accepted_draft_tokens += accepted
            self.num_accepted_ngram_tokens += ngrams[row]
            self.acceptance_histogram += [0] * (accepted + 1 - len(self.acceptance_histogram))
            self.acceptance_histogram[accepted] += 1

    def to_dict(self) -> dict[str, Any]:
        """Return all counts, times and ratios for JSON, without single steps and text."""
        sums = asdict(replace(self, partial_sequences=None, emitted_per_step=[], drafted_per_step=[]))
        for name in ("partial_sequences", "emitted_per_step", "drafted_per_step"):
            del sums[name]
        ratios = "mean_acceptance_length", "draft_acceptance_rate", "mean_num_nodes", "rest_seconds"
        return sums | {name: getattr(self, name) for name in (*ratios, "tokens_per_second")}

    def __str__(self) -> str:
        if self.reason is not None:
            return f"{self.method}: decoded without the draft, as {self.reason}"
        return (
            f"{self.method}: tau {self.mean_acceptance_length:.2f} over {self.num_spec_steps} verifications, "
            f"{self.num_accepted_draft_tokens}/{self.num_draft_tokens} drafted tokens accepted, "
            f"{f'{self.num_plain_steps} plain steps, ' if self.num_plain_steps else ''}"
            f"{self.tokens_per_second:.1f} tokens/s after {self.prefill_seconds:.2f} s of prefill"
            f"{', interrupted' if self.interrupted else ''}"
            f"{f', on a busy machine ({self.busy})' if self.busy else ''}"
            f"{f', {self.speedup:.2f}x of no draft' if self.speedup else ''}"
        )


class TextBuffer:
    """Prompts `(batch, P)` and generated tokens on the device of the prompts, in a tensor of `width` columns.

    It gets new tokens when it is read: `generated` grows on the host. The padding token is in all other places.
    """

    def __init__(self, input_ids: torch.Tensor, generated: "list[array[int]]", width: int, pad_token_id: int):
        self.generated = generated
        self.pad_token_id = pad_token_id
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

    def cut(self, row: int, count: int) -> None:
        """Drop all but the first `count` generated tokens of a row that will not grow any more."""
        if len(self.generated[row]) > count:
            del self.generated[row][count:]
            self.tokens[row, self.prompt_length + count :] = self.pad_token_id

    def copy(self) -> "TextBuffer":
        """Return a buffer of its own for the same text."""
        other = copy.copy(self)
        other.tokens = self.read().clone()
        other._copied = self._copied
        return other


class Sequences:
    """Prompts and generated tokens, one row per prompt. Each row grows at its own pace.

    Args:
        input_ids (`torch.LongTensor` of shape `(batch, P)`): Prompts of the user, left padding included, so that
            processors and criteria get the same input as in plain `generate`.
        stopping_criteria (`StoppingCriteriaList`): Criteria other than length and end of sequence are shown the batch
            column by column, as in `generate`: the first columns `(batch, length)`, once all rows that have not ended
            have reached this length. Finished rows are padded, and rows that are ahead lose their further tokens if
            they are stopped here. A result per row stops these rows, a single result all of them. A criterion that
            raises StopIteration ends all rows here. Without a criterion that has an `eos_token_id`, a stopped row keeps
            growing until all rows have been stopped, as in `generate`, which has no token to pad with then.
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
        # columns that the criteria have been shown, and the rows that they have stopped
        self._shown = prompt_length
        self._stopped = [False] * batch_size
        # rows whose next token cannot be drawn
        self._stuck: set[int] = set()
        # lengths before the columns of a step that were emitted one by one
        self._before: list[int] | None = None
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
        return len(self.done)

    @property
    def device(self) -> torch.device:
        return self.buffer.tokens.device

    @property
    def tokens(self) -> torch.Tensor:
        """Prompts and generated tokens `(batch, max_length)` for processors and criteria, with padding after them."""
        return self.buffer.read()

    @property
    def finished(self) -> bool:
        return all(self.done)

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each row, padded prompt included."""
        return [self.prompt_length + len(tokens) for tokens in self.generated]

    @cached_property
    def _eos_tensor(self) -> torch.Tensor:
        return on_device(sorted(self._eos), self.device)

    def ends(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return which of some tokens are end tokens, as a bool tensor of their shape."""
        return torch.isin(tokens, self._eos_tensor.to(tokens.device))

    def append(self, accepted: Sequence[Sequence[int]], scores: Callable[..., Any] | None = None) -> list[int]:
        """Emit the tokens of each row up to its stop, and return how many each row emitted.

        `accepted` has -1 for a token that could not be drawn. `scores` is a function of the sequences and of a number
        of generated tokens, to the argument `scores` of custom criteria. Columns of [`Sequences.emit_column`] are not
        emitted again.
        """
        before, self._before = self._before, None
        if before is None:
            before = list(map(len, self.generated))
            self._append(accepted, scores)
        return [max(0, len(tokens) - count) for tokens, count in zip(self.generated, before, strict=True)]

    def emit_column(self, column: Sequence[int], scores: Callable[..., Any] | None = None) -> bool:
        """Emit the next token of every row, and return whether no row has ended. [`append`] gets the whole step."""
        if self._before is None:
            self._before = list(map(len, self.generated))
        done = self.done.copy()
        self._append([[token] for token in column], scores)
        return self.done == done

    def _append(self, accepted: Sequence[Sequence[int]], scores: Callable[..., Any] | None) -> None:
        for row, tokens in enumerate(accepted):
            for token in tokens:
                if self.done[row]:
                    break
                if token < 0:
                    self._stuck.add(row)
                    self.done[row] = True
                    break
                self.generated[row].append(token)
                length = self.prompt_length + len(self.generated[row])
                self.done[row] = token in self._eos or length >= self.max_length
        if self._slow or self._stuck:
            self._show_columns(scores)
        if self._streamer is not None:
            self._stream(self._streamer)

    def _show_columns(self, scores: Callable[..., Any] | None) -> None:
        """Call the user's criteria for every column that all growing rows have reached, in order."""
        while True:
            lengths = self.lengths
            if stuck := [row for row in sorted(self._stuck) if lengths[row] <= self._shown]:
                raise RuntimeError(
                    f"probability tensor contains either `inf`, `nan` or element < 0: token {self._shown} of row "
                    f"{stuck[0]} cannot be sampled, because all its scores are -inf, or one is inf or nan. Check the "
                    "temperature, the logits processors and the model's precision."
                )
            growing = [length for length, done in zip(lengths, self.done, strict=True) if not done]
            if self._shown >= min(growing, default=max(lengths)):
                return
            self._shown += 1
            try:
                stops = self._ask_criteria(scores)
            except StopIteration:
                self.interrupt()
                return
            self._stopped = [was or now for was, now in zip(self._stopped, stops, strict=True)]
            if self._rows_pause or all(self._stopped):
                for row, is_stopped in enumerate(self._stopped):
                    if is_stopped:
                        self._end(row)

    def _ask_criteria(self, scores: Callable[..., Any] | None) -> list[bool]:
        """Return for each row whether a criterion of the user stops it at the last column that is shown."""
        ids = self.tokens[:, : self._shown]
        of_columns = None if scores is None else scores(self, self._shown - self.prompt_length)
        answers = [self._answer(criterion(ids, of_columns)) for criterion in self._slow]
        stops = [any(column) for column in zip(*answers, strict=True)] or self._stopped
        if self._ranks is not None:  # a criterion may depend on the clock, and ranks that disagree would deadlock
            stops = list(map(bool, self._ranks.first(stops)))
        return stops

    def _end(self, row: int) -> None:
        """End a row at the last column that is shown."""
        self.done[row] = True
        self._stuck.discard(row)
        self.buffer.cut(row, self._shown - self.prompt_length)

    def interrupt(self) -> None:
        """End all rows at their present length, or at the last column that the user's criteria were shown."""
        self.interrupted = True
        self.done = [True] * self.batch_size
        if self._slow:
            for row in range(self.batch_size):
                self._end(row)

    def _answer(self, answer: Any) -> list[bool]:
        """Return the result of a criterion as one value for each row."""
        stops = torch.as_tensor(answer).bool().flatten().tolist()
        if len(stops) not in (1, self.batch_size):
            raise ValueError(
                f"a stopping criterion returned {len(stops)} values for {self.batch_size} rows: expected one per row, "
                "or a single one. Correct the criterion."
            )
        return stops * (self.batch_size // len(stops))

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


PerRow = list[list[torch.Tensor]]


class Outputs:
    """Keep scores and logits of emitted tokens, row by row, and build the result of `generate`."""

    def __init__(self, config: GenerationConfig, batch_size: int):
        self.as_dict = bool(config.return_dict_in_generate)
        self.wants_scores = bool(self.as_dict and config.output_scores)
        self.wants_logits = bool(self.as_dict and config.output_logits)
        self._scores: PerRow = [[] for _ in range(batch_size)]
        self._logits: PerRow = [[] for _ in range(batch_size)]
        self._columns: list[torch.Tensor] = []  # scores of columns, made when they are asked for

    def keep(self, scores: torch.Tensor | None, logits: torch.Tensor, path: torch.Tensor, counts: list[int]) -> None:
        """Keep scores and logits of the first `counts[b]` tokens that a step accepted in each row.

        Processed scores `(B, M, V)` are those along `path` `(B, M)`, raw logits `(B, N, V)` those of every node. What
        follows the end of a row is not returned.
        """
        if self.wants_scores and scores is not None:
            _extend(self._scores, scores, counts)
        if self.wants_logits:
            _extend(self._logits, along_path(logits.float(), path), counts)

    def result(
        self, sequences: Sequences, cache: Any, stats: SpeculationStats
    ) -> GenerateDecoderOnlyOutput | torch.LongTensor:
        """Return the result of `generate`. With `return_dict_in_generate`, its attribute `speculation` is `stats`."""
        tokens = sequences.output()
        if not self.as_dict:
            return tokens
        count = max(map(len, sequences.generated))
        output = GenerateDecoderOnlyOutput(
            sequences=tokens,
            scores=self.scores_of(sequences, count) if any(self._scores) else None,
            logits=_columns(self._logits, sequences, range(count)) if any(self._logits) else None,
            **{CACHE_NAME: cache},
        )
        output.speculation = stats
        return output

    def scores_of(self, sequences: Sequences, count: int) -> tuple[torch.Tensor, ...]:
        """Return the scores `(batch, vocab)` of the first `count` generated columns, which do not change any more."""
        self._columns += _columns(self._scores, sequences, range(len(self._columns), count))
        return tuple(self._columns)


def _extend(rows: PerRow, values: torch.Tensor, counts: list[int]) -> None:
    for row, count in enumerate(counts):
        rows[row].extend(values[row, :count].unbind(0))


def _columns(rows: PerRow, sequences: Sequences, places: range) -> tuple[torch.Tensor, ...]:
    """Return one `(batch, vocab)` tensor per generated place, with zeros for rows that have ended before it."""
    filler = torch.zeros_like(next(row[0] for row in rows if row))
    pairs = list(zip(rows, sequences.generated, strict=True))
    return tuple(
        torch.stack([row[place] if place < len(tokens) else filler for row, tokens in pairs]) for place in places
    )
