"""One verification after 16K tokens: our backend against the masked block of transformers' `sdpa`.

Attention alone, and the whole forward of a random model with four layers of an 8B Llama, over 1, 8, 17 and 64 nodes. A
single node is what plain decoding runs: there transformers needs no mask. Needs about 8 GiB of memory.

    python -m benchmarks.verification
"""

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from benchmarks.harness import add_repeats, integers, names, parser, seconds_of, set_threads, show, time_in_turns
from benchmarks.parts import ratios, report_page
from benchmarks.random_inputs import (
    LOGIT_BUDGET,
    NODE_KEY_GAIN,
    Layer,
    Shape,
    cast,
    random_layers,
    random_model,
    random_tree,
    relative_error,
)
from hf_longspec.attention_backends.contexts import TreeContext
from hf_longspec.attention_backends.interface import attention_forward
from hf_longspec.attention_backends.lengths import SeqLens
from hf_longspec.attention_backends.merge import merge_attention_states
from hf_longspec.attention_backends.reference import prefix_attention, tree_attention
from hf_longspec.bench.machine import read_gb_per_second
from hf_longspec.bench.markdown import markdown_table, range_of
from hf_longspec.bench.progress import Progress
from hf_longspec.bench.results import Record, ResultFile, TimeGuard, of_kind
from hf_longspec.bench.summaries import significant, summarize
from hf_longspec.generation.cache import SpeculativeCache
from hf_longspec.generation.draft_tree import DraftTree
from hf_longspec.generation.target import TargetView

HEADLINE = "One verification after a long prefix"
NOTE = (
    "Milliseconds for one layer (attention) and for the whole model (forward), medians of interleaved repeats; "
    "ratio: transformers' time over ours, lowest and highest in brackets. Transformers runs its sdpa attention "
    "with a 4-D mask on a DynamicCache; for a single node, as in plain decoding, without a mask. Error: "
    "attention against float64, logits of one forward against the other's."
)


class VerificationBenchmark:
    """Measure both parts in one dtype after another, so that only one copy of the weights exists.

    Args:
        shape ([`Shape`]): Sizes of the random model.
        context (`int`): Prefix length.
        nodes (`Sequence[int]`): Tree sizes.
        repeats (`int`): Turns.
        bandwidth (`float`): Memory bandwidth in 10^9 bytes per second, for the floor.
        results ([`ResultFile`]): Where the records go.
        progress ([`Progress`]): Shows what is being done.
    """

    def __init__(
        self,
        shape: Shape,
        context: int,
        nodes: Sequence[int],
        *,
        repeats: int,
        bandwidth: float,
        results: ResultFile,
        progress: Progress,
    ):
        self.shape = shape
        self.context = context
        self.nodes = list(nodes)
        self.repeats = repeats
        self.bandwidth = bandwidth
        self.results = results
        self.progress = progress

    @torch.no_grad()
    def run(self, dtypes: Sequence[str]) -> None:
        """All cells, those of the whole forward after those of attention alone."""
        self.progress.say("drawing random weights, keys and values")
        model = random_model(self.shape, self.context + max(self.nodes))
        drawn = random_layers(self.shape, self.context + max(self.nodes))
        for name in dtypes:
            dtype = getattr(torch, name)
            cast(model, dtype)  # from bfloat16 to float32 and back without loss
            layers = [(keys.to(dtype), values.to(dtype)) for keys, values in drawn]
            for nodes in self.nodes:
                self.measure_attention(name, nodes, model, layers)
            cache = self._cache(model, layers)
            del layers  # the cache holds a copy
            for nodes in self.nodes:
                self.measure_forward(name, nodes, model, cache)
            del cache

    def measure_attention(self, dtype: str, nodes: int, model: LlamaForCausalLM, layers: list[Layer]) -> None:
        """Check one attention case against float64, then time it."""
        what = {"part": "attention", "dtype": dtype, "nodes": nodes, "context": self.context}
        if not self.results.guard.left:
            self.results.skip("no time left", **what)
            return
        case = AttentionCase(
            model.model.layers[0].self_attn, layers, random_tree(nodes, self.shape.vocab), self.context
        )
        ours, hf, budget = case.errors()
        checked = {"error": significant(ours), "hf_error": significant(hf), "budget": significant(budget)}
        checked["floor_ms"] = self._floor(layers[0])
        sides = case.sides()
        self._time(what, sides, sum(side() for side in sides.values()) * len(layers), checked)

    def measure_forward(self, dtype: str, nodes: int, model: LlamaForCausalLM, cache: SpeculativeCache) -> None:
        """Compare the logits of both forwards, then time them."""
        what = {"part": "forward", "dtype": dtype, "nodes": nodes, "context": self.context}
        if not self.results.guard.left:
            self.results.skip("no time left", **what)
            return
        case = ForwardCase(model, cache, random_tree(nodes, self.shape.vocab))
        difference, budget, seconds = case.errors()
        checked = {"error": significant(difference), "budget": budget}
        layers = [part for layer in cache.layers for part in (layer.keys, layer.values)]
        checked["floor_ms"] = self._floor([*layers, *model.model.layers.parameters()])
        self._time(what, case.sides(), seconds, checked)

    def _time(
        self, what: dict[str, Any], sides: dict[str, Callable[[], float]], once: float, checked: dict[str, float]
    ) -> None:
        """Time both sides, if they passed their check and `repeats` times `once` seconds are left."""
        results, expected = self.results, once * self.repeats
        label = f"{what['part']}, {what['dtype']}, {what['nodes']} nodes"
        if not checked["error"] <= checked["budget"]:
            results.skip("not timed: its error is over the budget", **what, **checked)
            self.progress.say(f"{label}: NOT TIMED, error {checked['error']} over {checked['budget']}")
        elif not results.guard.fits(expected):
            results.skip(f"it would take {expected:.0f} s and {results.guard.left:.0f} s are left", **what)
            self.progress.say(f"{label}: left out, it would take {expected:.0f} s")
        else:
            passed = f"error {checked['error']:.1e} within {checked['budget']:.1e}"
            self.progress.say(f"{label}: {passed}, timing {expected:.0f} s")
            seconds = time_in_turns(sides, self.repeats)
            results.write("verification", **what, **self._summary(seconds), **checked)
        self.progress.step()

    def _floor(self, tensors: Iterable[torch.Tensor]) -> float:
        """Milliseconds that reading these tensors once takes at least."""
        read = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return significant(read / self.bandwidth / 1e6)

    @staticmethod
    def _summary(seconds: dict[str, list[float]]) -> dict[str, Any]:
        milliseconds = {name: summarize([value * 1e3 for value in values]) for name, values in seconds.items()}
        return {
            "hf_ms": milliseconds["hf"],
            "ours_ms": milliseconds["ours"],
            "ratio": ratios(seconds["hf"], seconds["ours"]),
        }

    def _cache(self, model: LlamaForCausalLM, layers: list[Layer]) -> SpeculativeCache:
        cache = SpeculativeCache(model.config, 1, self.context, tree_slots=max(self.nodes))
        for layer, (keys, values) in zip(cache.layers, layers, strict=True):
            layer.update(keys[:, :, : self.context], values[:, :, : self.context])
        cache.set_lengths([self.context])
        return cache


# Relative error of the attention against float64: at most that of plain torch in the same dtype, times the factor.
FLOAT32_FLOOR, FLOAT32_FACTOR, BFLOAT16_FACTOR = 2e-6, 1.5, 2.0


def block_mask(tree: DraftTree, prefix: int) -> torch.Tensor | None:
    """The mask for transformers' `sdpa`: `(1, 1, N, prefix + N)`; none for a lone root, which sees everything."""
    if tree.num_nodes == 1:
        return None
    seen = torch.ones(1, tree.num_nodes, prefix, dtype=torch.bool)
    return torch.cat([seen, tree.mask], dim=2)[:, None]


@dataclass
class AttentionCase:
    """Attention alone: N nodes after `prefix` entries, layer after layer so that no cache level holds what is read.

    Args:
        attention (`torch.nn.Module`): Attention layer of the model; both functions read their settings off it.
        layers (`list`): Keys and values, `(1, K, at least prefix + N, D)`; the nodes' slots are overwritten.
        tree ([`DraftTree`]): The nodes.
        prefix (`int`): Entries before them.
    """

    attention: Any
    layers: list[Layer]
    tree: DraftTree
    prefix: int
    query: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(2)
        keys, nodes = self.layers[0][0], self.tree.num_nodes
        heads = keys.shape[1] * self.attention.num_key_value_groups
        self.query = torch.randn(1, heads, nodes, keys.shape[3], generator=generator).to(keys.dtype)
        self.mask = block_mask(self.tree, self.prefix)
        for keys, _ in self.layers:
            own = torch.randn(1, keys.shape[1], nodes, keys.shape[3], generator=generator)
            keys[:, :, self.prefix : self.prefix + nodes] = NODE_KEY_GAIN * own

    def hf(self, layer: Layer) -> torch.Tensor:
        """Transformers' `sdpa`, `(1, N, H, D)`."""
        scaling = self.attention.scaling
        return sdpa_attention_forward(self.attention, self.query, *self._written(layer), self.mask, scaling=scaling)[0]

    def ours(self, layer: Layer, context: TreeContext | None = None) -> torch.Tensor:
        """Our backend, `(1, N, H, D)`."""
        context, scaling = context or self.context(), self.attention.scaling
        return attention_forward(
            self.attention, self.query, *self._written(layer), self.tree.mask[:, None], scaling=scaling, tree=context
        )[0]

    def exact(self, layer: Layer) -> torch.Tensor:
        """The reference in float64, `(1, N, H, D)`."""
        keys, values = (part.double() for part in self._written(layer))
        query, lengths, scaling = self.query.double(), SeqLens([self.prefix]), self.attention.scaling
        inside, staged = slice(0, self.prefix), slice(self.prefix, None)
        parts = [
            prefix_attention(query, keys[:, :, inside], values[:, :, inside], lengths, scaling=scaling),
            tree_attention(query, keys[:, :, staged], values[:, :, staged], self.tree.mask, scaling=scaling),
        ]
        return merge_attention_states(parts)[0].transpose(1, 2)

    def errors(self) -> tuple[float, float, float]:
        """Relative errors of ours and of `sdpa` in the first layer, and the budget of ours."""
        exact = self.exact(self.layers[0])
        ours, hf = (relative_error(side(self.layers[0]), exact) for side in (self.ours, self.hf))
        if self.query.dtype == torch.float32:
            return ours, hf, max(FLOAT32_FLOOR, FLOAT32_FACTOR * hf)
        return ours, hf, BFLOAT16_FACTOR * hf

    def sides(self) -> dict[str, Callable[[], float]]:
        """Functions that return the seconds per layer of one pass over all layers."""

        def ours() -> None:
            context = self.context()  # one per forward, as in a model
            for layer in self.layers:
                self.ours(layer, context)

        def hf() -> None:
            for layer in self.layers:
                self.hf(layer)

        return {"hf": lambda: seconds_of(hf) / len(self.layers), "ours": lambda: seconds_of(ours) / len(self.layers)}

    def context(self) -> TreeContext:
        """The context of one forward for our backend."""
        return TreeContext(SeqLens([self.prefix]), self.prefix + self.tree.depths, self.tree.mask)

    def _written(self, layer: Layer) -> Layer:
        end = self.prefix + self.tree.num_nodes
        return layer[0][:, :, :end], layer[1][:, :, :end]


class ForwardCase:
    """The whole forward: `TargetView.verify` on a preallocated cache against the same model with a `DynamicCache`.

    Args:
        model (`LlamaForCausalLM`): Under `sdpa`, in the dtype of the cache.
        cache ([`SpeculativeCache`]): Holds the prefix. The other side reads the same keys and values.
        tree ([`DraftTree`]): The nodes.
    """

    def __init__(self, model: LlamaForCausalLM, cache: SpeculativeCache, tree: DraftTree):
        self.model = model
        self.cache = cache
        self.tree = tree
        self.prefix = cache.lengths.host[0]
        self.mask = block_mask(tree, self.prefix)

    def hf(self) -> tuple[float, torch.Tensor]:
        """Seconds and logits of transformers' forward. The growing cache copies itself, as it does in `generate`."""
        past = DynamicCache()
        for index, layer in enumerate(self.cache.layers):
            past.update(layer.keys[:, :, : self.prefix], layer.values[:, :, : self.prefix], index)
        positions = self.prefix + self.tree.depths
        logits: list[torch.Tensor] = []

        def forward() -> None:
            output = self.model(
                input_ids=self.tree.tokens, position_ids=positions, past_key_values=past, attention_mask=self.mask
            )
            logits.append(output.logits)

        return seconds_of(forward), logits[0]

    def ours(self) -> tuple[float, torch.Tensor]:
        """Seconds and logits of our verification; choosing the attention implementation is not in it."""
        target, logits = TargetView(self.model), []
        with target.attention():
            seconds = seconds_of(lambda: logits.append(target.verify(self.tree, self.cache).logits))
        self.cache.rollback()
        return seconds, logits[0]

    def errors(self) -> tuple[float, float, float]:
        """Relative difference of the logits, its budget, and the seconds that both sides took."""
        (ours_seconds, ours), (hf_seconds, hf) = self.ours(), self.hf()
        return relative_error(ours, hf.double()), LOGIT_BUDGET[self.model.dtype], ours_seconds + hf_seconds

    def sides(self) -> dict[str, Callable[[], float]]:
        """Functions that return seconds."""
        return {"hf": lambda: self.hf()[0], "ours": lambda: self.ours()[0]}


def verification_headline(records: Sequence[Record]) -> str:
    """One row per case: both times and their ratio."""
    header = ["part", "dtype", "nodes", "transformers, ms", "ours, ms", "ratio", "bandwidth floor, ms", "error"]
    rows = [
        [
            row["part"],
            row["dtype"],
            str(row["nodes"]),
            f"{row['hf_ms']['median']:.1f}",
            f"{row['ours_ms']['median']:.1f}",
            range_of(row["ratio"]),
            f"{row['floor_ms']:.1f}",
            f"{row['error']:.0e}",
        ]
        for row in of_kind(records, "verification")
    ]
    return markdown_table(header, rows)


def verification_report(records: Sequence[Record]) -> str:
    """The table with its environment."""
    return report_page("One verification", NOTE, [verification_headline(records)], records)


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    set_threads(args.threads)
    guard = TimeGuard(args.minutes)
    progress = Progress(2 * len(args.nodes) * len(args.dtypes), lines=True, quiet=args.quiet)
    settings = {"shape": vars(args.shape), "context": args.context, "repeats": args.repeats}
    with ResultFile(args.output, "verification", verification_report, guard, settings) as results:
        bandwidth = read_gb_per_second()
        results.write("ceilings", read_gb_per_second=round(bandwidth, 1))
        benchmark = VerificationBenchmark(
            args.shape,
            args.context,
            args.nodes,
            repeats=args.repeats,
            bandwidth=bandwidth,
            results=results,
            progress=progress,
        )
        benchmark.run(args.dtypes)
    show(results, progress)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    made = parser(__doc__, "verification", minutes=6)
    add_repeats(made)
    made.add_argument("--context", type=int, default=16384, help="tokens before the nodes (default: %(default)s)")
    made.add_argument("--nodes", type=integers, default=[1, 8, 17, 64], help="tree sizes (default: 1,8,17,64)")
    made.add_argument("--dtypes", type=names, default=["float32", "bfloat16"], help="default: float32,bfloat16")
    made.add_argument("--shape", type=shape, default=Shape(), help="sizes of the model, such as layers=2,hidden=512")
    return made.parse_args(arguments)


def shape(text: str) -> Shape:
    """`layers=2,hidden=512` as sizes."""
    pairs = (pair.split("=") for pair in text.split(","))
    return Shape(**{name: int(size) for name, size in pairs})


if __name__ == "__main__":
    main()
