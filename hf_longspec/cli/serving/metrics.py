"""Counters of all requests, in the format of Prometheus."""

import sys

from fastapi import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, disable_created_metrics, generate_latest

from ...generation.sequences import SpeculationStats
from ..models import say


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
