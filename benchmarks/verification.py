"""One verification after 16K tokens: our backend against the masked block of transformers' `sdpa`.

Attention alone, and the whole forward of a random model with four layers of an 8B Llama, over 1, 8, 16 and 64 nodes. A
single node is what plain decoding runs: there transformers needs no mask. Needs about 8 GiB of memory.

    python -m benchmarks.verification
"""

import time
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch.utils.benchmark import Timer
from transformers import LlamaForCausalLM

from benchmarks.harness import MIN_REPEATS, Run, parser, ratios, start, time_in_turns
from benchmarks.random_inputs import (
    LOGIT_BUDGET,
    DeviceAttention,
    HfForward,
    Shape,
    block_mask,
    cast,
    full_cache,
    hf_attention,
    random_target,
    random_tree,
    relative_error,
)
from benchmarks.runner import NO_TIME
from hf_longspec.attention_backends.registry import AttentionCall, select
from hf_longspec.cli.files import Record
from hf_longspec.cli.measuring import significant, summarize
from hf_longspec.generation.cache import SpeculativeCache
from hf_longspec.generation.draft_tree import DraftTree
from hf_longspec.generation.target import TargetView

CONTEXT, NODES, DTYPES = 16384, (1, 8, 16, 64), ("float32", "bfloat16")
READ_BYTES, READ_SECONDS = 2**29, 1.0  # far above any last-level cache
# Relative error of the attention against float64: at most that of plain torch in the same dtype, times the factor.
FLOAT32_FLOOR, FLOAT32_FACTOR, BFLOAT16_FACTOR = 2e-6, 1.5, 2.0
CPU = torch.device("cpu")


def read_gb_per_second() -> float:
    """Measure the rate at which a large sum reads memory, in 10^9 bytes per second: the best pass within a second."""
    # threads named: Timer runs with one otherwise
    timer = Timer("buffer.sum()", globals={"buffer": torch.ones(READ_BYTES // 4)}, num_threads=torch.get_num_threads())
    return READ_BYTES / min(timer.blocked_autorange(min_run_time=READ_SECONDS).times) / 1e9


@torch.no_grad()
def measure(
    results: Run,
    shape: Shape,
    context: int,
    nodes: Sequence[int],
    dtypes: Sequence[str],
    repeats: int,
    bandwidth: float,
) -> None:
    """Measure both parts in one dtype after another, with one copy of the weights; bandwidth in GB per second."""
    results.say("drawing random weights, keys and values")
    model = random_target(shape, context + max(nodes), CPU, torch.bfloat16)
    parts = {"attention": AttentionCase, "forward": ForwardCase}
    for name in dtypes:
        cast(model, getattr(torch, name))  # from bfloat16 to float32 and back without loss
        cache = full_cache(model, 1, context, 1, max(nodes))
        for part, count in product(parts, nodes):
            what = {"part": part, "dtype": name, "nodes": count, "context": context}
            case = parts[part](model, cache, random_tree(count, shape.vocab))
            results.measure("verification", what, partial(timed, results, case, repeats, bandwidth))


def timed(results: Run, case: Any, repeats: int, bandwidth: float) -> Record:
    """The times of both sides, after a check; ValueError for a wrong result, and without time for the repeats."""
    error, budget, once, others = case.check()
    if not error <= budget:
        raise ValueError(f"not timed: its error of {error:.1e} is over the budget of {budget:.1e}")
    if not results.fits(once * repeats):
        raise ValueError(NO_TIME)
    results.say(f"error {error:.1e} within {budget:.1e}, timing {once * repeats:.0f} s")
    seconds = time_in_turns({"hf": lambda: case.hf()[0], "ours": lambda: case.ours()[0]}, repeats)
    record: Record = {f"{side}_ms": summarize([value * 1e3 for value in times]) for side, times in seconds.items()}
    record |= {"ratio": ratios(seconds["hf"], seconds["ours"]), "error": significant(error), **others}
    # reading these tensors once takes so long at least
    floor_ms = sum(tensor.nbytes for tensor in case.read) / bandwidth / 1e6
    return record | {"budget": significant(budget), "floor_ms": significant(floor_ms)}


class AttentionCase:
    """Attention alone, layer after layer, so that no cache of the processor holds the keys."""

    def __init__(self, model: LlamaForCausalLM, cache: SpeculativeCache, tree: DraftTree):
        layers = [(layer.keys, layer.values) for layer in cache.layers]
        self.case = DeviceAttention(cache.lengths.host, layers, tree, model.config.num_attention_heads)
        size = self.case.query.shape[3]
        self.backend = select(AttentionCall(CPU, self.case.query.dtype, size, size))
        self.transformers = hf_attention(self.case)
        self.read = self.case.written(layers[0])

    def hf(self) -> tuple[float, torch.Tensor]:
        """Seconds per layer of a pass of transformers through all layers, and the output of the first."""
        started = time.perf_counter()
        outputs = [self.transformers(layer) for layer in self.case.layers]
        return (time.perf_counter() - started) / len(outputs), outputs[0]

    def ours(self) -> tuple[float, torch.Tensor]:
        started = time.perf_counter()
        context = self.case.context()  # one per forward, as in a model
        layers = enumerate(self.case.layers)
        outputs = [self.case.attend(self.backend, layer, context, index) for index, layer in layers]
        return (time.perf_counter() - started) / len(outputs), outputs[0]

    def check(self) -> tuple[float, float, float, dict[str, float]]:
        """Relative error of ours in the first layer, its budget, the seconds of both sides, and the error of `sdpa`."""
        (ours_seconds, ours), (hf_seconds, hf) = self.ours(), self.hf()
        exact = self.case.exact(self.case.layers[0])[0]
        hf_error = relative_error(hf, exact)
        budget = BFLOAT16_FACTOR * hf_error
        if self.case.query.dtype == torch.float32:
            budget = max(FLOAT32_FLOOR, FLOAT32_FACTOR * hf_error)
        once = (ours_seconds + hf_seconds) * len(self.case.layers)
        return relative_error(ours, exact), budget, once, {"hf_error": significant(hf_error)}


class ForwardCase:
    """The whole forward: `TargetView.verify` on the cache, against the model under `sdpa` on a `DynamicCache`."""

    def __init__(self, model: LlamaForCausalLM, cache: SpeculativeCache, tree: DraftTree):
        self.model, self.cache, self.tree = model, cache, tree
        self.mask = block_mask(tree, cache.lengths.host[0])
        self.forward = HfForward(model, cache)
        self.read = [part for layer in cache.layers for part in (layer.keys, layer.values)]
        self.read += model.model.layers.parameters()

    def hf(self) -> tuple[float, torch.Tensor]:
        """Seconds and logits of transformers' forward. The growing cache copies itself, as it does in `generate`."""
        started = time.perf_counter()
        logits = self.forward(self.tree, self.mask)
        return time.perf_counter() - started, logits

    def ours(self) -> tuple[float, torch.Tensor]:
        """Seconds and logits of our verification; choosing the attention implementation is not in it."""
        target = TargetView(self.model)
        with target.attention():
            started = time.perf_counter()
            logits = target.verify(self.tree, self.cache).logits
            seconds = time.perf_counter() - started
        self.cache.rollback()
        return seconds, logits

    def check(self) -> tuple[float, float, float, dict[str, float]]:
        """Relative difference of the logits, its budget, the seconds that both sides took, and nothing else."""
        (ours_seconds, ours), (hf_seconds, hf) = self.ours(), self.hf()
        return (relative_error(ours, hf.double()), LOGIT_BUDGET[self.model.dtype], ours_seconds + hf_seconds, {})


def main(arguments: list[str] | None = None) -> None:
    args = parser(__doc__, "verification", minutes=6, repeats=MIN_REPEATS).parse_args(arguments)
    torch.manual_seed(0)
    shape = Shape()
    settings = {"shape": vars(shape), "context": CONTEXT, "repeats": args.repeats}
    with start(args, "verification", settings) as results:
        bandwidth = read_gb_per_second()
        results.write("ceilings", read_gb_per_second=round(bandwidth, 1))
        measure(results, shape, CONTEXT, NODES, DTYPES, args.repeats, bandwidth)


if __name__ == "__main__":
    main()
