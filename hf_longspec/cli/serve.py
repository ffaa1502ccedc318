"""`hf-longspec serve`: the server of transformers, with a draft in every request and a page of metrics."""

import os
import socket
import sys
from collections.abc import Callable
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

from ..cli import CommandError, options

try:
    import uvicorn  # noqa: F401 - transformers imports it later
    from fastapi import HTTPException, Response
    from prometheus_client import (
        CONTENT_TYPE_LATEST,
        CollectorRegistry,
        Counter,
        disable_created_metrics,
        generate_latest,
    )
    from transformers.cli.serve import Serve
    from transformers.cli.serving.utils import GenerateManager
except ModuleNotFoundError as error:
    remedy = "pip install 'transformers[serving]' prometheus-client"
    raise CommandError(f"serve needs {error.name}, which is not installed: {remedy}") from error

from ..generation.cache import CACHE_NAME, SpeculativeCache
from ..generation.sequences import SpeculationStats
from .models import dtype_of, find_device, find_draft, loading, open_draft, positions_of, quiet, say


def run(args: SimpleNamespace) -> int:
    """Serve until Ctrl-C; returns the exit status."""
    settings, device = options.read_settings(args.setting), find_device(args.device)
    try:
        socket.create_server((args.host, args.port)).close()
    except OSError as error:
        remedy = "Pass another --host or --port."
        reason = str(error) if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise CommandError(f"cannot listen on {args.host}:{args.port}: {reason}. {remedy}") from error
    with quiet(progress_bars=True):
        find_draft(args.draft)

        def open_for(model: Any) -> Any:
            return open_draft(args.draft, model, settings)

        with loading(args.target, "model of", from_hub=True):
            dtype = str(dtype_of(args.dtype, device)).removeprefix("torch.")
            DraftServe(open_for, args.target, device=str(device), dtype=dtype, host=args.host, port=args.port)
    return 0


class DraftServe(Serve):
    """`transformers serve` for one model, whose requests are decoded with a draft.

    Args:
        open_draft (`Callable`): Returns the draft for a loaded model.
        target (`str`): Hub id or folder of the model.
        options: Of `transformers serve`.
    """

    def __init__(self, open_draft: Callable[[Any], Any], target: str, **options: Any):
        self._open_draft = open_draft
        super().__init__(target, non_blocking=True, **options)  # which calls `start_server` once all is made

    def start_server(self) -> None:
        """Bind the draft to the model, and serve in this thread."""
        ((model_id, loaded),) = self._model_manager.loaded_models.items()
        metrics = Metrics()
        manager = DraftGenerateManager(loaded.model, self._open_draft(loaded.model), metrics)
        self._generation_state._generate_managers[model_id] = manager
        app = self.server.config.app
        app.add_api_route("/metrics", metrics.page)
        self.server.run()


class DraftGenerateManager(GenerateManager):
    """Decode requests with a draft, count what it did, and keep the cache of a prompt for the next one.

    A further turn of a chat, or another question about a document, reads only the tokens after what both prompts begin
    with.

    Args:
        model (`PreTrainedModel`): The target.
        draft ([`DraftModel`]): The draft.
        metrics (`Metrics`): Counters.
    """

    def __init__(self, model: Any, draft: Any, metrics: "Metrics"):
        super().__init__()
        self.draft, self.metrics = draft, metrics
        self.max_length = positions_of(model.config)
        self._cache = SpeculativeCache(model.config, 1, max_length=1)
        self._prompt: list[int] | None = None  # of the request that is submitted next; `None` with images
        self._held: list[int] = []  # prompt that the cache holds

    def generate_streaming(self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any):
        """Stream the text of one request; see `GenerateManager`."""
        inputs = self._with_draft(inputs, gen_config)
        return super().generate_streaming(model, processor, inputs, gen_config, *args, **kwargs)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any
    ):
        """Return the text of one request; see `GenerateManager`."""
        inputs = self._with_draft(inputs, gen_config)
        return await super().generate_non_streaming(model, processor, inputs, gen_config, *args, **kwargs)

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any):
        """Run a request on the thread of the model."""
        return super().submit(self._request(fn), *args, **kwargs)

    def async_submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any):
        """Run a request on the thread of the model."""
        return super().async_submit(self._request(fn), *args, **kwargs)

    def _with_draft(self, inputs: Any, gen_config: Any) -> dict[str, Any]:
        """Return the inputs with the draft and the cache, and end the new tokens with the positions of the model.

        Raises:
            HTTPException: With status 400 if the prompt leaves no position.
        """
        ids = inputs["input_ids"]
        room = self.max_length - ids.shape[-1]
        if room < 1:
            what = f"The prompt has {ids.shape[-1]} tokens, and the model {self.max_length} positions."
            raise HTTPException(400, f"{what} Shorten the prompt.")
        gen_config.max_new_tokens = min(gen_config.max_new_tokens or room, room)
        is_text = not set(inputs) - {"input_ids", "attention_mask"}
        self._prompt = ids[0].tolist() if is_text else None
        return {**inputs, "assistant_model": self.draft} | ({CACHE_NAME: self._cache} if is_text else {})

    def _request(self, function: Callable[..., Any]) -> Callable[..., Any]:
        prompt = self._prompt

        def run(*args: Any, **kwargs: Any) -> Any:
            self.draft.last_speculation = None
            reused = 0
            if prompt is not None:
                both = zip(self._held, prompt[:-1], strict=False)
                reused = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
                self._cache.set_lengths([reused])
                self._held = prompt[:reused]
            try:
                found = function(*args, **kwargs)
                self._held = prompt or self._held
                return found
            finally:  # also after a client has disconnected
                self.metrics.count(self.draft.last_speculation, reused)

        return run


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
        """Add a request.

        Args:
            stats ([`SpeculationStats`], *optional*): `None` if the request ended before its prompt was read.
            reused (`int`): Tokens of its prompt that were read before.
        """
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
        """Return the page of metrics."""
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)
