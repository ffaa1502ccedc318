"""One timed call of `generate`: the same clock and the same counts for stock `generate` and for speculation.

- Methods that are compared take turns ([`rotated`]); a ratio is the median of the ratios within each turn.
- A text is checked before its speed is reported ([`judge`]).
- Both baselines are measured: plain `generate`, which copies its cache in every step, and the loop without a draft.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ..auditing import NOT_LOSSLESS, audit
from ..generation.cache import CACHE_NAME

# Names of the two baselines in every result: plain `generate`, and this package's loop without drafting.
HF, PLAIN = "hf generate", "plain loop"
# `generate` with a cache of fixed size, whose steps transformers compiles on a GPU.
STATIC = "hf generate, static cache"
# Verdicts on a text, beside those of the audit.
REFERENCE, IDENTICAL, DIFFERS, NOT_COMPARED = "reference", "identical", "differs", "not compared"
FAILED = (DIFFERS, NOT_LOSSLESS)

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class HfMethod:
    """A way to decode that transformers implements itself."""

    options: dict[str, Any] = field(default_factory=dict)  # arguments of `generate`, such as `prompt_lookup_num_tokens`


def sampling(temperature: float) -> dict[str, Any]:
    """Arguments of `generate`: greedy at temperature 0, else all tokens by their probabilities."""
    if temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}


class TokenClock(BaseStreamer):
    """A streamer that notes when tokens arrive. Make it directly before the call of `generate`.

    `generate` passes the prompt first, then the tokens of each step; the loop of this package passes one token after
    another. Decoding lasts from the first arrival to the last: neither the prefill nor the preparation of inputs and
    caches is part of it, nor are the tokens that arrived first.

    Args:
        batch_size (`int`): Rows that are decoded together.
        now (`Callable`): Clock in seconds.
        on_arrival (`Callable`, *optional*): Called with the tokens per row so far, after every arrival.
        text (`BaseStreamer`, *optional*): Receives everything as well.

    >>> clock = TokenClock(1, iter([0.0, 3.0, 3.5, 4.0]).__next__)
    >>> for value in ("prompt", torch.tensor([7]), torch.tensor([7, 8]), torch.tensor([9])):
    ...     clock.put(value)
    >>> clock.first_token_seconds, clock.decode_seconds, clock.arrivals
    (3.0, 1.0, [1, 2, 1])
    """

    def __init__(
        self,
        batch_size: int = 1,
        now: Callable[[], float] = time.perf_counter,
        *,
        on_arrival: Callable[[int], None] | None = None,
        text: BaseStreamer | None = None,
    ):
        self.batch_size, self.now = batch_size, now
        self.arrivals: list[int] = []
        self.total = 0
        self._on_arrival, self._text = on_arrival, text
        self._saw_prompt = False
        self._times: list[float] = []
        self._began = now()

    def put(self, value: Any) -> None:
        """Note the time, and how many tokens per row arrived."""
        if self._saw_prompt:
            self._times.append(self.now())
            self.arrivals.append(value.numel() // self.batch_size if isinstance(value, torch.Tensor) else 1)
            self.total += self.arrivals[-1]
            if self._on_arrival is not None:
                self._on_arrival(self.total)
        self._saw_prompt = True
        if self._text is not None:
            self._text.put(value)

    def end(self) -> None:
        if self._text is not None:
            self._text.end()

    @property
    def num_tokens(self) -> int:
        """Tokens per row after those that arrived first."""
        return self.total - sum(self.arrivals[:1])

    @property
    def first_token_seconds(self) -> float:
        """Seconds from the call to the first tokens."""
        return self._times[0] - self._began

    @property
    def decode_seconds(self) -> float:
        """Seconds from the first arrival to the last."""
        return self._times[-1] - self._times[0] if len(self._times) > 1 else 0.0


@dataclass(frozen=True, eq=False)
class Measurement:
    """What was measured of one call."""

    ttft_seconds: float  # from the call to the first token
    decode_seconds: float  # from the first token to the last
    tokens: int  # tokens that arrived in that time, all rows together
    steps: int  # verifications and plain steps that emitted them, counted per row; steps of plain `generate`
    row_steps: list[int]  # `steps` of each row. The methods of transformers verify all rows equally often.
    text: torch.Tensor  # `(batch, tokens)`, the generated ones
    # share of the time that drafting, verifying and everything else took; empty for the methods of transformers
    shares: dict[str, float] = field(default_factory=dict)
    draft_state_bytes: int = 0  # bytes that the drafter keeps in addition to the target's cache

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed of all rows together; 0 if nothing was decoded after the first token."""
        return self.tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def tau(self) -> float:
        return self.tokens / max(1, self.steps)


def run_call(
    model: PreTrainedModel,
    method: Any,
    prompt: tuple[torch.Tensor, torch.Tensor],
    *,
    tokens: int,
    seed: int,
    decoding: Mapping[str, Any] | None = None,
    cache: Any = None,
    now: Callable[[], float] = time.perf_counter,
    on_arrival: Callable[[int], None] | None = None,
    text: BaseStreamer | None = None,
) -> Measurement:
    """Time one call of `generate`.

    Args:
        model (`PreTrainedModel`): The target. If it has no end-of-text token, see [`endless`], the number of tokens is
            checked.
        method (`DraftModel` or [`HfMethod`]): How to decode.
        prompt (`tuple`): Token ids and attention mask, `(B, T)` each.
        decoding (`Mapping`, *optional*): Arguments of `generate` that choose tokens, see [`sampling`]; greedy by
            default.
        cache (`Cache`, *optional*): Holds the beginning of the prompt. Without it the call reads the whole prompt.
        on_arrival (`Callable`, *optional*): See [`TokenClock`]; so is `text`.
    """
    ids, mask = (part.to(model.device) for part in prompt)
    is_stock = isinstance(method, HfMethod)
    how: dict[str, Any] = dict(method.options) if is_stock else {"assistant_model": method}
    if cache is not None:
        how[CACHE_NAME] = cache
    # a call without the draft must not be measured as one with it
    with nullcontext() if is_stock else changed(method, {"on_unsupported": "error"}):
        torch.manual_seed(seed)
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        clock = TokenClock(len(ids), now, on_arrival=on_arrival, text=text)
        how.update(sampling(0.0) if decoding is None else decoding)
        output = model.generate(ids, attention_mask=mask, max_new_tokens=tokens, streamer=clock, **how)
    new = output[:, ids.shape[1] :].cpu()
    if model.generation_config.eos_token_id is None and not new.shape[1] == clock.total == tokens:
        raise RuntimeError(f"{new.shape[1]} tokens in {clock.total} ticks, not {tokens}.")
    counts: dict[str, Any]
    if is_stock:
        # transformers streams all tokens of a verification at once, and verifies all rows together
        steps = len(clock.arrivals) - 1
        counts = {"steps": len(new) * steps, "row_steps": [steps] * len(new)}
    else:
        stats = method.last_speculation
        seconds = {"draft": stats.draft_seconds, "verify": stats.verify_seconds, "rest": stats.rest_seconds}
        counts = {
            "steps": stats.num_spec_steps + stats.num_plain_steps,
            "row_steps": [len(emitted) for emitted in stats.emitted_per_step],
            "shares": {name: value / stats.decode_seconds for name, value in seconds.items() if stats.decode_seconds},
            "draft_state_bytes": stats.draft_state_bytes,
        }
    return Measurement(
        ttft_seconds=clock.first_token_seconds,
        decode_seconds=clock.decode_seconds,
        tokens=len(new) * clock.num_tokens,
        text=new,
        **counts,
    )


def judge(model: PreTrainedModel, ids: torch.Tensor, call: Measurement, reference: Measurement) -> str:
    """Compare a text with the reference; in other types than float32 an audit decides on another text.

    Args:
        ids (`torch.LongTensor` of shape `(B, T)`): The prompts, without padding.
    """
    if call is reference:
        return REFERENCE
    if torch.equal(call.text, reference.text):
        return IDENTICAL
    if model.dtype == torch.float32:
        return DIFFERS
    return audit(model, torch.cat([ids, call.text], dim=1), ids.shape[1], torch.ones_like(ids)).verdict


def endless(model: PreTrainedModel) -> PreTrainedModel:
    """Remove the end-of-text token, so that every call decodes the same number of tokens."""
    model.generation_config.eos_token_id = None
    if model.generation_config.pad_token_id is None:
        model.generation_config.pad_token_id = 0
    return model


@contextmanager
def changed(draft: Any, options: dict[str, Any]) -> Iterator[None]:
    """Give a draft other settings while the context is open."""
    if unknown := sorted(name for name in options if name not in draft.settings):
        raise ValueError(f"{type(draft).__name__} has no settings {unknown}; it has {sorted(draft.settings)}.")
    before = {name: draft.setting(name) for name in options}
    try:
        for name, value in options.items():  # update() of a GenerationConfig silently skips names that it does not have
            setattr(draft.generation_config, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(draft.generation_config, name, value)


def rotated(names: Sequence[T], turn: int) -> list[T]:
    """Return all names, each turn beginning with another one."""
    first = turn % max(1, len(names))
    return [*names[first:], *names[:first]]


def summarize(values: Sequence[float]) -> dict[str, float]:
    """Median and range, rounded to four significant digits.

    >>> summarize([3.0, 1.0, 2.0])
    {'median': 2.0, 'low': 1.0, 'high': 3.0, 'count': 3}
    """
    summary = {"median": statistics.median(values), "low": min(values), "high": max(values)}
    return {**{name: significant(value) for name, value in summary.items()}, "count": len(values)}


def significant(value: float, digits: int = 4) -> float:
    """`value` rounded to significant digits.

    >>> significant(1234.567), significant(0.00123456)
    (1235.0, 0.001235)
    """
    return float(f"{value:.{digits}g}")
