"""One whole call of `generate`, prompt included: time to the first token, decoding, acceptance, memory."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from .decoding import HfMethod
from .peak_memory import PeakMemory
from .timing import TokenClock
from .token_choice import Decoding
from .watching import AcceptedDepths


class CallClock(TokenClock):
    """Times a call from [`start`] on, and notes what was counted when the first tokens came.

    Args:
        batch_size (`int`): Rows.
        now (`Callable`): Clock in seconds.
        count (`Callable`): Steps so far; asked once, when the first tokens come.

    >>> clock = CallClock(1, iter([0.0, 1.0, 5.0, 5.5]).__next__)
    >>> clock.start()
    >>> for value in ("prompt", torch.tensor([7]), torch.tensor([7, 8])):
    ...     clock.put(value)
    >>> clock.first_token_seconds, clock.decode_seconds, clock.arrivals
    (5.0, 0.5, [2])
    """

    def __init__(
        self,
        batch_size: int = 1,
        now: Callable[[], float] = time.perf_counter,
        count: Callable[[], int] = lambda: 0,
    ):
        super().__init__(batch_size, now)
        self._count = count
        self._began = 0.0
        self.count_at_first = 0

    def start(self) -> None:
        """`generate` is about to be called."""
        self._began = self._now()

    def put(self, value: object) -> None:
        """Note the time, and how many tokens per row came."""
        super().put(value)
        if len(self._times) == 2:  # the prompt came first
            self.count_at_first = self._count()

    @property
    def first_token_seconds(self) -> float:
        """From the call to the first tokens."""
        return self._times[1] - self._began

    @property
    def arrivals(self) -> list[int]:
        """Tokens per row of every arrival behind the first."""
        return self._tokens[2:]


@dataclass(frozen=True, eq=False)
class Call:
    """What one call took and gave.

    Args:
        ttft_seconds (`float`): From the call to the first token: the prompt.
        decode_seconds (`float`): From the first token to the last.
        tokens (`int`): Tokens that came in that time, all rows together.
        steps (`int`): Verifications that gave them, counted per row; steps of plain `generate`.
        histogram (`list[int]`): Entry k counts the verifications whose row emitted k drafted tokens.
        accepted (`list[int]`): Likewise, of accepted tokens: the last verification of a row may accept more than it may
            still emit. transformers' methods draft no more than can be emitted.
        text (`torch.LongTensor` of shape `(batch, tokens)`): What was generated.
        peak_bytes (`int`, *optional*): See [`PeakMemory`].
        shares (`dict[str, float]`): Of the time, drafting, verifying and the rest.
        draft_state_bytes (`int`): What the drafter keeps beside the target's cache.
    """

    ttft_seconds: float
    decode_seconds: float
    tokens: int
    steps: int
    histogram: list[int]
    accepted: list[int]
    text: torch.Tensor
    peak_bytes: int | None
    shares: dict[str, float] = field(default_factory=dict)
    draft_state_bytes: int = 0


def run_call(
    model: PreTrainedModel,
    method: Any,
    prompt: tuple[torch.Tensor, torch.Tensor],
    *,
    decoding: Decoding,
    tokens: int,
    seed: int,
    memory: PeakMemory | None = None,
    now: Callable[[], float] = time.perf_counter,
) -> Call:
    """Decode behind a prompt that is read in the same call.

    Args:
        model (`PreTrainedModel`): Never ending by itself, see [`endless`].
        method (`DraftModel` or [`HfMethod`]): How to decode.
        prompt (`tuple`): Token ids and attention mask, `(B, T)` each.
        tokens (`int`): New tokens per row.

    Raises:
        RuntimeError: If another number of tokens came.
    """
    ids, mask = (part.to(model.device) for part in prompt)
    own = isinstance(method, HfMethod)
    how = dict(method.options) if own else {"assistant_model": method}
    depths = AcceptedDepths()
    with _forwards(model, own) as forwards, nullcontext() if own else depths.of(method):
        clock = CallClock(len(ids), now, lambda: len(forwards))
        torch.manual_seed(seed)
        _wait_for(model.device)
        if memory is not None:
            memory.reset()
        clock.start()
        output = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=tokens,
            streamer=clock,
            logits_processor=decoding.processors(),
            **decoding.options(),
            **how,
        )
    text = output[:, ids.shape[1] :].cpu()
    if text.shape[1] != tokens or clock.first_tokens + clock.num_tokens != tokens:
        raise RuntimeError(f"{text.shape[1]} tokens in {clock.first_tokens + clock.num_tokens} ticks, not {tokens}.")
    peak = None if memory is None else memory.read()
    timed = (clock.first_token_seconds, clock.decode_seconds, len(text) * clock.num_tokens)
    if own:
        steps = len(text) * (len(forwards) - clock.count_at_first)
        histogram = _histogram_of(clock.arrivals, len(text))
        return Call(*timed, steps, histogram, histogram, text, peak)
    stats = method.last_speculation
    seconds = {"draft": stats.draft_seconds, "verify": stats.verify_seconds, "rest": stats.rest_seconds}
    shares = {name: value / stats.decode_seconds for name, value in seconds.items() if stats.decode_seconds}
    histogram = list(stats.acceptance_histogram)
    state = stats.draft_state_bytes
    return Call(*timed, stats.num_spec_steps, histogram, depths.histogram, text, peak, shares, state)


def _histogram_of(arrivals: list[int], rows: int) -> list[int]:
    """transformers streams all tokens of a verification at once, and verifies all rows together."""
    counts = [0] * max(arrivals, default=0)
    for emitted in arrivals:
        counts[emitted - 1] += rows
    return counts


@contextmanager
def _forwards(model: PreTrainedModel, counted: bool) -> Iterator[list[None]]:
    """A list that gets an entry per forward. Not for our loop: its steps may be compiled, and the hook with them."""
    calls: list[None] = []
    if not counted:
        yield calls
        return
    handle = model.register_forward_pre_hook(lambda *_: calls.append(None))
    try:
        yield calls
    finally:
        handle.remove()


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
