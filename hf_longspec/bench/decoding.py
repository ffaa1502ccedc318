"""One timed call of `generate` on a prefilled cache, the same way for plain `generate` and for our loop."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..generation.cache import SpeculativeCache
from ..generation.target import TargetView
from .prefill import PrefilledPrompts
from .timing import TokenClock

MODES: dict[str, dict[str, Any]] = {
    "sample": {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0},
    "greedy": {"do_sample": False},
}


@dataclass(frozen=True, eq=False)
class HfMethod:
    """A way to decode that transformers has itself.

    Args:
        options (`dict[str, Any]`): Arguments of `generate`, such as `prompt_lookup_num_tokens`.
        max_batch (`int`, *optional*): Most rows that transformers decodes this way.
    """

    options: dict[str, Any] = field(default_factory=dict)
    max_batch: int | None = None


@dataclass(frozen=True, eq=False)
class Run:
    """What one call took and gave.

    Args:
        seconds (`float`): From the first token to the last.
        tokens (`int`): Tokens decoded in that time, all rows together.
        text (`torch.LongTensor` of shape `(batch, tokens)`): What was generated.
        steps (`int`): Verifications of all rows together; for plain `generate`, its steps.
        shares (`dict[str, float]`): Shares of the time spent in the drafter, in verification forwards, and elsewhere;
            empty for transformers' methods, which do not tell.
        draft_state_bytes (`int`): What the drafter keeps beside the target's cache.
    """

    seconds: float
    tokens: int
    text: torch.Tensor
    steps: int
    shares: dict[str, float] = field(default_factory=dict)
    draft_state_bytes: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed, all rows together."""
        return self.tokens / self.seconds


def load_target(path: str, dtype: torch.dtype) -> PreTrainedModel:
    """A target that never stops by itself, under transformers' `sdpa` attention.

    Raises:
        ValueError: If there is no such model.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa").eval()
    except OSError as error:
        raise ValueError(f"no model in {path!r}: pass a folder or a Hub id with --target. ({error})") from error
    return endless(model)


def endless(model: PreTrainedModel) -> PreTrainedModel:
    """The model without an end-of-text token, so that every run decodes the same number of tokens."""
    model.generation_config.eos_token_id = None
    if model.generation_config.pad_token_id is None:
        model.generation_config.pad_token_id = 0
    return model


class Decoder:
    """Decodes from prefilled prompts with one target.

    Args:
        model (`PreTrainedModel`): From [`load_target`], in the dtype of the prompts.
        prompts ([`PrefilledPrompts`]): Where decoding starts.
        tokens (`int`): Tokens to generate per row; all but the first are timed.
    """

    def __init__(self, model: PreTrainedModel, prompts: PrefilledPrompts, tokens: int):
        self.model = model
        self.prompts = prompts
        self.tokens = tokens
        self._caches: dict[tuple[int, int], SpeculativeCache] = {}

    def run(self, method: Any, rows: slice, context: int, mode: str, seed: int, tokens: int | None = None) -> Run:
        """Decode behind the first `context` tokens of some prompts.

        Plain `generate` is handed the cache of all prompt tokens but the last, our loop of all but those that its
        drafter looks at first. These last ones run before the first token, which is when the clock starts.

        Args:
            method (`DraftModel` or [`HfMethod`]): How to decode.
            mode (`str`): `sample` (temperature 1, nothing cut off) or `greedy`.
        """
        tokens = tokens or self.tokens
        prompt, clock = self.prompts.prompt(rows, context), TokenClock(rows.stop - rows.start)
        options: dict[str, Any] = {**MODES[mode], "max_new_tokens": tokens, "streamer": clock}
        own = isinstance(method, HfMethod)
        if own:
            options |= {"past_key_values": self.prompts.dynamic_cache(rows, context - 1), **method.options}
        else:
            method.generation_config.gate = False  # speculation itself is measured
            cache = self._speculative_cache(method, rows, context, tokens)
            options |= {"past_key_values": cache, "assistant_model": method}
        torch.manual_seed(seed)
        # a hook would be compiled into our steps, and is not needed there
        counted: Any = _counted_forwards(self.model) if own else nullcontext([])
        with counted as forwards:
            output = self.model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        text = output[:, context:]
        if text.shape[1] != tokens or clock.num_tokens + clock.first_tokens != tokens:
            raise RuntimeError(
                f"{text.shape[1]} tokens in {clock.num_tokens + clock.first_tokens} ticks, not {tokens}."
            )
        decoded = len(text) * clock.num_tokens
        if own:
            # the first forward gave what came before the clock started
            return Run(clock.decode_seconds, decoded, text, len(text) * (len(forwards) - 1))
        stats = method.last_speculation
        seconds = {"draft": stats.draft_seconds, "verify": stats.verify_seconds, "rest": stats.rest_seconds}
        shares = {name: value / stats.decode_seconds for name, value in seconds.items()}
        return Run(clock.decode_seconds, decoded, text, stats.num_spec_steps, shares, stats.draft_state_bytes)

    def _speculative_cache(self, draft: Any, rows: slice, context: int, tokens: int) -> SpeculativeCache:
        """One buffer per batch size and context, filled anew for every run."""
        batch, key = rows.stop - rows.start, (rows.stop - rows.start, context)
        if key not in self._caches:
            self._caches.clear()
            limit = context + max(tokens, self.tokens)
            self._caches[key] = SpeculativeCache(self.model.config, batch, limit)
        nodes = draft.num_tree_nodes(TargetView(self.model))
        return self.prompts.fill(self._caches[key], rows, context - nodes)


@contextmanager
def _counted_forwards(model: PreTrainedModel) -> Iterator[list[None]]:
    """A list that gets one entry per forward of `model` while the context is open.

    Transformers' assisted decoding runs the whole prompt in its first forward even if the cache holds it already, and
    its text goes wrong; here the first forward gets what the cache does not hold.
    """
    calls: list[None] = []

    def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        calls.append(None)
        cache, ids = kwargs.get("past_key_values"), kwargs.get("input_ids")
        if len(calls) == 1 and cache is not None and ids is not None and ids.shape[1] > cache.get_seq_length() > 0:
            new = ids.shape[1] - cache.get_seq_length()
            for name in ("input_ids", "position_ids"):
                kwargs[name] = None if kwargs.get(name) is None else kwargs[name][:, -new:]
        return args, kwargs

    handle = model.register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()
