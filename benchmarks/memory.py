"""Extra memory of `generate`: the peak beyond the target's weights, keys and values, for every kind of draft.

Decoding is measured after a full cache of random entries, the prefill in its last chunk, on a small random model on the
CPU. Nothing is timed, so other programs may run at the same time. benchmarks/README.md describes the method.

    python -m benchmarks.memory
"""

import gc
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import DynamicCache, LlamaForCausalLM

import hf_longspec
from benchmarks.harness import Run, parser, start
from benchmarks.random_inputs import Shape, cache_bytes, dynamic_cache, full_cache, random_target
from hf_longspec.cli.files import Record
from hf_longspec.cli.measuring import HF, PLAIN
from hf_longspec.generation.cache import CACHE_NAME
from hf_longspec.generation.target import TargetView

MEASURED = "hf_longspec: measured"


@dataclass(frozen=True)
class Peak:
    """Highest number of bytes beyond the state before the call, per allocator."""

    torch_bytes: int  # tensors and the scratch buffers of operations
    python_bytes: int  # numpy's buffers and Python's objects

    @property
    def total(self) -> int:
        """The sum, an upper bound of the memory that both had at the same time."""
        return self.torch_bytes + self.python_bytes


def peak_memory(function: Callable[..., Any], prepare: Callable[[], tuple[Any, ...]] = tuple) -> tuple[Peak, Any]:
    """Peak of one call on the CPU, beyond the arguments that `prepare` gives, and what the call returned.

    Torch's allocator reports every block to the profiler, also scratch buffers inside an operation. Only blocks that
    were handed out under the profiler are followed to their end, so what a call may replace is made by `prepare`.
    The peaks of torch and of `tracemalloc` need not coincide. Pages of zeros count in full, touched or not.
    """
    tracemalloc.start()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            arguments = list(prepare())
            gc.collect()  # or the garbage of `prepare` would be freed in the middle of the call
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            with record_function(MEASURED):
                result = function(*(arguments.pop(0) for _ in range(len(arguments))))
            python = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    return Peak(_highest(profiler), max(0, python)), result


def _highest(profiler: Any) -> int:
    """Bytes of torch's allocator at the highest point of what was measured, above its beginning."""
    events = profiler.profiler.kineto_results.events()
    (call,) = [event for event in events if event.name() == MEASURED]
    blocks = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    sizes = [size for moment, size in blocks if call.start_ns() <= moment <= call.end_ns()]
    return max(accumulate(sizes, initial=0))


# More layers than usual for so small a model: scores of one layer exist at a time, and their share of the cache is that
# of a real model only if there are as many layers. 24 KiB of keys and values per token in float32.
SHAPE = Shape(layers=24, hidden=128, intermediate=256, heads=8, kv_heads=2, head_dim=64, vocab=256)
FIRST_CONTEXT = 64  # of a call that is not measured
CONTEXTS = (8192, 16384, 32768, 65536)
CHUNK = 128  # tokens per forward of the prefill
BUDGET = 1024  # entries of TokenSwift's partial cache
TOKENS = 3  # the first from the prompt, then two iterations: the second replaces what the first has selected


@dataclass
class MemoryBenchmark:
    """Measure every draft at every context, then the prefill."""

    model: LlamaForCausalLM  # on the CPU, never ending by itself
    shape: Shape  # its sizes
    drafts: Mapping[str, Any]  # by name; one of them is `PLAIN`
    chunk: int  # tokens per forward of the prefill

    def run(self, contexts: Sequence[int], results: Run) -> None:
        """Write a line for each way to decode, part and context, the smallest context first."""
        for draft in self.drafts.values():  # the first call of a process also checks the target
            self.ours(draft, FIRST_CONTEXT, FIRST_CONTEXT - 1, {"max_new_tokens": TOKENS})
        decode = {"max_new_tokens": TOKENS}
        prefill = {"max_new_tokens": 1, "prefill_chunk_size": self.chunk}
        for context in sorted(contexts):
            parts = [("decode", name, context - 1, decode) for name in (HF, *self.drafts)]
            parts += [("prefill", name, context - self.chunk - 1, prefill) for name in (HF, PLAIN)]
            for part, name, stored, options in parts:
                place = {"part": part, "method": name, "context": context}
                peak_of = self.stock if name == HF else partial(self.ours, self.drafts[name])
                results.say(f"{part}, {name}, {context} tokens")
                results.measure("memory", place, partial(self._record, peak_of, context, stored, options))

    def _record(self, peak_of: Callable[..., Peak], context: int, stored: int, options: Mapping[str, Any]) -> Record:
        peak = peak_of(context, stored, options)
        record = {"extra_bytes": peak.total, "torch_bytes": peak.torch_bytes}
        return record | {"python_bytes": peak.python_bytes, "kv_bytes": self.kv_bytes(context)}

    def kv_bytes(self, context: int) -> int:
        return cache_bytes(self.shape, 1, context, self.model.dtype)

    def ours(self, draft: Any, context: int, stored: int, options: Mapping[str, Any]) -> Peak:
        """The peak of a call of `generate` with a draft, `stored` tokens of whose prompt are in the cache."""
        cache = full_cache(self.model, 1, context, TOKENS, draft.num_tree_nodes(TargetView(self.model)))
        cache.set_lengths([stored])
        prompt = self._prompt(context)
        return peak_memory(lambda: self._generate(prompt, **{CACHE_NAME: cache}, assistant_model=draft, **options))[0]

    def stock(self, context: int, stored: int, options: Mapping[str, Any]) -> Peak:
        """Plain `generate`; keys and values of the new tokens do not count, its copies of the old ones do."""
        prompt = self._prompt(context)

        def generate(cache: DynamicCache) -> int:
            self._generate(prompt, **{CACHE_NAME: cache}, **options)
            return sum(part.nbytes for layer in cache.layers for part in (layer.keys, layer.values))

        peak, after = peak_memory(generate, lambda: (dynamic_cache(full_cache(self.model, 1, stored, 1, 1), stored),))
        return Peak(peak.torch_bytes - (after - self.kv_bytes(stored)), peak.python_bytes)

    def _prompt(self, context: int) -> torch.Tensor:
        return torch.randint(self.shape.vocab, (1, context), generator=torch.Generator().manual_seed(0))

    def _generate(self, prompt: torch.Tensor, **options: Any) -> None:
        self.model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, **options)


def main(arguments: list[str] | None = None) -> None:
    args = parser(__doc__, "memory", minutes=6).parse_args(arguments)
    torch.manual_seed(0)
    settings = {"shape": vars(SHAPE), "dtype": "float32", "chunk": CHUNK, "budget": BUDGET}
    with start(args, "memory", settings) as results:
        model = random_target(SHAPE, max(CONTEXTS) + 64, torch.device("cpu"), torch.float32)
        MemoryBenchmark(model, SHAPE, make_drafts(model), CHUNK).run(CONTEXTS, results)


def make_drafts(model: LlamaForCausalLM, budget: int = BUDGET) -> dict[str, Any]:
    heads = hf_longspec.TokenSwiftDraftModel.from_target(model)
    heads.generation_config.update(self_draft="partial_kv", partial_kv_budget=budget)
    return {
        PLAIN: hf_longspec.PlainDraftModel.from_target(model),
        "SpecAttn, gamma 4": hf_longspec.SpecAttnDraftModel.from_target(model, num_assistant_tokens=4),
        "LongSpec, 4+4+4+3": hf_longspec.LongSpecDraftModel.from_target(model),
        "TokenSwift, verify_hidden": hf_longspec.TokenSwiftDraftModel.from_target(model),
        "TokenSwift, partial_kv": heads,
        "n-grams": hf_longspec.NgramDraftModel.from_target(model),
    }


if __name__ == "__main__":
    main()
