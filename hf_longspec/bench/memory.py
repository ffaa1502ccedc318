"""Extra memory of a call of `generate`: what it needs at its peak beyond the target's weights, keys and values.

Caches are filled with random keys and values, so that no context is ever run as a whole. What decoding needs is
measured behind a full cache; what the prefill needs, in its last chunk, whose masks and copies are the largest.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, LlamaForCausalLM

from ..generation.cache import SpeculativeCache
from ..generation.target import TargetView
from .allocations import Peak, peak_memory
from .engine import HF, PLAIN
from .gpu_inputs import cache_bytes, full_cache
from .progress import Progress
from .results import ResultFile
from .verification_inputs import Shape

# More layers than usual for so small a model: scores of one layer exist at a time, and their share of the cache is that
# of a real model only if there are as many layers. 24 KiB of keys and values per token in float32.
SHAPE = Shape(layers=24, hidden=128, intermediate=256, heads=8, kv_heads=2, head_dim=64, vocab=256)
# Bytes that any method may take per token of context: ids, positions and masks as int64, a few of each.
TEXT_BYTES = 64
# Further ones of n-grams: two arrays of int32 of up to twice the length, and the text.
INDEX_BYTES = 192
# Share of the keys and values that SpecAttn's scores may take.
SCORE_SHARE = 0.008
TOKENS = 3  # the first from the prompt, then two iterations: the second replaces what the first has selected


@dataclass(frozen=True)
class MeasuredDraft:
    """A draft and what its memory may depend on.

    Args:
        draft (`DraftModel`): With its settings.
        ratio (`float`, *optional*): Share of the cache that it copies.
        floor (`int`): Entries that it copies at least.
        index (`bool`): Whether it keeps an index of the text.
    """

    draft: Any
    ratio: float = 0.0
    floor: int = 0
    index: bool = False

    @property
    def bytes_per_token(self) -> int:
        """Bytes that may be taken per token of context, whatever the target."""
        return TEXT_BYTES + (INDEX_BYTES if self.index else 0)

    def copied(self, context: int, kv_bytes: int, nodes: int, layers: int) -> int:
        """Bytes of selected entries and scores.

        Args:
            context (`int`): Cached tokens.
            kv_bytes (`int`): Their keys and values.
            nodes (`int`): Of a verification: as many entries follow the selected ones, and there is room for as many.
            layers (`int`): While the copies of one layer are made, those they replace still exist.
        """
        entries = min(context, max(self.floor, math.ceil(self.ratio * context))) + 2 * nodes
        return int(entries * (1 + 1 / layers) * kv_bytes / context + SCORE_SHARE * kv_bytes)


class MemoryBenchmark:
    """Measures every draft at every context, then the prefill.

    Args:
        model (`LlamaForCausalLM`): On the CPU, never ending by itself.
        shape ([`Shape`]): Its sizes.
        drafts (`Mapping[str, MeasuredDraft]`): By name; one of them is `PLAIN`.
        chunk (`int`): Tokens per forward of the prefill.
        results ([`ResultFile`]): Where the lines go.
        progress ([`Progress`]): Told what is being done.
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        shape: Shape,
        drafts: Mapping[str, MeasuredDraft],
        *,
        chunk: int,
        results: ResultFile,
        progress: Progress,
    ):
        self.model = model
        self.shape = shape
        self.drafts = drafts
        self.chunk = chunk
        self.results = results
        self.progress = progress
        self._prefill_of_hf = 0
        self._smallest: dict[str, tuple[int, int]] = {}  # its smallest context, and what it took there

    def run(self, contexts: Sequence[int]) -> None:
        """All contexts, the smallest first: what does not grow is told by the difference to it."""
        for context in sorted(contexts):
            for name in (HF, *self.drafts):
                self._guarded(name, context, "decode", self.decoding)
            for name in (HF, PLAIN):
                self._guarded(name, context, "prefill", self.prefilling)

    def _guarded(self, name: str, context: int, part: str, measure: Callable[[str, int], None]) -> None:
        what = {"part": part, "method": name, "context": context}
        if not self.results.guard.left:
            self.results.skip("no time left", **what)
        else:
            self.progress.say(f"{part}, {name}, {context} tokens")
            measure(name, context)
        self.progress.step()

    def decoding(self, name: str, context: int) -> None:
        """Decode behind a full cache, and compare with what the method may take."""
        if name == HF:
            peak = self._hf(context, context - 1, {"max_new_tokens": TOKENS})
            self._write("decode", name, context, peak)
            return
        measured = self.drafts[name]
        nodes = measured.draft.num_tree_nodes(TargetView(self.model))
        cache = full_cache(self.model, 1, context, TOKENS, nodes)
        peak = self._ours(measured.draft, cache, context, context - 1, {"max_new_tokens": TOKENS})
        self._smallest.setdefault(name, (context, peak.total))
        values = {"draft_state_bytes": measured.draft.last_speculation.draft_state_bytes}
        self._write("decode", name, context, peak, bound_bytes=self.bound(name, context, nodes), **values)

    def bound(self, name: str, context: int, nodes: int) -> int | None:
        """What a draft may take: what it took at the smallest context, and what may grow from there on.

        SpecAttn, whose copies grow by design, is held to what the loop without a draft took, its copies and its scores.
        Nothing is known at the smallest context of the others.
        """
        measured = self.drafts[name]
        first, extra = self._smallest[PLAIN if measured.ratio else name]
        growth = measured.bytes_per_token * (context - first)
        if measured.ratio:
            copied = measured.copied(context, self.kv_bytes(context), nodes, self.shape.layers)
            return extra + growth + copied
        return None if context == first else extra + growth

    def prefilling(self, name: str, context: int) -> None:
        """Run the last chunk of a prompt behind a cache that holds the rest of it."""
        stored, options = context - self.chunk - 1, {"max_new_tokens": 1, "prefill_chunk_size": self.chunk}
        if name == HF:
            peak = self._hf(context, stored, options)
            self._prefill_of_hf = peak.total
            self._write("prefill", name, context, peak)
            return
        cache = full_cache(self.model, 1, context, 1, 1)
        peak = self._ours(self.drafts[PLAIN].draft, cache, context, stored, options)
        self._write("prefill", name, context, peak, bound_bytes=self._prefill_of_hf + TEXT_BYTES * context)

    def kv_bytes(self, context: int) -> int:
        """Keys and values of one row."""
        return cache_bytes(self.shape, 1, context, self.model.dtype)

    def _ours(self, draft: Any, cache: SpeculativeCache, context: int, stored: int, options: dict[str, Any]) -> Peak:
        cache.set_lengths([stored])
        prompt = self._prompt(context)
        return peak_memory(lambda: self._generate(prompt, past_key_values=cache, assistant_model=draft, **options))[0]

    def _hf(self, context: int, stored: int, options: dict[str, Any]) -> Peak:
        """Plain `generate`; keys and values of the new tokens do not count, its copies of the old ones do."""
        prompt = self._prompt(context)

        def generate(cache: DynamicCache) -> int:
            self._generate(prompt, past_key_values=cache, **options)
            return sum(part.nbytes for layer in cache.layers for part in (layer.keys, layer.values))

        peak, after = peak_memory(generate, lambda: (self._dynamic_cache(stored),))
        return Peak(peak.torch_bytes - (after - self.kv_bytes(stored)), peak.python_bytes)

    def _generate(self, prompt: torch.Tensor, **options: Any) -> None:
        self.model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, **options)

    def _dynamic_cache(self, stored: int) -> DynamicCache:
        size, cache = (1, self.shape.kv_heads, stored, self.shape.head_dim), DynamicCache()
        for layer in range(self.shape.layers):
            cache.update(torch.randn(size, dtype=self.model.dtype), torch.randn(size, dtype=self.model.dtype), layer)
        return cache

    def _prompt(self, context: int) -> torch.Tensor:
        return torch.randint(self.shape.vocab, (1, context), generator=torch.Generator().manual_seed(0))

    def _write(self, part: str, name: str, context: int, peak: Peak, **values: Any) -> None:
        kv_bytes = self.kv_bytes(context)
        record: dict[str, Any] = {"extra_bytes": peak.total, "torch_bytes": peak.torch_bytes}
        record |= {"python_bytes": peak.python_bytes, "kv_bytes": kv_bytes, **values}
        if values.get("bound_bytes") is not None:
            record["within"] = peak.total <= values["bound_bytes"]
        self.results.write("memory", part=part, method=name, context=context, **record)
