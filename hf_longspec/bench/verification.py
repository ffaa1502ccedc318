"""The verification step alone: attention and whole forward over N nodes behind a long prefix."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from transformers import LlamaForCausalLM

from ..generation.cache import SpeculativeCache
from .progress import Progress
from .results import ResultFile
from .summaries import ratios, significant, summarize
from .timing import time_in_turns
from .verification_cases import AttentionCase, ForwardCase
from .verification_inputs import Layer, Shape, cast, random_layers, random_model, random_tree


class VerificationBenchmark:
    """Measures both parts in one dtype after another, so that only one copy of the weights exists.

    Args:
        shape ([`Shape`]): Of the random model.
        context (`int`): Prefix length.
        nodes (`Sequence[int]`): Tree sizes.
        repeats (`int`): Turns.
        bandwidth (`float`): Memory bandwidth in 10^9 bytes per second, for the floor.
        results ([`ResultFile`]): Where the records go.
        progress ([`Progress`]): Told what is being done.
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
            "hf_ms": milliseconds["hf"].to_dict(),
            "ours_ms": milliseconds["ours"].to_dict(),
            "ratio": ratios(seconds["hf"], seconds["ours"]).to_dict(),
        }

    def _cache(self, model: LlamaForCausalLM, layers: list[Layer]) -> SpeculativeCache:
        cache = SpeculativeCache(model.config, 1, self.context, tree_slots=max(self.nodes))
        for layer, (keys, values) in zip(cache.layers, layers, strict=True):
            layer.update(keys[:, :, : self.context], values[:, :, : self.context])
        cache.set_lengths([self.context])
        return cache
