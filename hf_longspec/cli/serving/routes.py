"""The routes of `hf-longspec serve`, and their errors: 4xx for what a client can mend."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import uuid4

from anyio import CapacityLimiter, to_thread
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.middleware.cors import CORSMiddleware

from ...cli import PYDANTIC, one_line
from .answers import Answer, Choice, Continuation, line
from .answers import Response as ResponseAnswer
from .engine import Engine
from .fields import ChatRequest, CompletionRequest, ResponseRequest, Sampling
from .prompts import Prompt, Reader

MIB = 2**20
# Prompts that are tokenized at the same time. A text takes up to 200 times its size then.
READERS = 2
# Of nginx: the client has closed the request.
CLIENT_LEFT = 499
# Seconds after which a client may ask again when the server is full.
RETRY_AFTER = 5


@dataclass(frozen=True)
class Limits:
    """Bounds on what clients may ask for, and who they are."""

    body: int  # MiB of a request
    tokens: int  # new tokens of a request
    waiting: int  # requests that wait for another one
    cache: int  # MiB of keys and values of earlier texts
    api_key: str | None = None
    origins: tuple[str, ...] = ()  # of pages in browsers that may ask


class Wanted(BaseModel):
    """A request to load a model."""

    model: str


class Routes:
    """The application of the server.

    Args:
        engine (`Engine`): The model with its draft.
        processor (`PreTrainedTokenizerBase` or `ProcessorMixin`): Its tokenizer or processor.
        name (`str`): Its name in requests.
        limits (`Limits`): Bounds on requests.
    """

    def __init__(self, engine: Engine, processor: Any, name: str, limits: Limits):
        self.engine, self.limits, self.name = engine, limits, name
        self.reader = Reader(engine, processor, name, limits.tokens)
        self._readers = CapacityLimiter(READERS)
        self.app = FastAPI(openapi_url=None, redirect_slashes=False, lifespan=self._lifespan)
        self.app.add_middleware(RequestBodyLimitMiddleware, max_body_size=limits.body * MIB)
        if limits.origins:
            self.app.add_middleware(
                CORSMiddleware, allow_origins=limits.origins, allow_methods=["GET", "POST"], allow_headers=["*"]
            )
        self.app.add_exception_handler(AnyHTTPException, refused)
        self.app.add_exception_handler(RequestValidationError, malformed)
        known = [Depends(self._know)]
        self.app.post("/v1/chat/completions", dependencies=known)(self.chat)
        self.app.post("/v1/completions", dependencies=known)(self.complete)
        self.app.post("/v1/responses", dependencies=known)(self.respond)
        self.app.post("/load_model", dependencies=known)(self.load_model)
        self.app.get("/v1/models", dependencies=known)(self.list_models)
        self.app.get("/v1/models/{name:path}", dependencies=known)(self.describe_model)
        self.app.get("/metrics", dependencies=known)(engine.metrics.page)
        self.app.get("/health")(self.health)

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        yield
        await to_thread.run_sync(self.engine.close)

    async def _know(self, http: Request) -> None:
        """Refuse clients without the key."""
        given = http.headers.get("authorization", "").removeprefix("Bearer ")
        if self.limits.api_key and not secrets.compare_digest(given.encode("latin-1"), self.limits.api_key.encode()):
            raise HTTPException(401, "The API key is wrong. Send that of the server as `Authorization: Bearer KEY`.")

    async def chat(self, http: Request, request: ChatRequest) -> Response:
        return await self._answer(Answer, self.reader.chat, http, request)

    async def complete(self, http: Request, request: CompletionRequest) -> Response:
        return await self._answer(Continuation, self.reader.completion, http, request)

    async def respond(self, http: Request, request: ResponseRequest) -> Response:
        try:
            chat = request.chat()
        except ValidationError as error:
            raise RequestValidationError([one | {"loc": ("body", *one["loc"])} for one in error.errors()]) from error
        except (LookupError, TypeError, AttributeError) as error:  # of items without what their type has
            raise HTTPException(400, f"input: {one_line(error)} in an item. Correct it, or leave it out.") from error
        return await self._answer(ResponseAnswer, self.reader.chat, http, chat)

    async def load_model(self, wanted: Wanted) -> Response:
        """Say in the words of `transformers serve` that the model is loaded, which `transformers chat` asks first."""
        if wanted.model != self.name:
            raise HTTPException(403, f"This server has one model. Ask for {self.name!r}.")
        return Response(line({"status": "ready", "model": self.name, "cached": True}), media_type="text/event-stream")

    async def list_models(self) -> dict[str, Any]:
        return {"object": "list", "data": [await self.describe_model(self.name)]}

    async def describe_model(self, name: str) -> dict[str, Any]:
        if name != self.name:
            raise HTTPException(404, f"This server has one model. Ask for {self.name!r}.")
        return {"id": self.name, "object": "model", "created": 0, "owned_by": "local"}

    async def health(self) -> dict[str, str]:
        return {"status": "ok"}

    async def _answer(
        self, kind: type[Answer], read: Callable[[Any], list[Prompt]], http: Request, request: Sampling
    ) -> Response:
        if request.model not in (None, self.name):
            raise HTTPException(400, f"model={request.model!r}: this server has one model. Ask for {self.name!r}.")
        room = self.engine.rows + self.limits.waiting
        wanted = request.n * (len(request.prompts) if isinstance(request, CompletionRequest) else 1)
        if wanted > room:
            raise HTTPException(400, f"The request asks for {wanted} answers, and this server has room for {room}.")
        if len(self.engine.jobs) + wanted > room:
            waiting = {"Retry-After": str(RETRY_AFTER)}
            raise HTTPException(429, f"{self.limits.waiting} requests wait already. Try again later.", waiting)
        name = uuid4().hex
        try:
            prompts = await to_thread.run_sync(read, request, limiter=self._readers)
        except Exception as error:
            raise HTTPException(400, f"The request cannot be read: {one_line(error)}") from error
        answer = await self._begin(kind, name, prompts, request)
        if isinstance(request, CompletionRequest) and request.echo:
            answer.echoes = [prompt.text for prompt in prompts for _ in range(request.n)]
        if request.stream:
            has_usage = request.stream_options is not None and request.stream_options.include_usage
            return StreamingResponse(guarded(answer.stream(has_usage)), media_type="text/event-stream")
        return await until_left(http, answer.whole())

    async def _begin(self, kind: type[Answer], name: str, prompts: list[Prompt], request: Sampling) -> Answer:
        """Submit all answers of a request; each further one of a prompt has the next seed."""
        choices = list[Choice]()
        try:
            for prompt in prompts:
                for number in range(request.n):
                    parser = None if prompt.make_parser is None else prompt.make_parser()
                    tokenizer, tops = self.reader.tokenizer, request.tops
                    is_one_call = not getattr(request, "parallel_tool_calls", True)
                    choice = Choice(tokenizer, prompt.config, request.stops, tops, parser, is_one_call)
                    seed = None if request.seed is None else request.seed + number
                    submit = partial(
                        self.engine.submit,
                        prompt.inputs,
                        prompt.config,
                        make_processors=prompt.processors,
                        streamer=choice,
                        tokenizer=tokenizer,
                        seed=seed,
                        on_logits=None if tops is None else choice.on_logits,
                        is_shared=request.n > 1,
                    )
                    choice.follow(await to_thread.run_sync(submit))
                    choices.append(choice)
        except BaseException as error:
            for choice in choices:
                choice.request.cancel()
            raise failed(error) from error
        return kind(name, self.name, choices, sum(prompt.inputs["input_ids"].shape[-1] for prompt in prompts))


async def guarded(events: AsyncIterator[str]) -> AsyncIterator[str]:
    """Yield the events of a stream. An error is its last one."""
    try:
        async for event in events:
            yield event
    except Exception as error:
        yield line(_error(500, one_line(error)))


async def until_left(http: Request, answer: Any) -> Response:
    """Return an answer when it is complete, unless the client disconnects before."""

    async def left() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.create_task(answer), asyncio.create_task(left())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            return Response(status_code=CLIENT_LEFT)
        return JSONResponse(tasks[0].result())
    except Exception as error:
        raise failed(error) from error
    finally:
        for task in tasks:
            task.cancel()


def failed(error: BaseException) -> BaseException:
    """Return the status of an error: 400 for what `generate` says of its arguments, 500 for what it cannot do."""
    if not isinstance(error, Exception) or isinstance(error, HTTPException):
        return error
    return HTTPException(400 if isinstance(error, ValueError) else 500, one_line(error))


def _error(status: int, message: str) -> dict[str, Any]:
    """Return an error as clients of the API read it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    message = message.encode("utf-8", "backslashreplace").decode()  # JSON of a client may have lone surrogates
    return {"error": {"message": message, "type": kind, "code": status}}


async def refused(http: Request, error: Any) -> Response:
    return JSONResponse(_error(error.status_code, str(error.detail)), error.status_code, error.headers)


async def malformed(http: Request, error: Any) -> Response:
    """Answer a body that is not JSON, or the first field that is wrong: its name, value and rule."""
    first = error.errors()[0]
    name = f"{'.'.join(map(str, first['loc'][1:])):.100}"
    said = first["msg"].removeprefix(PYDANTIC)
    if first["type"] == "extra_forbidden":
        said = f"{name}: this server has no such field. Leave it out."
    elif first["type"] == "json_invalid":
        said = f"The body is not JSON: {first['ctx']['error']} at character {name}."
    elif first["type"] != "refused":
        said = f"{name}={first['input']!a:.60}: {said}." if name else f"the body: {said}."
    return JSONResponse(_error(400, said), 400)
