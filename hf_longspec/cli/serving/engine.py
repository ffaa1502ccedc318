"""The model with its draft: requests in the rows of a [`Batcher`], and counts of all of them."""

import sys
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from fastapi import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, disable_created_metrics, generate_latest
from transformers import GenerationConfig
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteria

from ...batching import Batcher
from ...cli import one_line
from ...generation.sequences import SpeculationStats
from ...generation.target import TargetView
from ...prefix_cache import PrefixCache
from ..models import positions_of
from ..progress import say

# Tokens of a prompt between two copies of recurrent states, where other prompts may continue.
STATES_EVERY = 1024
# Requests that are decoded at once, unless there is less memory.
ROWS = 8
# Share of the free memory of a GPU that the rows may take.
SHARE_OF_MEMORY = 0.5


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

    def count(self, request: Future) -> None:
        """Add a request that has ended."""
        stats, reused = request.speculation, request.reused  # type: ignore[attr-defined]
        self._counters["requests"].inc()
        self._counters["reused_tokens"].inc(reused)
        tokens = 0 if stats is None else stats.num_emitted_tokens + stats.num_plain_steps
        if stats is not None:
            counts = {
                "plain_requests": stats.reason is not None,
                "generated_tokens": tokens,
                "verifications": stats.num_spec_steps,
                "drafted_tokens": stats.num_draft_tokens,
                "accepted_tokens": stats.num_accepted_draft_tokens,
                "prefill_seconds": stats.prefill_seconds,
                "decode_seconds": stats.decode_seconds,
            }
            for name, number in counts.items():
                self._counters[name].inc(number)
        say(_line(request, stats, tokens), stderr=True)
        sys.stderr.flush()

    def page(self) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)


def _line(request: Future, stats: SpeculationStats | None, tokens: int) -> str:
    """Return what the log says of a request that has ended."""
    if request.cancelled():
        return f"Cancelled after {tokens} tokens."
    if (error := request.exception()) is not None:
        return f"Failed: {one_line(error)}"
    assert stats is not None
    return f"Without the draft: {stats.reason}" if stats.reason else str(stats)


class Stop(StoppingCriteria):
    """Ends a call of `generate` by an error once its request was cancelled."""

    def __init__(self, request: Future):
        self._request = request

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if self._request.cancelled():
            raise CancelledError
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class Alone(Future):
    """The future of a request that runs alone."""

    speculation: SpeculationStats | None = None
    reused = 0


class Engine:
    """The model with its draft.

    Requests of text are decoded at once, in the rows of a [`Batcher`], and share what earlier ones have read. Requests
    with images run alone in their turn, and so do all requests to a target that has no Batcher.

    Args:
        model (`PreTrainedModel`): The target.
        draft ([`DraftModel`]): The draft.
        rows (`int`, *optional*): Number of requests that run at once; by default as many as [`room_of`] says.
        max_length (`int`, *optional*): Most tokens of a text; by default the positions of the model.
        max_bytes (`int`): Memory of the host for the caches of earlier texts.

    Attributes:
        metrics (`Metrics`): Counts of all requests.
        jobs (`set[Future]`): Requests that are decoded or wait for that.

    Raises:
        ValueError: If several rows are asked for and the target has no Batcher.
    """

    def __init__(self, model: Any, draft: Any, rows: int | None, max_length: int | None, max_bytes: int):
        self.model, self.draft, self.metrics = model, draft, Metrics()
        self.rows, self.max_length = room_of(model, rows, max_length or positions_of(model.config))
        self.vocab_size: int = model.config.get_text_config(decoder=True).vocab_size
        self.jobs: set[Future] = set()
        if hasattr(draft, "choose"):  # of an AutoDraft, before there is a text to try
            draft.choose(model, torch.empty(1, 0, dtype=torch.long))
        chunks = {"chunk_size": STATES_EVERY} if TargetView(model).has_states else {}
        prefixes = PrefixCache(model, max_bytes, device="cpu")
        limit = None if self.max_length == sys.maxsize else self.max_length
        self.batcher: Batcher | None = None
        self._thread = ThreadPoolExecutor(1)
        try:
            self.batcher = Batcher(model, draft, self.rows, limit, **chunks, prefixes=prefixes)
        except ValueError as error:
            if (rows or 1) > 1:
                raise
            self.rows = 1
            say(f"Requests run one after the other, and read whole prompts: {one_line(error)}", stderr=True)

    def submit(
        self,
        inputs: dict[str, torch.Tensor],
        config: GenerationConfig,
        *,
        make_processors: Callable[[], LogitsProcessorList],
        streamer: Any,
        tokenizer: Any,
        seed: int | None,
        on_logits: Callable[[torch.Tensor], None] | None,
        is_shared: bool,
    ) -> Future:
        """Add a request, and return its future; see [`Batcher.submit`] for the arguments.

        Raises:
            ValueError: If the request cannot be served.
        """
        settings = {"generation_config": config, "logits_processor": make_processors(), "tokenizer": tokenizer}
        request: Any
        if self.batcher is not None and not set(inputs) - {"input_ids", "attention_mask"}:
            ids = inputs["input_ids"]
            own = {"streamer": streamer, "seed": seed, "on_logits": on_logits, "is_shared": is_shared}
            request = self.batcher.submit(ids, **own, **settings)
        else:
            if on_logits is not None:
                raise ValueError("logprobs: a request that runs alone has none. Leave it out.")
            request = Alone()
            work = partial(self._alone, request, inputs, seed, streamer=streamer, **settings)
            run = self._thread.submit if self.batcher is None else self.batcher.run_alone
            run(work)
        self.jobs.add(request)
        request.add_done_callback(self.jobs.discard)
        request.add_done_callback(self.metrics.count)
        return request

    def _alone(self, request: Alone, inputs: dict[str, torch.Tensor], seed: int | None, **settings: Any) -> None:
        """Run `generate` with the draft, and set the result of the request."""
        devices = [self.model.device] if self.model.device.type == "cuda" else []
        self.draft.last_speculation = None
        try:
            if request.cancelled():
                return
            with torch.random.fork_rng(devices, enabled=seed is not None):
                if seed is not None:
                    torch.manual_seed(seed)
                call = {**inputs, **settings, "stopping_criteria": [Stop(request)]}
                result = self.model.generate(**call, assistant_model=self.draft)
            request.speculation = self.draft.last_speculation
            if request.set_running_or_notify_cancel():
                request.set_result(result)
        except BaseException as error:  # of the model and its processor, for the client
            request.speculation = self.draft.last_speculation
            if not isinstance(error, CancelledError) and request.set_running_or_notify_cancel():
                request.set_exception(error)

    def close(self) -> None:
        """Cancel all requests."""
        for job in list(self.jobs):
            job.cancel()
        if self.batcher is not None:
            self.batcher.close(cancel=True)
        self._thread.shutdown()


def room_of(model: Any, rows: int | None, max_length: int) -> tuple[int, int]:
    """Return the number of rows, and the most tokens of a text.

    Without a number of `rows`, it is 8, or as many as half of a GPU's free memory holds at this length. Where it does
    not hold two of them, one for the prompt that is being read, texts are shorter. Caches on CPUs grow with the texts.
    """
    if rows is not None or model.device.type != "cuda":
        return rows or ROWS, max_length
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    of_token = 2 * config.num_hidden_layers * heads * size * model.dtype.itemsize
    tokens = int(SHARE_OF_MEMORY * torch.cuda.mem_get_info(model.device)[0]) // of_token
    rows = max(1, min(ROWS, tokens // max_length - 1))
    return rows, min(max_length, max(3, tokens // (rows + 1)))
