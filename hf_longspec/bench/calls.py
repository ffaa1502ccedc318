"""One timed call of `generate`: the same clock and the same counts for stock `generate` and for speculation."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from itertools import count
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ..generation.sampling import ContextualPenaltyLogitsProcessor
from .machine import PeakMemory

# Names of the two baselines in every result: plain `generate`, and this package's loop without drafting.
HF, PLAIN = "hf generate", "plain loop"
# Window of the contextual penalty if only the penalty is given: that of TokenSwift's experiments.
DEFAULT_WINDOW = 1024


@dataclass(frozen=True, eq=False)
class HfMethod:
    """A way to decode that transformers implements itself."""

    options: dict[str, Any] = field(default_factory=dict)  # arguments of `generate`, such as `prompt_lookup_num_tokens`
    max_batch: int | None = None  # most rows that transformers decodes this way


@dataclass(frozen=True)
class Decoding:
    """The way in which the target chooses its tokens.

    Args:
        temperature (`float`): 0 is greedy.
        top_k (`int`): 0 keeps all tokens, as do the defaults of `top_p` and `min_p`.
        penalty (`float`, *optional*): Contextual penalty over the last `window` tokens (1024 by default).

    Raises:
        ValueError: If a value is out of range, or a window is given without a penalty.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float | None = None
    penalty: float | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        checks = {
            "temperature": (self.temperature >= 0, "at least 0, which is greedy"),
            "top_k": (self.top_k >= 0, "at least 0, which cuts nothing off"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "min_p": (self.min_p is None or 0 <= self.min_p <= 1, "in [0, 1]"),
        }
        for name, (fine, rule) in checks.items():
            if not fine:
                raise ValueError(f"{name}={getattr(self, name)}: expected a number {rule}.")
        if self.window is not None and self.penalty is None:
            raise ValueError(
                f"window={self.window} without a penalty has no effect: pass penalty=1.2, or leave it out."
            )
        if self.penalty is not None and self.window is None:
            object.__setattr__(self, "window", DEFAULT_WINDOW)
        self.processors()  # refuses a penalty or a window out of range

    @property
    def greedy(self) -> bool:
        """Whether no token is sampled."""
        return self.temperature == 0

    def options(self) -> dict[str, Any]:
        """Arguments of `generate`."""
        if self.greedy:
            return {"do_sample": False}
        chosen = {"do_sample": True, "temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        return chosen if self.min_p is None else chosen | {"min_p": self.min_p}

    def processors(self) -> LogitsProcessorList:
        """A new list of logits processors; each call of `generate` needs its own."""
        if self.penalty is None:
            return LogitsProcessorList()
        return LogitsProcessorList([ContextualPenaltyLogitsProcessor(self.penalty, self.window or DEFAULT_WINDOW)])

    def to_dict(self) -> dict[str, Any]:
        """The values that differ from plain greedy decoding."""
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name)) != each.default}


MODES = {"sample": Decoding(temperature=1.0), "greedy": Decoding()}


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
        """End the other streamer, if there is one."""
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
class Call:
    """The measurements of one call."""

    ttft_seconds: float  # from the call to the first token
    decode_seconds: float  # from the first token to the last
    tokens: int  # tokens that arrived in that time, all rows together
    steps: int  # verifications that emitted them, counted per row; steps of plain `generate`
    histogram: list[int]  # entry k counts the verifications whose row emitted k drafted tokens
    # entry k counts the verifications that accepted k drafted tokens. The last verification of a row may accept more
    # tokens than the row may still emit. The methods of transformers draft no more than can be emitted.
    accepted: list[int]
    text: torch.Tensor  # `(batch, tokens)`, the generated ones
    peak_bytes: int | None = None  # see [`PeakMemory`]
    # share of the time that drafting, verifying and everything else took; empty for the methods of transformers
    shares: dict[str, float] = field(default_factory=dict)
    draft_state_bytes: int = 0  # bytes that the drafter keeps in addition to the target's cache
    drafted: int = 0  # drafted tokens that were verified
    # `steps` of each row. The methods of transformers verify all rows equally often.
    row_steps: list[int] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed of all rows together; 0 if nothing was decoded after the first token."""
        return self.tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def tau(self) -> float:
        """Tokens per verification."""
        return self.tokens / max(1, self.steps)

    def to_dict(self) -> dict[str, Any]:
        """The measurements for a result file, without the text."""
        values = {name: value for name, value in vars(self).items() if name not in ("text", "drafted")}
        return values | {"shares": {name: round(share, 4) for name, share in self.shares.items()}}


def run_call(
    model: PreTrainedModel,
    method: Any,
    prompt: tuple[torch.Tensor, torch.Tensor],
    *,
    decoding: Decoding,
    tokens: int,
    seed: int,
    cache: Any = None,
    memory: PeakMemory | None = None,
    now: Callable[[], float] = time.perf_counter,
    on_arrival: Callable[[int], None] | None = None,
    text: BaseStreamer | None = None,
) -> Call:
    """Time one call of `generate`.

    Args:
        model (`PreTrainedModel`): The target. If it has no end-of-text token, see [`endless`], the number of tokens is
            checked.
        method (`DraftModel` or [`HfMethod`]): How to decode.
        prompt (`tuple`): Token ids and attention mask, `(B, T)` each.
        tokens (`int`): New tokens per row.
        cache (`Cache`, *optional*): Holds the beginning of the prompt. Without it the call reads the whole prompt.
        on_arrival (`Callable`, *optional*): See [`TokenClock`]; so is `text`.

    Raises:
        RuntimeError: If another number of tokens arrived.
    """
    ids, mask = (part.to(model.device) for part in prompt)
    own = isinstance(method, HfMethod)
    how = dict(method.options) if own else {"assistant_model": method}
    if cache is not None:
        how["past_key_values"] = cache
    counting: AbstractContextManager[list[int]] = nullcontext([]) if own else accepted_depths(method)
    # a call without the draft must not be measured as one with it
    strict = nullcontext() if own else changed(method, {"on_unsupported": "error"})
    with strict, counting as depths:
        torch.manual_seed(seed)
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        if memory is not None:
            memory.reset()
        clock = TokenClock(len(ids), now, on_arrival=on_arrival, text=text)
        output = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=tokens,
            streamer=clock,
            logits_processor=decoding.processors(),
            **decoding.options(),
            **how,
        )
    new = output[:, ids.shape[1] :].cpu()
    if model.generation_config.eos_token_id is None and not new.shape[1] == clock.total == tokens:
        raise RuntimeError(f"{new.shape[1]} tokens in {clock.total} ticks, not {tokens}.")
    counts: dict[str, Any]
    if own:
        # transformers streams all tokens of a verification at once, and verifies all rows together
        emitted = clock.arrivals[1:]
        histogram = [len(new) * emitted.count(tokens) for tokens in range(1, max(emitted, default=0) + 1)]
        counts = {"steps": len(new) * len(emitted), "row_steps": [len(emitted)] * len(new)}
        counts |= {"histogram": histogram, "accepted": histogram}
    else:
        stats = method.last_speculation
        seconds = {"draft": stats.draft_seconds, "verify": stats.verify_seconds, "rest": stats.rest_seconds}
        counts = {
            "steps": stats.num_spec_steps,
            "row_steps": [len(emitted) for emitted in stats.emitted_per_step],
            "histogram": list(stats.acceptance_histogram),
            "accepted": depths,
            "shares": {name: value / stats.decode_seconds for name, value in seconds.items() if stats.decode_seconds},
            "draft_state_bytes": stats.draft_state_bytes,
            "drafted": stats.num_draft_tokens,
        }
    return Call(
        ttft_seconds=clock.first_token_seconds,
        decode_seconds=clock.decode_seconds,
        tokens=len(new) * clock.num_tokens,
        text=new,
        peak_bytes=None if memory is None else memory.read(),
        **counts,
    )


def endless(model: PreTrainedModel) -> PreTrainedModel:
    """Remove the end-of-text token, so that every call decodes the same number of tokens."""
    model.generation_config.eos_token_id = None
    if model.generation_config.pad_token_id is None:
        model.generation_config.pad_token_id = 0
    return model


@contextmanager
def changed(draft: Any, options: dict[str, Any]) -> Iterator[None]:
    """Give a draft other settings while the context is open.

    Raises:
        ValueError: If the draft does not have one of them.
    """
    if unknown := sorted(set(options) - set(draft.settings)):
        raise ValueError(f"{type(draft).__name__} has no settings {unknown}; it has {sorted(draft.settings)}.")
    before = {name: draft.setting(name) for name in options}
    try:
        for name, value in options.items():  # update() of a GenerationConfig silently skips names that it does not have
            setattr(draft.generation_config, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(draft.generation_config, name, value)


@contextmanager
def accepted_depths(draft: Any) -> Iterator[list[int]]:
    """Count how deep every verification is accepted, also the last of a row, which is cut at the token limit.

    Yields:
        `list[int]`: Entry k counts the verifications, row by row, that accepted k drafted tokens.
    """
    histogram: list[int] = []
    make, held = draft.drafter, vars(draft).get("drafter")

    def watched(binding: Any) -> Any:
        sequences = binding.rule.sequences
        append, calls = sequences.append, count(1)

        def counting_append(chosen: list[list[int]], scores: Any) -> Any:
            if next(calls) > 1:  # the first comes from the prompt
                for tokens, done in zip(chosen, sequences.done, strict=True):
                    if not done:
                        histogram.extend([0] * (len(tokens) - len(histogram)))
                        histogram[len(tokens) - 1] += 1
            return append(chosen, scores)

        sequences.append = counting_append
        return make(binding)

    draft.drafter = watched
    try:
        yield histogram
    finally:
        if held is None:
            del draft.drafter
        else:
            draft.drafter = held
