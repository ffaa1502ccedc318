"""One timed call of `generate`: the same clock and the same counts for stock `generate` and for speculation.

[`Decoder`] decodes after prompts that were read once, see [`prefill`].
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from itertools import count
from typing import Any

import torch
from transformers import DynamicCache, LogitsProcessorList, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ..generation.cache import CACHE_NAME, SpeculativeCache
from ..generation.sampling import ContextualPenaltyLogitsProcessor
from ..generation.target import TargetView
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
    """The way in which the target chooses its tokens."""

    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all tokens, as do the defaults of `top_p` and `min_p`
    top_p: float = 1.0
    min_p: float | None = None
    penalty: float | None = None  # contextual penalty over the last `window` tokens (1024 by default)
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
                f"window={self.window} has no effect without a penalty. Pass penalty=1.2, or drop the window."
            )
        if self.penalty is not None and self.window is None:
            object.__setattr__(self, "window", DEFAULT_WINDOW)
        self.processors()  # refuses a penalty or a window out of range

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def options(self) -> dict[str, Any]:
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
        return self.tokens / max(1, self.steps)

    def to_dict(self) -> dict[str, Any]:
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
        cache (`Cache`, *optional*): Holds the beginning of the prompt. Without it the call reads the whole prompt.
        on_arrival (`Callable`, *optional*): See [`TokenClock`]; so is `text`.
    """
    ids, mask = (part.to(model.device) for part in prompt)
    is_stock = isinstance(method, HfMethod)
    how = dict(method.options) if is_stock else {"assistant_model": method}
    if cache is not None:
        how[CACHE_NAME] = cache
    counting: AbstractContextManager[list[int]] = nullcontext([]) if is_stock else accepted_depths(method)
    # a call without the draft must not be measured as one with it
    strict = nullcontext() if is_stock else changed(method, {"on_unsupported": "error"})
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
    if is_stock:
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


@contextmanager
def accepted_depths(draft: Any) -> Iterator[list[int]]:
    """Count how deep every verification is accepted, also the last of a row, which is cut at the token limit."""
    histogram: list[int] = []
    make, before = draft.drafter, vars(draft).get("drafter")

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
        if before is None:
            del draft.drafter
        else:
            draft.drafter = before


@dataclass(frozen=True, eq=False)
class PrefilledPrompts:
    """Keys and values of prompts of one length. Every prefix of a prompt serves as a shorter prompt."""

    tokens: torch.Tensor  # `(P, T)`: the prompts
    layers: list[tuple[torch.Tensor, torch.Tensor]]  # keys and values per layer, `(P, K, T, D)` each

    def to(self, dtype: torch.dtype) -> "PrefilledPrompts":
        """The same prompts with rounded keys and values.

        The cost of a decoding step does not depend on their last bits, and a bfloat16 prefill takes very long on a
        processor without such instructions.
        """
        return PrefilledPrompts(self.tokens, [(keys.to(dtype), values.to(dtype)) for keys, values in self.layers])

    def fill(self, cache: SpeculativeCache, rows: slice, stored: int) -> SpeculativeCache:
        """Replace the content of a cache with the first `stored` tokens of some prompts."""
        cache.reset()
        for layer, (keys, values) in zip(cache.layers, self.layers, strict=True):
            layer.update(keys[rows, :, :stored], values[rows, :, :stored])
        cache.set_lengths([stored] * cache.batch_size)
        return cache

    def dynamic_cache(self, rows: slice, stored: int) -> DynamicCache:
        """A cache of transformers with the first `stored` tokens of some prompts."""
        return DynamicCache([(keys[rows, :, :stored], values[rows, :, :stored]) for keys, values in self.layers])


class Decoder:
    """Decode after prefilled prompts with one target."""

    def __init__(self, model: PreTrainedModel, prompts: PrefilledPrompts, tokens: int):
        self.model, self.prompts, self.tokens = model, prompts, tokens
        self._shape = (0, 0)
        self._cache: Any = None

    def run(
        self, method: Any, rows: slice, context: int, mode: str | Decoding, seed: int, tokens: int | None = None
    ) -> Call:
        """Decode after the first `context` tokens of some prompts.

        Plain `generate` is given the cache of all prompt tokens but the last, and the loop that of all but those that
        its drafter looks at first. The rest runs before the first new token, when the clock starts.
        """
        tokens = tokens or self.tokens
        ids = self.prompts.tokens[rows, :context]
        prompt, how = (ids, torch.ones_like(ids)), MODES[mode] if isinstance(mode, str) else mode
        if isinstance(method, HfMethod):
            cache: Any = self.prompts.dynamic_cache(rows, context - 1)
            with _new_tokens_only(self.model):
                return run_call(self.model, method, prompt, decoding=how, tokens=tokens, seed=seed, cache=cache)
        method.generation_config.gate = False  # speculation itself is measured
        cache = self._speculative_cache(method, rows, context, tokens)
        return run_call(self.model, method, prompt, decoding=how, tokens=tokens, seed=seed, cache=cache)

    def _speculative_cache(self, draft: Any, rows: slice, context: int, tokens: int) -> SpeculativeCache:
        """One buffer for the present batch size and context, filled anew for every run."""
        batch = rows.stop - rows.start
        if self._shape != (batch, context):
            self._cache = None  # before the next one is allocated
            self._cache = SpeculativeCache(self.model.config, batch, context + max(tokens, self.tokens))
            self._shape = batch, context
        nodes = draft.num_tree_nodes(TargetView(self.model))
        read = max(nodes, getattr(draft, "prompt_tokens", 0))  # a copy of an older version has no such property
        return self.prompts.fill(self._cache, rows, max(0, context - read))


@contextmanager
def _new_tokens_only(model: PreTrainedModel) -> Iterator[None]:
    """Give the first forward what the cache does not hold.

    Transformers' assisted decoding runs the whole prompt in its first forward even if the cache holds it already, and
    its text is wrong then.
    """

    def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        handle.remove()
        cache, ids = kwargs.get(CACHE_NAME), kwargs.get("input_ids")
        if cache is not None and ids is not None and ids.shape[1] > cache.get_seq_length() > 0:
            new = ids.shape[1] - cache.get_seq_length()
            for name in ("input_ids", "position_ids"):
                kwargs[name] = None if kwargs.get(name) is None else kwargs[name][:, -new:]
        return args, kwargs

    handle = model.register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def prefill(
    model: PreTrainedModel, tokens: torch.Tensor, done: Callable[[int], None] = lambda index: None
) -> PrefilledPrompts:
    """Run prompts `(P, T)` through the model one by one, under its own attention."""
    target = TargetView(model)
    if target.sliding_layers or target.has_latent_cache or target.has_states:
        raise ValueError(
            f"{type(model).__name__} has sliding-window, latent or recurrent layers, which are not supported here: "
            "copies of one prefilled cache are decoded. Choose a target with full attention in every layer."
        )
    layers: list[tuple[torch.Tensor, torch.Tensor]] = []
    size = len(tokens)
    for index, row in enumerate(tokens):
        cache = DynamicCache()
        model(input_ids=row[None], **{CACHE_NAME: cache}, use_cache=True, logits_to_keep=1)
        if not layers:
            like = [(layer.keys[0], layer.values[0]) for layer in cache.layers]
            layers = [
                (keys.new_empty(size, *keys.shape), values.new_empty(size, *values.shape)) for keys, values in like
            ]
        for (keys, values), layer in zip(layers, cache.layers, strict=True):
            keys[index], values[index] = layer.keys[0], layer.values[0]
        done(index)
    return PrefilledPrompts(tokens, layers)
