"""Requests that join and leave one running batch: [`Batcher`] decodes many prompts at once on a thread of its own."""

import copy
import gc
import os
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from threading import Condition, Thread, current_thread
from types import TracebackType
from typing import Any, Self

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList

from ..generation import route
from ..generation.cache import SpeculativeCache
from ..generation.call import GRAMMAR, HALF_PRECISION, HOOKS, PACKED, PROCESSORS, PROMPT_PROGRESS, Call
from ..generation.sequences import SpeculationStats
from ..generation.special_cases.grammar import is_grammar
from ..generation.target import TargetView
from ..modeling.plain.modeling_plain import PlainDraftModel
from ..prefix_cache import PrefixCache
from .slots import LentCache, RowSession, SlotSession


class Request(Future):
    """The future of one request. Its result is prompt and continuation, `(1, length)`, as `generate` returns them.

    `cancel()` works at any time. A request that runs leaves its slot before the next step.

    Attributes:
        speculation ([`SpeculationStats`], *optional*): Statistics of the request, once its prompt is being read.
        reused (`int`): Number of tokens of the prompt that earlier texts had, from then on.
    """

    speculation: SpeculationStats | None = None
    reused: int = 0
    is_shared = False  # whether other requests have its prompt
    _has_ended = False

    def __init__(self, work: Callable[..., Any], streamer: Any = None, is_alone: bool = False, forced: int = 0):
        super().__init__()
        # what is done in the turn of the request: its session is made for the target, or a function runs alone
        self.work: Callable[..., Any] | None = work
        # `forced` is the number of nodes that trees need for its grammar
        self.streamer, self.is_alone, self.forced = streamer, is_alone, forced
        self.waits = is_alone  # whether it begins when no other one runs

    def end(self, result: Any = None, error: BaseException | None = None) -> None:
        """Set the result, unless the request was cancelled or has ended. A stream without a result is ended."""
        if self._has_ended:
            return
        self._has_ended, self.work = True, None
        is_due = self.set_running_or_notify_cancel()
        if self.streamer is not None and (error is not None or not is_due):
            with suppress(BaseException):  # the streamer may be what failed
                self.streamer.end()
        if is_due:
            with suppress(BaseException):  # of callbacks, of which a future logs an `Exception` alone
                self.set_result(result) if error is None else self.set_exception(error)


@dataclass
class Reading:
    """The request whose prompt is being read, or that waits for a slot."""

    request: Request
    session: RowSession
    chunks: Iterator[list[torch.Tensor]]
    tails: list[torch.Tensor] | None = None  # what is left of the prompt when it was read
    is_ready: bool = False  # whether its first token was emitted


class Batcher:
    """Decode requests together, each as `generate` decodes it alone.

    Requests take the rows of one batch in the order of their arrival. When one ends, the next takes its row. Prompts
    are read in chunks between the steps of the rows that run. Rows may differ in all settings of `generate`. A request
    that fails ends alone. After an error of a whole step, such as one of memory, those that wait go on.

    ```python
    with Batcher(target, draft, rows=8, max_length=4096) as batcher:
        future = batcher.submit(input_ids, max_new_tokens=256, streamer=streamer)
        text = future.result()
        for output in batcher.map(prompts, max_new_tokens=256):
            ...
    ```

    One thread runs the model, and calls processors, criteria and streamers. Other calls of `generate` on the model wait
    until no request runs. At the end of the `with` block, requests that were submitted are waited for; after an error
    they are cancelled. A forked process has no such thread, and makes a Batcher of its own.

    Args:
        target (`PreTrainedModel`): The model.
        draft ([`DraftModel`], *optional*): The draft, or what `assistant_model` takes for one. `None` decodes without.
            Its settings are copied. Make another Batcher for others.
        rows (`int`, *optional*, defaults to 8): Number of requests that run at once.
        max_length (`int`, *optional*): Most tokens of a request, prompt included; by default the positions of the
            model. On a GPU, the cache has memory for so many tokens in `rows + 1` rows.
        chunk_size (`int`, *optional*, defaults to 512): Tokens of a prompt that are read between two steps. Prompts of
            targets with recurrent states are read whole without `prefixes`.
        prefixes ([`PrefixCache`], *optional*): Lends the longest beginning of each prompt that it has, and stores the
            texts that end well. Only the thread of the model uses it: `run_alone(prefixes.clear)` clears it.

    Attributes:
        rows (`int`): Number of requests that run at once.

    Raises:
        ValueError: If target or draft cannot be used, or not in a batch whose rows change.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: Any = None,
        rows: int = 8,
        max_length: int | None = None,
        chunk_size: int = 512,
        prefixes: PrefixCache | None = None,
    ):
        if draft is None:
            draft = PlainDraftModel.from_target(target)
        elif not getattr(draft, "_is_longspec_draft", False):
            draft = route.loaders[-1](draft, target)
        draft = copy.copy(getattr(draft, "chosen", draft))  # of an AutoDraft
        draft.generation_config = copy.deepcopy(draft.generation_config)  # steps have its shapes
        of_model: Any = getattr(target.config.get_text_config(), "max_position_embeddings", None)
        max_length = of_model if max_length is None else max_length
        for name, value, least in (("rows", rows, 1), ("max_length", max_length, 3), ("chunk_size", chunk_size, 2)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r}: expected an integer of at least {least}.")
        if prefixes is not None and prefixes.model is not target:
            raise ValueError("prefixes: a PrefixCache of another model. Make one for the target.")
        self.target, self.draft, self.chunk_size, self.prefixes = target, draft, chunk_size, prefixes
        self.rows, self.max_length = rows, max_length
        self._forced: int = draft.setting("forced_tokens")
        self._waiting: deque[Request] = deque()
        self._unfinished: set[Request] = set()
        self._running: dict[int, Request] = {}  # by slot
        self._reading: Reading | None = None
        self._session: Any = None  # the loop; `None` after an error, until a request needs it
        self._changed, self._is_closed, self._process = Condition(), False, os.getpid()
        begun: Future[None] = Future()
        self._thread = Thread(target=self._run, args=(begun,), name="hf_longspec.Batcher", daemon=True)
        self._thread.start()
        begun.result()

    def submit(
        self,
        input_ids: Any,
        *,
        streamer: Any = None,
        seed: int | None = None,
        on_logits: Callable[[torch.Tensor], None] | None = None,
        is_shared: bool = False,
        **settings: Any,
    ) -> Request:
        """Add a request, and return its future. Any thread may call it.

        Args:
            input_ids (`torch.LongTensor` or `list[int]`): One prompt, `(length,)` or `(1, length)`.
            streamer (`BaseStreamer`, *optional*): Gets the prompt and the tokens, on the thread of the model. It is
                ended after a failure or cancellation, too.
            seed (`int`, *optional*): Seed of sampling: the text is that of `generate` after `torch.manual_seed(seed)`,
                unless the draft accepts by rejection, where it also depends on what is drafted.
            on_logits (`Callable[[torch.Tensor], None]`, *optional*): Gets the target's logits `(n, vocab_size)` of the
                next tokens, before processors and before the streamer gets the tokens. A text may end before the last
                of them.
            is_shared (`bool`, *optional*): Whether other requests have the same prompt, which `prefixes` then stores
                once it was read.
            settings: Arguments of `generate`, such as `max_new_tokens`, `do_sample` or `logits_processor`.

        Raises:
            ValueError: If the settings are wrong, or cannot be served in a batch. What depends on the target as it is
                in the turn of the request, such as its hooks, is an error of the future.
        """
        self._refuse_forked()
        ids = torch.as_tensor(input_ids, dtype=torch.long, device=self.target.device)
        ids = ids[None] if ids.dim() == 1 else ids
        if ids.dim() != 2 or len(ids) != 1 or not ids.shape[1]:
            raise ValueError(f"input_ids has shape {tuple(ids.shape)}: expected one prompt. Submit prompts one by one.")
        source = None if seed is None else torch.Generator().manual_seed(seed)
        if (mask := settings.pop("attention_mask", None)) is not None and not bool(torch.as_tensor(mask).all()):
            raise ValueError("attention_mask has zeros: a row of the batch has no padding. Submit the tokens alone.")
        settings["attention_mask"] = torch.ones_like(ids)  # a padding token in a prompt is a token
        arguments = self._prepared(ids, settings)
        has_grammar = any(map(is_grammar, arguments["logits_processor"]))
        work = partial(self._opened, arguments, streamer, source, on_logits)
        request = Request(work, streamer, forced=self._forced if has_grammar else 0)
        request.is_shared = is_shared
        return self._add(request)

    def run_alone(self, function: Callable[[], Any]) -> Request:
        """Run a function on the thread of the model, in its turn, when no request runs; return its future."""
        self._refuse_forked()
        return self._add(Request(function, is_alone=True))

    def map(self, prompts: Iterable[Any], **settings: Any) -> Iterator[torch.Tensor]:
        """Yield the result of each prompt in order. No more prompts are read than twice the rows ahead of it."""
        prompts, ahead = iter(prompts), deque[Request]()
        try:
            while True:
                ahead += (self.submit(ids, **settings) for ids in islice(prompts, 2 * self.rows - len(ahead)))
                if not ahead:
                    return
                yield ahead.popleft().result()
        finally:
            for request in ahead:
                request.cancel()

    def close(self, cancel: bool = False) -> None:
        """Wait for all requests, or cancel them, and end the thread. Nothing can be submitted afterwards.

        On the thread of the model, as in a streamer, nothing is waited for: the thread ends after the requests.
        """
        if os.getpid() != self._process:  # the lock may be held for ever here
            return
        with self._changed:
            self._is_closed = True
            requests = list(self._unfinished)
            self._changed.notify_all()
        for request in requests if cancel else ():
            request.cancel()
        if current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(cancel=error is not None)

    def _refuse_forked(self) -> None:
        if (process := os.getpid()) != self._process:
            raise RuntimeError(
                f"process {process} is a fork of {self._process}, and the thread of this Batcher is there. Make a "
                "Batcher after the fork."
            )

    def _add(self, request: Request) -> Request:
        with self._changed:
            if self._is_closed:
                raise ValueError("the Batcher is closed. Submit before the end of its `with` block.")
            self._waiting.append(request)
            self._unfinished.add(request)
            self._changed.notify_all()
        request.add_done_callback(self._forget)  # type: ignore[arg-type]
        return request

    def _forget(self, request: Request) -> None:
        with self._changed:
            self._unfinished.discard(request)

    def _empty_call(self, rows: int, forced: int, known: Any) -> Call:
        """Return a call with a text of one token in each row, by which the target and the draft are checked.

        Its trees have room for so many `forced` tokens.
        """
        ids = torch.zeros(rows, 1, dtype=torch.long, device=self.target.device)
        config = GenerationConfig(max_length=self.max_length, do_sample=False)
        call = Call(self.target, self.draft, ids, LogitsProcessorList(), StoppingCriteriaList(), config, None, {})
        if known is not None:
            call.target.known = known
        if (reason := call.why_not()) is not None:
            raise ValueError(reason)
        if call.session_class is not None or call.target.special_cases:
            raise ValueError(f"{', '.join(call.target.special_cases)}: not supported in a Batcher. Call generate().")
        call.more_nodes = forced
        return call

    def _prepared(self, ids: torch.Tensor, settings: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments that `generate` makes of these settings for the loop, and refuse what has no row."""
        for name in ("assistant_model", "custom_generate"):
            if settings.get(name) is not None:
                raise ValueError(f"{name}: the draft is that of the Batcher. Drop {name}.")
        chosen = settings.get("generation_config") or self.target.generation_config
        for name in ("num_beams", "num_return_sequences", "return_dict_in_generate"):
            value = settings.get(name, getattr(chosen, name))
            if value is True or (value or 1) > 1:
                raise ValueError(f"{name}={value}: a row of a Batcher returns one text. Drop {name}.")
        taker = copy.copy(self.draft)
        taker.longspec_decoding = lambda model, input_ids, **arguments: {"input_ids": input_ids, **arguments}
        arguments: dict[str, Any] = self.target.generate(ids, assistant_model=taker, **settings)
        config = arguments["generation_config"]
        if config.max_length > self.max_length:
            raise ValueError(
                f"the prompt has {ids.shape[1]} tokens and the text may have {config.max_length}, and the rows of the "
                f"Batcher max_length={self.max_length}. Lower max_new_tokens, or raise max_length."
            )
        return arguments

    def _opened(
        self,
        arguments: dict[str, Any],
        streamer: Any,
        source: torch.Generator | None,
        on_logits: Callable[[torch.Tensor], None] | None,
        target: TargetView,
    ) -> RowSession:
        """Return the session of a request for the target as it is, or refuse the request."""
        names = ("input_ids", "logits_processor", "stopping_criteria", "generation_config")
        own = [arguments[name] for name in names]
        more = {name: value for name, value in arguments.items() if name not in (*names, "streamer")}
        call = Call(self.target, self.draft, own[0], own[1], own[2], own[3], streamer, more)
        call.target.known = target.known  # finding it takes as long as some steps
        served = PROCESSORS, GRAMMAR, HOOKS, PACKED, HALF_PRECISION, PROMPT_PROGRESS
        if other := [name for name in call.special_cases if name not in served]:
            raise ValueError(f"{', '.join(other)}: not supported in a Batcher. Call generate() for this prompt.")
        call.store = LentCache(self._session.lent, call.tokens, self.prefixes)
        if (reason := call.why_not()) is not None:
            raise ValueError(f"{reason} Or call generate() for this prompt.")
        call.more_nodes = self._session.call.more_nodes
        session = RowSession(call, self.max_length, source, on_logits)
        if streamer is not None:
            streamer.put(own[0].cpu())
        return session

    def _begun(self, forced: int = 0) -> SlotSession:
        """Return a loop of free slots, whose trees have room for so many `forced` tokens."""
        gc.collect()  # caches of an earlier loop, for which there may be no memory beside those of this one
        return self._loop(1 if self.target.device.type == "cpu" else self.rows, forced)

    def _loop(self, rows: int, forced: int, known: Any = None) -> SlotSession:
        """Return a loop of so many slots, and of what is `known` of the target."""
        calls = [self._empty_call(count, forced, known) for count in (rows, 1)]
        with calls[0].target.lock():
            return SlotSession(*calls)

    @property
    def _slots(self) -> int:
        """Number of slots of the loop that the present requests need.

        On CPUs, a step of free slots takes time. So the loop has a power of two of them there: the next larger one when
        it is needed, and a smaller one when three of four slots are free.
        """
        present: int = len(self._session.slots)
        if self.target.device.type != "cpu":
            return present
        requests = len(self._running) + (self._reading is not None and self._reading.is_ready)
        needed = min(self.rows, 1 << max(0, requests - 1).bit_length())
        return present if present // 4 < needed <= present else needed

    def _fit(self) -> None:
        """Let the requests in slots go on in the loop that has as many as they need."""
        old, rows = self._session, self._slots
        if rows == len(old.slots) or not old.fits(target := TargetView(self.target), 0):  # it was changed meanwhile
            return
        with old.attention():
            old.settle()
            self._end_done()
        new = self._loop(rows, old.call.more_nodes, target.known)
        moved = dict(enumerate(sorted(self._running)))
        with new.attention():
            for place, row in moved.items():
                old.hand_over(row, new, place)
        self._running = {place: self._running[row] for place, row in moved.items()}
        self._session = new

    @torch.no_grad()
    def _run(self, begun: "Future[None]") -> None:
        """Run requests until the Batcher is closed and none is left. Graphs are captured on this thread, too."""
        try:
            self._session = self._begun()
        except BaseException as error:
            begun.set_exception(error)
            return
        begun.set_result(None)
        target = self._session.target
        while self._wait():
            with target.lock():
                while self._running or self._reading or self._waiting:
                    try:
                        self._turn()
                    except BaseException as error:  # of memory, for example: of no single request
                        self._end_running(error)

    def _wait(self) -> bool:
        """Wait for a request; return whether there is one."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._waiting)
            return bool(self._waiting)

    def _end_running(self, error: BaseException) -> None:
        """End the requests in slots by an error, after which the loop is made anew."""
        traceback.clear_frames(error.__traceback__)  # they hold the loop, and a future the error
        self._session = None
        if not self._running and self._reading is not None:  # it would meet the same error again
            self._reading.request.end(error=error)
            self._reading = None
        while self._running:
            self._running.popitem()[1].end(error=error)

    @contextmanager
    def _alone(self, request: Request) -> Iterator[None]:
        """End this request, and no other one, by an error in the context, or if it was cancelled."""
        try:
            yield
        except BaseException as error:  # of processors, criteria and streamers, which may raise anything
            request.end(error=error)
        if request.done():
            request.end()
            if self._reading is not None and self._reading.request is request:
                self._reading = None

    def _turn(self) -> None:
        """Read prompts of `chunk_size` tokens, or a chunk of one, and run steps until the next one is to be read.

        Short prompts take their slots together. Of requests that come at once, as many chunks are read as slots are
        free for them: a step of few rows takes nearly as long as one of all.
        """
        room = self.chunk_size * max(1, min(self.rows - len(self._running), len(self._waiting)))
        while True:
            if self._has_chunk:
                room -= self._read_chunk()
            if (reading := self._reading) is not None and self._session is None:  # a step has failed meanwhile
                with self._alone(reading.request):
                    self._session = self._begun(reading.session.call.more_nodes)
            if self._session is not None:
                with self._session.attention():
                    self._emit_first()
                self._fit()
                with self._session.attention():
                    self._take_slot()
            if room <= 0 or not self._has_chunk:
                break
        if self._session is None:
            return
        with self._session.attention():
            while self._running:
                self._step()
                self._take_slot()
                if self._has_chunk or self._slots != len(self._session.slots):
                    return

    @property
    def _has_chunk(self) -> bool:
        """Whether a part of a prompt is to be read before the next step."""
        if self._reading is not None:
            return not self._reading.is_ready
        return bool(self._waiting) and not (self._running and self._waiting[0].waits)

    def _read_chunk(self) -> int:
        """Read a chunk of a prompt, and return the number of its tokens, at least 1."""
        if self._reading is None:
            self._open(self._waiting.popleft())
        if (reading := self._reading) is None or reading.tails is not None:
            return 1
        before = reading.session.cache.counts[0]
        with self._alone(reading.request):
            session = reading.session
            reading.tails = next(reading.chunks) or None
            if reading.tails and reading.request.is_shared and self.prefixes is not None:
                self.prefixes.put(session.call.tokens, session.cache, session.states)
        return max(1, reading.session.cache.counts[0] - before)

    def _open(self, request: Request) -> None:
        """Begin with a request: make its session, or run it alone."""
        with self._alone(request):
            if request.work is None or request.cancelled():
                return
            if request.is_alone:
                request.end(request.work())
                return
            target = TargetView(self.target)
            if self._session is None or not self._session.fits(target, request.forced):
                if self._running:  # they go on in the present loop
                    request.waits = True
                    self._waiting.appendleft(request)
                    return
                forced = request.forced if self._session is None else max(request.forced, self._session.call.more_nodes)
                self._session = None
                self._session = self._begun(forced)
            session = request.work(target)
            request.speculation, (request.reused,) = session.stats, session.past_lengths
            self._reading = Reading(request, session, session.read(self.chunk_size))

    def _emit_first(self) -> None:
        """Emit the first token of a prompt that has been read."""
        reading = self._reading
        if reading is None or reading.is_ready or reading.tails is None:
            return
        with self._alone(reading.request), reading.session.drafter.attention():
            reading.session.seed(reading.tails)
            reading.is_ready = True
            if reading.session.sequences.finished:
                self._finish(reading.request, reading.session, reading.session.cache)

    def _take_slot(self) -> None:
        """Let the request that was read take a slot, if one is free."""
        free = next((row for row in range(len(self._session.slots)) if row not in self._running), None)
        if (reading := self._reading) is None or not reading.is_ready or free is None:
            return
        with self._alone(reading.request):
            self._session.put(free, reading.session)
            self._running[free], self._reading = reading.request, None
        if free not in self._running:
            self._session.put(free, None)

    def _step(self) -> None:
        """Run one step of all rows without those that were cancelled, and end the rows that are done."""
        for row in [row for row, request in self._running.items() if request.cancelled()]:
            self._leave(row)
        if self._running:
            self._session.iterate()
        self._end_done()

    def _end_done(self) -> None:
        """End the requests whose texts have ended."""
        for row in [row for row in self._running if self._session.sequences.done[row]]:
            self._leave(row)

    def _leave(self, row: int) -> None:
        """End the request in a slot, and free the slot."""
        request = self._running.pop(row)
        with self._alone(request):
            session = self._session.timed(row)
            if not request.cancelled():
                self._finish(request, session, self._session.cache_of(row))
        self._session.put(row, None)

    def _finish(self, request: Request, session: RowSession, cache: SpeculativeCache) -> None:
        """Store the text of a request from its row of a cache, and set its result, or raise what has ended it."""
        if session.error is not None:
            raise session.error
        result = session.result()
        if self.prefixes is not None:
            self.prefixes.put(result, cache, session.states)
        request.end(result)
