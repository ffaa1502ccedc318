"""Answers: from the tokens of a request to pieces of text, log probabilities and calls of tools, and to the API's JSON.

A text that ends an answer is not part of it. Text that may be the beginning of one is held back.
"""

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from transformers import GenerationConfig
from transformers.cli.serving.response import _ResponseStreamBuilder, compute_usage
from transformers.cli.serving.utils import ReasoningText, ToolCall, response_events_to_chunks
from transformers.generation.streamers import BaseStreamer

from ...streaming import IncrementalDecoder

# The API's number for a token that is never chosen; JSON has no infinity.
LEAST_LOGPROB = -9999.0


@dataclass
class Told:
    """A token with its log probability, and those of the likeliest tokens."""

    token: str
    logprob: float
    top: list[tuple[str, float]]


@dataclass
class Text:
    """A part of an answer that is shown."""

    text: str
    told: list[Told] = field(default_factory=list)


# A `Text`, a `ReasoningText` or a `ToolCall`.
Piece: TypeAlias = Any


class Choice(BaseStreamer):
    """One answer while it is written. The thread of the model puts tokens, and the loop of the server reads pieces.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Tokenizer of the model.
        config (`GenerationConfig`): Settings of the request.
        stops (`Sequence[str]`): Texts that end the answer.
        tops (`int`, *optional*): Number of the likeliest tokens that are told; `None` tells no log probabilities.
        parser (`ResponseParser`, *optional*): Reads reasoning and calls of tools from the text.
        is_one_call (`bool`): Whether the answer ends with the first call of a tool.

    Attributes:
        count (`int`): Number of tokens so far.
        reason (`str`): Why the answer has ended, in the words of the API.
    """

    def __init__(
        self,
        tokenizer: Any,
        config: GenerationConfig,
        stops: Sequence[str] = (),
        tops: int | None = None,
        parser: Any = None,
        is_one_call: bool = False,
    ):
        self.tokenizer, self.stops, self.tops, self.parser = tokenizer, stops, tops, parser
        self.is_one_call, self.most = is_one_call, config.max_new_tokens
        ends = config.eos_token_id
        self.ends = frozenset(ends if isinstance(ends, list) else [ends])
        self.count, self.reason = 0, "length"
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=parser is None)
        self._loop, self._queue = asyncio.get_running_loop(), asyncio.Queue[Any]()
        self._logits = deque[torch.Tensor]()
        self._expects_prompt = True
        self._held, self._told, self._is_stopped = "", list[Told](), False
        self.request: Any = None

    def follow(self, request: Future) -> None:
        """Read until this request has ended."""
        self.request = request
        request.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._queue.put_nowait, None))

    def on_logits(self, logits: torch.Tensor) -> None:
        """Take the logits `(n, vocab_size)` of the next tokens, on the thread of the model."""
        self._logits.extend(logits.float().log_softmax(-1).cpu())

    def put(self, value: torch.Tensor) -> None:
        """Take a token, on the thread of the model. The first call has the prompt."""
        if self._expects_prompt:
            self._expects_prompt = False
            return
        for token in value.flatten().tolist():
            told = None if self.tops is None else self._tell(token, self._logits.popleft())
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (token, told))

    def end(self) -> None:
        """Do nothing: the request ends after its stream."""

    def _tell(self, token: int, logprobs: torch.Tensor) -> Told:
        best = logprobs.topk(self.tops or 0)
        values = [max(value, LEAST_LOGPROB) for value in (float(logprobs[token]), *best.values.tolist())]
        names = [self.tokenizer.decode([one]) for one in (token, *best.indices.tolist())]
        return Told(names[0], values[0], list(zip(names[1:], values[1:], strict=True)))

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield the parts of the answer.

        Raises:
            Exception: What has ended the request.
            CancelledError: If the request was cancelled.
        """
        for piece in self._events([] if self.parser is None else self.parser.initial_events):
            yield piece
        while (item := await self._queue.get()) is not None:
            if self._is_over:  # the model ends the text itself, with the same token or the next ones
                continue
            token, told = item
            self.count += 1
            if token in self.ends:
                self.reason = "tool_calls" if self.reason == "tool_calls" else "stop"
            elif told is not None:
                self._told.append(told)
            for piece in self._parsed(self._decoder.feed(token)):
                yield piece
            if self._has_its_call:
                self.request.cancel()
        if not self.request.cancelled():
            self.request.result()
        elif not self._is_over:
            raise asyncio.CancelledError
        if not self._is_over:
            for piece in self._rest():
                yield piece
            if self.reason == "length" and self.count < self.most:  # by a criterion of the model's settings
                self.reason = "stop"

    @property
    def _has_its_call(self) -> bool:
        """Whether the answer has ended with its only call of a tool."""
        return self.is_one_call and self.reason == "tool_calls"

    @property
    def _is_over(self) -> bool:
        """Whether nothing more is shown."""
        return self._is_stopped or self._has_its_call

    def _rest(self) -> Iterator[Piece]:
        yield from self._parsed(self._decoder.end())
        if self.parser is not None:
            try:
                yield from self._events(self.parser.finalize()[1])
            except (ValueError, RuntimeError):
                pass  # the text ends within a call, which is no call then
        if self._held or self._told:
            yield Text(self._held, self._told)

    def _parsed(self, text: str) -> Iterator[Piece]:
        if self.parser is None:
            yield from self._shown(text)
        elif text:
            yield from self._events(self.parser.feed(text))

    def _events(self, events: list[dict[str, Any]]) -> Iterator[Piece]:
        for item in response_events_to_chunks(events):
            if self._is_over:
                return
            if isinstance(item, ToolCall):
                self.reason, self._told = "tool_calls", []
                yield item
            elif isinstance(item, ReasoningText):
                self._told = []
                yield item
            else:
                yield from self._shown(item)

    def _shown(self, text: str) -> Iterator[Piece]:
        """Yield what can be shown after more text: all before a stop, or before what may be the beginning of one."""
        held = self._held + text
        places = [place for stop in self.stops if (place := held.find(stop)) >= 0]
        if places:
            self.reason, self._is_stopped, count = "stop", True, min(places)
        else:
            count = len(held) - max((_common_end(held, stop) for stop in self.stops), default=0)
        self._held = "" if places else held[count:]
        if count:
            told, self._told = self._told, []
            yield Text(held[:count], told)


def _common_end(text: str, stop: str) -> int:
    """Return the length of the longest end of a text that is a beginning of another one.

    >>> _common_end("one two", "two three")
    3
    """
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


async def together(choices: Sequence[Choice]) -> AsyncIterator[tuple[int, Piece | None]]:
    """Yield the pieces of several answers with their numbers, as they come; `None` when one has ended."""
    queue = asyncio.Queue[Any]()

    async def read(place: int, choice: Choice) -> None:
        try:
            async for piece in choice.pieces():
                queue.put_nowait((place, piece))
            queue.put_nowait((place, None))
        except BaseException as error:
            queue.put_nowait((place, error))

    tasks = [asyncio.create_task(read(place, choice)) for place, choice in enumerate(choices)]
    left = len(tasks)
    try:
        while left:
            place, piece = await queue.get()
            if isinstance(piece, BaseException):
                raise piece
            left -= piece is None
            yield place, piece
    finally:
        for task, choice in zip(tasks, choices, strict=True):
            task.cancel()
            choice.request.cancel()


def line(data: dict[str, Any]) -> str:
    """Return an event of a stream."""
    return f"data: {json.dumps(data)}\n\n"


class Answer:
    """The JSON of an answer: all choices of one request, of a chat.

    Args:
        name (`str`): Id of the request.
        model (`str`): Name of the model.
        choices (`list[Choice]`): The answers.
        prompt_tokens (`int`): Number of tokens of all prompts.
    """

    kind, part, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"
    echoes: Sequence[str] = ()  # prompts before their continuations

    def __init__(self, name: str, model: str, choices: list[Choice], prompt_tokens: int):
        self.name, self.model, self.choices, self.prompt_tokens = name, model, choices, prompt_tokens
        self.created = int(time.time())

    @property
    def usage(self) -> dict[str, Any]:
        count, reused = sum(choice.count for choice in self.choices), self.choices[0].request.reused
        tokens = {"prompt_tokens": self.prompt_tokens, "completion_tokens": count}
        tokens |= {"total_tokens": self.prompt_tokens + count}
        return tokens | {"prompt_tokens_details": {"cached_tokens": reused}}

    def _object(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        fields = {"id": f"{self.prefix}{self.name}", "object": kind, "created": self.created, "model": self.model}
        return fields | {"choices": choices} | more

    async def whole(self) -> dict[str, Any]:
        """Return the answer when it is complete."""
        found: list[list[Piece]] = [[] for _ in self.choices]
        async for place, piece in together(self.choices):
            if piece is not None:
                found[place].append(piece)
        choices = [
            {"index": place, "finish_reason": self.choices[place].reason} | self.complete(place, pieces)
            for place, pieces in enumerate(found)
        ]
        return self._object(self.kind, choices, usage=self.usage)

    async def stream(self, has_usage: bool) -> AsyncIterator[str]:
        """Yield the events of a stream, which ends with the usage."""
        for place in range(len(self.choices)):
            for start in self.starts(place):
                yield line(self._object(self.part, [{"index": place, "finish_reason": None} | start]))
        calls = [0] * len(self.choices)
        last: dict[str, Any] = {} if has_usage else {"usage": None}
        left = len(self.choices)
        async for place, piece in together(self.choices):
            left -= piece is None
            if piece is None:
                if not left and not has_usage:
                    last = {"usage": self.usage}
                ended = {"index": place, "finish_reason": self.choices[place].reason} | self.empty()
                yield line(self._object(self.part, [ended], **last))
                continue
            delta = self.delta(place, piece, calls[place])
            calls[place] += isinstance(piece, ToolCall)
            yield line(self._object(self.part, [{"index": place, "finish_reason": None} | delta]))
        if has_usage:
            yield line(self._object(self.part, [], usage=self.usage))
        yield "data: [DONE]\n\n"

    def starts(self, place: int) -> Iterator[dict[str, Any]]:
        """Yield what a stream has before the first piece."""
        yield {"delta": {"role": "assistant", "content": ""}}

    def empty(self) -> dict[str, Any]:
        """Return a part without text."""
        return {"delta": {}}

    def delta(self, place: int, piece: Piece, calls: int) -> dict[str, Any]:
        """Return a piece as a part of a stream, after so many calls of tools."""
        if isinstance(piece, ToolCall):
            return {"delta": {"tool_calls": [{"index": calls} | self._call(place, calls, piece)]}}
        if isinstance(piece, ReasoningText):
            return {"delta": {"reasoning_content": piece}}
        return {"delta": {"content": piece.text}} | self.logprobs(place, piece.told)

    def complete(self, place: int, pieces: list[Piece]) -> dict[str, Any]:
        """Return a choice of which all pieces are known."""
        texts = [piece for piece in pieces if isinstance(piece, Text)]
        message: dict[str, Any] = {"role": "assistant", "content": "".join(piece.text for piece in texts)}
        if thoughts := "".join(piece for piece in pieces if isinstance(piece, ReasoningText)):
            message["reasoning_content"] = thoughts
        if calls := [piece for piece in pieces if isinstance(piece, ToolCall)]:
            message["content"] = message["content"] or None
            message["tool_calls"] = [self._call(place, number, call) for number, call in enumerate(calls)]
        return {"message": message} | self.logprobs(place, [told for piece in texts for told in piece.told])

    def _call(self, place: int, number: int, call: ToolCall) -> dict[str, Any]:
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": f"call_{self.name}_{place}_{number}", "type": "function", "function": function}

    def logprobs(self, place: int, told: list[Told]) -> dict[str, Any]:
        """Return the log probabilities of tokens, if they are told."""
        if self.choices[place].tops is None:
            return {}

        def of(token: str, logprob: float) -> dict[str, Any]:
            return {"token": token, "logprob": logprob, "bytes": list(token.encode(errors="surrogateescape"))}

        tokens = [of(one.token, one.logprob) | {"top_logprobs": [of(*other) for other in one.top]} for one in told]
        return {"logprobs": {"content": tokens, "refusal": None}}


class Continuation(Answer):
    """The JSON of continued texts, each after its prompt if that is repeated."""

    kind = part = "text_completion"
    prefix = "cmpl-"

    def starts(self, place: int) -> Iterator[dict[str, Any]]:
        if self.echoes:
            yield {"text": self.echoes[place], "logprobs": None}

    def empty(self) -> dict[str, Any]:
        return {"text": "", "logprobs": None}

    def delta(self, place: int, piece: Any, calls: int) -> dict[str, Any]:
        return {"text": piece.text, "logprobs": None} | self.logprobs(place, piece.told)

    def complete(self, place: int, pieces: list[Any]) -> dict[str, Any]:
        text = "".join([*self.echoes[place : place + 1], *(piece.text for piece in pieces)])
        told = [one for piece in pieces for one in piece.told]
        return {"text": text, "logprobs": None} | self.logprobs(place, told)

    def logprobs(self, place: int, told: list[Told]) -> dict[str, Any]:
        if self.choices[place].tops is None:
            return {}
        sizes = [len(one.token) for one in told]
        fields = {"tokens": [one.token for one in told], "token_logprobs": [one.logprob for one in told]}
        offsets = [sum(sizes[:number]) for number in range(len(sizes))]
        tops = [dict(reversed(one.top)) for one in told]
        return {"logprobs": fields | {"top_logprobs": tops, "text_offset": offsets}}


class Response(Answer):
    """The JSON of the Responses API, as `transformers serve` writes it."""

    async def stream(self, has_usage: bool = False) -> AsyncIterator[str]:
        same = {"id": f"resp_{self.name}", "created_at": self.created, "model": self.model, "object": "response"}
        same |= {"tools": [], "tool_choice": "auto", "parallel_tool_calls": not self.choices[0].is_one_call}
        builder = _ResponseStreamBuilder(request_id=self.name, response_defaults=same)
        yield "".join(builder.start_response())
        calls = 0
        async for _, piece in together(self.choices):
            yield "".join(self._events(builder, piece, calls))
            calls += isinstance(piece, ToolCall)
        yield "".join(builder.completed(compute_usage(self.prompt_tokens, self.choices[0].count)))

    def _events(self, builder: _ResponseStreamBuilder, piece: Piece | None, calls: int) -> Iterator[str]:
        if isinstance(piece, ReasoningText):
            if not builder.reasoning_open:
                yield from builder.start_reasoning()
            yield from builder.reasoning_delta(piece)
            return
        if builder.reasoning_open:
            yield from builder.finish_reasoning()
        if isinstance(piece, ToolCall):
            if builder.message_open:
                yield from builder.finish_message()
            yield from builder.tool_call(f"call_{self.name}_{calls}", piece.name, piece.arguments)
            return
        if not builder.message_open and (piece is not None or builder.message_item is None):
            yield from builder.start_message()
        if piece is not None:
            yield from builder.text_delta(piece.text)
        elif builder.message_open:
            yield from builder.finish_message()

    async def whole(self) -> dict[str, Any]:
        *_, last = [event async for event in self.stream()]
        found: dict[str, Any] = json.loads(last.removeprefix("data: "))["response"]
        return found
