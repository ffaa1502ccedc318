"""Iterations on hybrid targets after 4K tokens, in plain steps: a commit, a chain of five nodes, a tree of 16.

Random models with eight layers of width 512, one for each kind of recurrence. An iteration is a verification and its
commit. Times are processor time of one thread, so that other programs on the machine change the ratios little.

    python -m benchmarks.hybrid
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig

from benchmarks import read_yaml
from benchmarks.harness import MIN_REPEATS, Run, parser, ratios, start, time_in_turns
from benchmarks.random_inputs import BothCaches, random_tree
from hf_longspec.cli.files import Record
from hf_longspec.cli.measuring import summarize
from hf_longspec.generation.draft_tree import DraftTree

CONTEXT, CHAIN, TREE = 4096, 5, 16
ACCEPTED = 3  # nodes of the chain that a commit keeps
PROMPT = 64  # tokens that the states are computed from; the keys of all others are random
SUITE = read_yaml("suites/hybrid.yaml")
SHAPE = SUITE["shape"]


class HybridCase(BothCaches):
    """A random model after a prefix of `context` tokens, to which `room` more can be committed."""

    def __init__(self, kind: str, settings: Mapping[str, Any], context: int, room: int):
        config = AutoConfig.for_model(kind, **settings)
        super().__init__(config, min(PROMPT, context), context + room, tree_slots=TREE)
        prompt = self.prompt
        for layer, stock in zip(self.cache.layers, self.stock.layers, strict=True):
            if layer in self.cache.key_layers:
                for part in ("keys", "values"):
                    setattr(stock, part, getattr(layer, part)[:, :, :context].normal_().clone())
        self.cache.set_lengths([context])
        chain, tree = DraftTree.chain(prompt[:, :CHAIN]), random_tree(TREE, config.vocab_size)
        deepest = tree.mask[0, tree.depths[0].argmax()].nonzero().T
        self.trees = {"plain": (DraftTree.root_only(prompt[0, :1]), None, 1), "chain": (chain, None, ACCEPTED)}
        self.trees["tree"] = tree, deepest, deepest.shape[1]

    def iteration(self, name: str) -> tuple[float, float]:
        """Return the seconds of an iteration, and of its commit alone."""
        tree, path, count = self.trees[name]
        with self.target.attention():
            started = time.process_time()
            self.target.verify(tree, self.cache)
            verified = time.process_time()
            self.cache.commit(path, [count])
            ended = time.process_time()
        return ended - started, ended - verified

    def functions(self) -> dict[str, Callable[[], float]]:
        parts: Any = {name: lambda name=name: self.iteration(name)[0] for name in self.trees}
        return parts | {"commit": lambda: self.iteration("chain")[1], "stock": self.forward}


@torch.no_grad()
def measure(results: Run, models: Mapping[str, dict[str, Any]], context: int, repeats: int) -> None:
    for kind, settings in models.items():
        results.say(kind)
        results.measure("hybrid", {"type": kind}, partial(timed, kind, context, repeats, **settings), alike=())


def timed(kind: str, context: int, repeats: int, recurrence: str, **settings: Any) -> Record:
    case = HybridCase(kind, SHAPE | settings, context, (repeats + 1) * (TREE + 3 * CHAIN))
    functions = case.functions()
    for function in functions.values():  # the first call of each makes what later ones reuse
        function()
    seconds = time_in_turns(functions, repeats)
    plain, chain = seconds["plain"], seconds["chain"]
    pairs = {"stock": (plain, seconds["stock"]), "commit": (seconds["commit"], plain), "chain": (chain, plain)}
    pairs["tree"] = seconds["tree"], chain
    record: Record = {"recurrence": recurrence, "plain_ms": summarize([value * 1e3 for value in plain])}
    return record | {name: ratios(*pair) for name, pair in pairs.items()}


def main(arguments: list[str] | None = None) -> None:
    args = parser(__doc__, "hybrid", minutes=20, repeats=3 * MIN_REPEATS).parse_args(arguments)
    args.threads = 1
    torch.manual_seed(0)
    settings = {"shape": SHAPE, "context": CONTEXT, "chain": CHAIN, "tree": TREE, "repeats": args.repeats}
    with start(args, "hybrid", settings) as results:
        measure(results, SUITE["models"], CONTEXT, args.repeats)


if __name__ == "__main__":
    main()
