"""The routes of `hf-longspec serve`, and their errors: 4xx for what a client can mend."""

import asyncio
import copy
import re
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any
from uuid import uuid4

from anyio import CapacityLimiter, to_thread
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler

from ...cli import PYDANTIC, one_line
from ...structured_output import StructuredOutput
from .answers import Cancelled, Decoder, Job
from .requests import ChatRequest, CompletionRequest, ImagePart, Sampling

MIB = 2**20
# Prompts that are tokenized at the same time. A text takes up to 200 times its size then.
READERS = 2
# Of nginx: the client has closed the request.
CLIENT_LEFT = 499


@dataclass(frozen=True)
class Limits:
    """Bounds on what clients may ask for."""

    body: int  # MiB of a request
    tokens: int  # new tokens of a request
    waiting: int  # requests that wait for another one
    cache: int  # MiB of keys and values of texts before the last one


class OneRequest:
    """A handler of transformers for one request.

    Its coroutine reads the request and returns the call that generates: reading takes a thread, so that a long prompt
    does not hold up other requests, and generation needs the loop of the server.
    """

    def __init__(self, models: Any, job: Job, request: Any, most: int):
        super().__init__(models, job)  # type: ignore[call-arg]
        self.request, self._job = request, job
        self._generation = partial(request.generation, vocab_size=job.decoder.vocab_size, most=most)

    def _resolve_model(self, body: dict[str, Any]) -> Any:
        name, model, processor = super()._resolve_model(body)  # type: ignore[misc]
        tokenizer = getattr(processor, "tokenizer", processor)
        if structure := self.request.structure:
            ends = self._job.decoder.model.generation_config.eos_token_id
            self._job.processors = {"logits_processor": [StructuredOutput(tokenizer, **structure, eos_token_id=ends)]}
        return name, model, processor

    def _validate_request(self, body: dict[str, Any]) -> None:
        """Do nothing: fields have been checked."""

    def _build_generation_config(self, body: dict[str, Any], defaults: Any, use_cb: bool = False) -> Any:
        return self._generation(defaults)

    def _streaming(self, *args: Any, **kwargs: Any) -> Any:
        async def stream() -> Any:
            return super(OneRequest, self)._streaming(*args, **kwargs)  # type: ignore[misc]

        return stream

    async def _non_streaming(self, *args: Any, **kwargs: Any) -> Any:
        return partial(super()._non_streaming, *args, **kwargs)  # type: ignore[misc]


class Completion(OneRequest, CompletionHandler):
    """Continues a text."""


class Chat(OneRequest, ChatCompletionHandler):
    """Answers a chat."""

    def _resolve_model(self, body: dict[str, Any]) -> Any:
        name, model, processor = super()._resolve_model(body)
        template = getattr(processor, "chat_template", None)
        if template is None:
            remedy = "Save one with the tokenizer, or send the prompt to /v1/completions."
            raise HTTPException(400, f"messages: the tokenizer of {name} has no chat template. {remedy}")
        parts = (
            part for message in self.request.messages if isinstance(message.content, list) for part in message.content
        )
        if not hasattr(processor, "image_processor") and any(isinstance(part, ImagePart) for part in parts):
            raise HTTPException(400, f"messages: {name} reads no images. Send text alone.")
        own = signature(processor.apply_chat_template).parameters.keys() - {"tools"}
        for key in [*(self.request.chat_template_kwargs or ()), *(["tools"] if self.request.tools else [])]:
            if key in own or not re.search(rf"\b{re.escape(key)}\b", str(template)):
                raise HTTPException(400, f"{key}: the chat template of {name} does not use it. Leave it out.")
        return name, model, reading_calls(processor, model) if self.request.must_call else processor


def reading_calls(processor: Any, model: Any) -> Any:
    """Return a copy of a processor that reads an answer as the call of a tool, or as text if it was cut off."""
    processor = copy.copy(processor)
    tokenizer = getattr(processor, "tokenizer", processor)
    if tokenizer is not processor:
        tokenizer = processor.tokenizer = copy.copy(tokenizer)
    ends = model.generation_config.eos_token_id
    ends = [tokenizer.decode([end]) for end in (ends if isinstance(ends, list) else [ends])]
    call = r'\{"name": "(?P<name>[^"]*)", "arguments": (?P<arguments>\{.*\})\}'
    function = {"name": "{name}", "arguments": "{arguments}"}
    tool_calls = {"open_pattern": f"{call}(?={'|'.join(map(re.escape, ends))})", "close": ends, "repeats": True}
    tool_calls |= {"content": "text", "transform": {"type": "function", "function": function}}
    fields = {"content": {"close": ends, "content": "text"}, "tool_calls": tool_calls}
    # the answer begins where the prompt ends, whatever that says
    tokenizer.response_template = {"start_anchor_pattern": r"\Z", "fields": fields}
    return processor


class Wanted(BaseModel):
    """A request to load a model."""

    model: str


class Routes:
    """The application of the server; `models` is a `ModelManager` with one model."""

    def __init__(self, models: Any, decoder: Decoder, limits: Limits):
        self.models, self.decoder, self.limits = models, decoder, limits
        self.name = models.force_model
        self._readers = CapacityLimiter(READERS)
        self.app = FastAPI(openapi_url=None, redirect_slashes=False)
        self.app.add_middleware(RequestBodyLimitMiddleware, max_body_size=limits.body * MIB)
        self.app.add_exception_handler(AnyHTTPException, refused)
        self.app.add_exception_handler(RequestValidationError, malformed)
        self.app.post("/v1/chat/completions")(self.chat)
        self.app.post("/v1/completions")(self.complete)
        self.app.post("/load_model")(self.load_model)
        self.app.get("/v1/models")(self.list_models)
        self.app.get("/health")(self.health)
        self.app.get("/metrics")(decoder.metrics.page)

    async def chat(self, http: Request, request: ChatRequest) -> Response:
        return await self._answer(Chat, http, request)

    async def complete(self, http: Request, request: CompletionRequest) -> Response:
        return await self._answer(Completion, http, request)

    async def load_model(self, wanted: Wanted) -> Response:
        """Say in the words of `transformers serve` that the model is loaded, which `transformers chat` asks first."""
        if wanted.model != self.name:
            raise HTTPException(403, f"This server has one model. Ask for {self.name!r}.")
        event = JSONResponse({"status": "ready", "model": self.name, "cached": True}).body
        return Response(b"data: " + bytes(event) + b"\n\n", media_type="text/event-stream")

    async def list_models(self) -> dict[str, Any]:
        model = {"id": self.name, "object": "model", "created": 0, "owned_by": "local"}
        return {"object": "list", "data": [model]}

    async def health(self) -> dict[str, str]:
        return {"status": "ok"}

    async def _answer(self, kind: type[OneRequest], http: Request, request: Sampling) -> Response:
        if len(self.decoder.jobs) >= self.decoder.rows + self.limits.waiting:
            raise HTTPException(429, f"{self.limits.waiting} requests wait already. Try again later.")
        job = Job(self.decoder, request.seed)
        job.watch(http.receive)
        handler: Any = kind(self.models, job, request, self.limits.tokens)
        body = request.model_dump(exclude_unset=True)
        try:
            start = await to_thread.run_sync(read, handler, body, limiter=self._readers)
            response: Response = await start()
        except Cancelled:
            return Response(status_code=CLIENT_LEFT)
        except BaseException as error:
            job.end()
            if isinstance(error, HTTPException) or not isinstance(error, Exception):
                raise
            status = 400 if isinstance(error, ValueError) else 500  # `generate` says so of its arguments
            raise HTTPException(status, one_line(error)) from error
        return response


def read(handler: Any, body: dict[str, Any]) -> Any:
    """Return the call that generates, or refuse what the chat template, the tokenizer or the model cannot read."""
    try:
        return asyncio.run(handler.handle_request(body, str(uuid4())))
    except HTTPException:
        raise
    except Exception as error:
        raise HTTPException(400, f"The request cannot be read: {one_line(error)}") from error


def _error(status: int, message: str) -> JSONResponse:
    """Return an error as clients of the API read it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    message = message.encode("utf-8", "backslashreplace").decode()  # JSON of a client may have lone surrogates
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status)


async def refused(http: Request, error: Any) -> Response:
    return _error(error.status_code, str(error.detail))


async def malformed(http: Request, error: Any) -> Response:
    """Answer a body that is not JSON, or the first field that is wrong: its name, value and rule."""
    first = error.errors()[0]
    name = f"{'.'.join(map(str, first['loc'][1:])):.100}" or "the body"
    if first["type"] == "extra_forbidden":
        return _error(400, f"{name}: this server has no such field. Leave it out.")
    if first["type"] == "json_invalid":
        return _error(400, f"The body is not JSON: {first['ctx']['error']} at character {name}.")
    return _error(400, f"{name}={first['input']!a:.60}: {first['msg'].removeprefix(PYDANTIC)}.")
