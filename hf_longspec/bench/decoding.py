"""One timed call of `generate` on a prefilled cache, the same way for plain `generate` and for our loop."""

from dataclasses import dataclass
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
class Run:
    """What one call took and gave.

    Args:
        seconds (`float`): From the first token to the last.
        tokens (`int`): Tokens decoded in that time, all rows together.
        text (`torch.LongTensor` of shape `(batch, tokens)`): What was generated.
        steps (`int`): Verifications of all rows together; for plain `generate`, its steps.
        draft_share (`float`): Share of the time spent in the drafter.
    """

    seconds: float
    tokens: int
    text: torch.Tensor
    steps: int
    draft_share: float = 0.0

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

    def run(self, draft: Any, rows: slice, context: int, mode: str, seed: int, tokens: int | None = None) -> Run:
        """Decode behind the first `context` tokens of some prompts.

        Plain `generate` is handed the cache of all prompt tokens but the last, our loop of all but those that its
        drafter looks at first. These last ones run before the first token, which is when the clock starts.

        Args:
            draft (`DraftModel`, *optional*): `None` runs plain `generate`.
            mode (`str`): `sample` (temperature 1, nothing cut off) or `greedy`.
        """
        tokens = tokens or self.tokens
        prompt, clock = self.prompts.prompt(rows, context), TokenClock()
        options: dict[str, Any] = {**MODES[mode], "max_new_tokens": tokens, "streamer": clock}
        if draft is None:
            options["past_key_values"] = self.prompts.dynamic_cache(rows, context - 1)
        else:
            options["assistant_model"] = draft
            options["past_key_values"] = self._speculative_cache(draft, rows, context, tokens)
        torch.manual_seed(seed)
        output = self.model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        text = output[:, context:]
        if text.shape[1] != tokens or clock.num_tokens != tokens - 1:
            raise RuntimeError(f"{text.shape[1]} tokens and {clock.num_tokens} ticks instead of {tokens}.")
        decoded = len(text) * clock.num_tokens
        if draft is None:
            return Run(clock.decode_seconds, decoded, text, decoded)
        stats = draft.last_speculation
        share = stats.draft_seconds / stats.decode_seconds if stats.decode_seconds else 0.0
        return Run(clock.decode_seconds, decoded, text, stats.num_spec_steps, share)

    def _speculative_cache(self, draft: Any, rows: slice, context: int, tokens: int) -> SpeculativeCache:
        """One buffer per batch size and context, filled anew for every run."""
        batch, key = rows.stop - rows.start, (rows.stop - rows.start, context)
        if key not in self._caches:
            self._caches.clear()
            limit = context + max(tokens, self.tokens)
            self._caches[key] = SpeculativeCache(self.model.config, batch, limit)
        nodes = draft.max_nodes(TargetView(self.model))
        return self.prompts.fill(self._caches[key], rows, context - nodes)
