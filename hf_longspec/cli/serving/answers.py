"""The thread of the model: one request after another, with the draft, and the cache that the next one may continue.

Or several requests at once, in the rows of a [`Batcher`]. All requests are counted.
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

import torch
from fastapi import HTTPException, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, disable_created_metrics, generate_latest
from transformers.cli.serving.utils import GenerateManager, InferenceThread, _GenerationCancelled
from transformers.generation.stopping_criteria import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from ...batching import Batcher
from ...cli import one_line
from ...generation.cache import CACHE_NAME, SpeculativeCache
from ...generation.sequences import SpeculationStats
from ...generation.target import TargetView
from ...prefix_cache import PrefixCache, common_length, continues_as_one_text
from ..models import positions_of
from ..progress import say

Cancelled = _GenerationCancelled
# Tokens of a prompt between two copies of recurrent states, where other prompts may continue.
STATES_EVERY = 1024


class Metrics:
    """Counters of all requests, in the format of Prometheus, and a line per request on standard error."""

    def __init__(self) -> None:
        disable_created_metrics()  # a time of creation for each counter, which is that of the server
        self._registry = CollectorRegistry()
        self._counters = {
            name: Counter(f"hf_longspec_{name}", help, registry=self._registry)
            for name, help in (
                ("requests", "Requests."),
                ("plain_requests", "Requests that were decoded without the draft."),
                ("reused_tokens", "Tokens of prompts that an earlier request had read."),
                ("generated_tokens", "Tokens of verifications and plain steps."),
                ("verifications", "Verifications of drafted tokens."),
                ("drafted_tokens", "Drafted tokens that were verified."),
                ("accepted_tokens", "Drafted tokens that were accepted."),
                ("prefill_seconds", "Time to the first token."),
                ("decode_seconds", "Time after the first token."),
            )
        }

    def count(self, stats: SpeculationStats | None, reused: int) -> None:
        """Add a request, `reused` of whose prompt tokens were known; without `stats` it ended before its prompt."""
        self._counters["requests"].inc()
        self._counters["reused_tokens"].inc(reused)
        if stats is None:
            return
        counts = {
            "plain_requests": stats.reason is not None,
            "generated_tokens": stats.num_emitted_tokens + stats.num_plain_steps,
            "verifications": stats.num_spec_steps,
            "drafted_tokens": stats.num_draft_tokens,
            "accepted_tokens": stats.num_accepted_draft_tokens,
            "prefill_seconds": stats.prefill_seconds,
            "decode_seconds": stats.decode_seconds,
        }
        for name, number in counts.items():
            self._counters[name].inc(number)
        say(f"Without the draft: {stats.reason}" if stats.reason else str(stats), stderr=True)
        sys.stderr.flush()

    def page(self) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)


class KeptCache:
    """The cache of the last text, the tokens that it holds, and texts before it.

    Args:
        model (`PreTrainedModel`): The target.
        max_bytes (`int`): Bound on the memory of the texts before the last one, which are kept on the host.
    """

    def __init__(self, model: Any, max_bytes: int):
        self.cache = SpeculativeCache(model.config, 1, max_length=1)
        self.earlier = PrefixCache(model, max_bytes, device="cpu")
        self._tokens = torch.tensor([], dtype=torch.long)
        self._start = 0  # number of tokens at the start of the last call, for caches with states
        self._states: Any = None  # of the last prompt, see `PrefixCache.read`
        self._is_usable = continues_as_one_text(model)

    def begin(self, prompt: torch.Tensor) -> int:
        """Keep the tokens that begin a prompt `(1, P)`, and return how many these are; at least one is left to be read.

        From here to [`KeptCache.end`] the cache counts as empty, so that a call that fails leaves nothing.
        """
        held, self._tokens = self._tokens, self._tokens[:0]
        usable = common = common_length(held, prompt[0, :-1].cpu()) if self._is_usable else 0
        if common < len(held):
            self.earlier.put(held[None], self.cache, self._states)
            if self.cache.parts:  # states cannot be shortened
                usable = self._start if self._start <= common else 0
        if usable and usable >= self.earlier.find(prompt):
            if common < len(held):
                self.cache.go_back()
            self.cache.set_lengths([usable])
        else:
            usable = self.earlier.take(prompt, self.cache).counts[0]
        self._states = self.earlier.read(prompt, self.cache, STATES_EVERY)
        self.cache.remember()
        self._start = self.cache.counts[0]
        return usable

    def end(self, text: torch.Tensor) -> None:
        """Note the tokens `(T,)` of a finished call, as many as the cache says that it holds."""
        self._tokens = text[: self.cache.get_seq_length()].cpu()


class Decoder:
    """The model with its draft, on a thread of its own.

    Args:
        model (`PreTrainedModel`): The target.
        draft ([`DraftModel`]): The draft.
        metrics (`Metrics`): Counters.
        max_bytes (`int`): Memory of the host for the caches of earlier texts.

    Attributes:
        jobs (`set[Job]`): Requests that are decoded or wait for that.
        rows (`int`): Requests that are decoded at once.
    """

    rows = 1

    def __init__(self, model: Any, draft: Any, metrics: Metrics, max_bytes: int):
        self.model, self.draft, self.metrics = model, draft, metrics
        self.max_length = positions_of(model.config)
        self.vocab_size: int = model.config.get_text_config(decoder=True).vocab_size
        self.thread: Any = InferenceThread()
        self.jobs: set[Job] = set()
        self._kept = KeptCache(model, max_bytes)

    def generate(self, seed: int | None, input_ids: torch.Tensor, generation_config: Any, **inputs: Any) -> Any:
        """Run `generate` with the draft, on the thread of the model."""
        self.draft.last_speculation = None
        reused = 0
        is_text = not set(inputs) - {"attention_mask", "logits_processor", "streamer", "stopping_criteria", "tokenizer"}
        keeps = is_text and (generation_config.num_beams or 1) == 1
        try:
            if keeps:
                reused = self._kept.begin(input_ids)
                inputs[CACHE_NAME] = self._kept.cache
            devices = [self.model.device] if self.model.device.type == "cuda" else []
            with torch.random.fork_rng(devices, enabled=seed is not None):
                if seed is not None:
                    torch.manual_seed(seed)
                sequences = self.model.generate(
                    input_ids=input_ids, generation_config=generation_config, assistant_model=self.draft, **inputs
                )
            if keeps:
                self._kept.end(sequences[0])
            return sequences
        finally:  # also after an error, or a client that has left
            self.metrics.count(self.draft.last_speculation, reused)


class Threads(ThreadPoolExecutor):
    """Threads of requests, with the methods of the `InferenceThread` of transformers."""

    def async_submit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function, and return a future of the present loop."""
        return asyncio.wrap_future(self.submit(function, *args, **kwargs))


class Puts(BaseStreamer):
    """A stream that does not end with a failure, whose message follows."""

    def __init__(self, streamer: Any):
        self._streamer = streamer

    def put(self, value: Any) -> None:
        self._streamer.put(value)

    def end(self) -> None:
        """Do nothing."""


class BatchDecoder(Decoder):
    """The model with its draft, in which requests of text run at once, and share what earlier ones have read.

    Args:
        rows (`int`): Number of requests that run at once.
        max_length (`int`, *optional*): Most tokens of a text; by default the positions of the model.
        waiting (`int`): Most requests that wait.
        max_bytes (`int`): Memory of the host for the caches of earlier texts.
    """

    def __init__(
        self, model: Any, draft: Any, metrics: Metrics, rows: int, max_length: int | None, waiting: int, max_bytes: int
    ):
        super().__init__(model, draft, metrics, max_bytes)
        if hasattr(draft, "choose"):  # of an AutoDraft, before there is a text to try
            draft.choose(model, torch.empty(1, 0, dtype=torch.long))
        chunks = {"chunk_size": STATES_EVERY} if TargetView(model).has_states else {}
        self.rows, self.batcher = rows, Batcher(model, draft, rows, max_length, **chunks, prefixes=self._kept.earlier)
        self.max_length = min(self.max_length, self.batcher.max_length)
        self.thread = Threads(max(1, rows + waiting + 1))

    def generate(self, seed: int | None, input_ids: torch.Tensor, generation_config: Any, **inputs: Any) -> Any:
        """Wait for a row, and for its text. Requests with images or beams run alone in their turn."""
        is_text = not set(inputs) - {"attention_mask", "streamer", "stopping_criteria", "tokenizer"}
        if not is_text or (generation_config.num_beams or 1) > 1:
            alone = super().generate
            return self.batcher.run_alone(lambda: alone(seed, input_ids, generation_config, **inputs)).result()
        (stop,), streamer = inputs.pop("stopping_criteria"), inputs.pop("streamer", None)
        puts = None if streamer is None else Puts(streamer)
        request = None
        try:
            request = self.batcher.submit(
                input_ids, streamer=puts, seed=seed, generation_config=generation_config, **inputs
            )
            stop.follow(request)
            sequences = request.result()
            if streamer is not None:
                streamer.end()
            return sequences
        except CancelledError as error:
            raise Cancelled from error
        finally:
            self.metrics.count(*(None, 0) if request is None else (request.speculation, request.reused))


class Job(GenerateManager):
    """One request. The handlers of transformers take it for the state of the server, the manager and the model.

    So nothing that belongs to a request is kept anywhere else. The server underneath swallows errors and
    cancellations, which are seen in [`Job.generate`] alone.
    """

    def __init__(self, decoder: Decoder, seed: int | None):
        self._thread, self.decoder, self._seed = decoder.thread, decoder, seed
        self._stop = Stop()
        self.processors: dict[str, Any] = {}  # arguments of `generate` that hold the structure of the answer
        decoder.jobs.add(self)

    def use_continuous_batching(self, model: Any, modality: Any) -> bool:
        """Return `False`: continuous batching has no drafts."""
        return False

    def get_manager(self, model_id: str, use_cb: bool = False) -> "Job":
        return self

    def generate_streaming(self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any):
        self._fit(inputs, gen_config)
        return super().generate_streaming(self, processor, inputs, gen_config, *args, **kwargs)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any
    ):
        self._fit(inputs, gen_config)
        return await super().generate_non_streaming(self, processor, inputs, gen_config, *args, **kwargs)

    def _fit(self, inputs: Any, gen_config: Any) -> None:
        """End the new tokens with the positions of the model.

        Raises:
            HTTPException: With status 400 if the prompt has no token, or leaves no position.
        """
        count, most = inputs["input_ids"].shape[-1], self.decoder.max_length
        if not count:
            raise HTTPException(400, "The prompt has no tokens. Pass a text.")
        if count >= most:
            raise HTTPException(400, f"The prompt has {count} tokens, and the model {most} positions. Shorten it.")
        gen_config.max_new_tokens = min(gen_config.max_new_tokens, most - count)

    def generate(self, **kwargs: Any) -> Any:
        """Run this request on the thread of the model, unless its client has left."""
        try:
            if self._stop.is_set:
                raise Cancelled
            return self.decoder.generate(self._seed, stopping_criteria=[self._stop], **kwargs, **self.processors)
        except Cancelled:
            raise
        except Exception as error:
            say(f"Failed: {one_line(error)}", stderr=True)
            if "streamer" not in kwargs:
                raise
            # the server underneath writes this text between the quotes of JSON
            raise RuntimeError(json.dumps(one_line(error))[1:-1]) from error
        finally:
            self.end()

    def watch(self, receive: Callable[[], Awaitable[Any]]) -> None:
        """Cancel this job when its client disconnects."""

        async def wait() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.end()

        self._watch = asyncio.create_task(wait())  # a task without a reference may vanish

    def end(self) -> None:
        """Cancel this job if it has not finished."""
        self._stop.set()
        self.decoder.jobs.discard(self)


class Stop(StoppingCriteria):
    """Ends `generate` by an error once it is set."""

    is_set = False
    _request: Future | None = None

    def set(self) -> None:
        """Let the call end, and the request in a batch."""
        self.is_set = True
        if self._request is not None:
            self._request.cancel()

    def follow(self, request: Future) -> None:
        """Cancel this request, too, once it is set."""
        self._request = request
        if self.is_set:
            request.cancel()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if self.is_set:
            raise Cancelled
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
