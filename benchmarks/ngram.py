"""N-grams against transformers' prompt lookup on held-out text: tau with 95 % intervals, then speed side by side.

Both copy what followed earlier in the text. Speeds are taken first, while there is time; a method that does not emit
the greedy float32 text of plain `generate` is not timed. `--parts tau` times nothing, so that other work may go on
beside it.

    python -m benchmarks.ngram --target hub_cards/tiny-target --data novels --data stdlib --threads 1
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import hf_longspec
from benchmarks.acceptance import AcceptanceBenchmark, Setting
from benchmarks.engine import measure_speed
from benchmarks.harness import (
    Run,
    add_prompts,
    add_repeats,
    integers,
    load_prompts,
    load_target,
    names,
    parser,
    prefilled,
    start,
)
from hf_longspec.bench.calls import MODES, PLAIN, HfMethod
from hf_longspec.bench.prefill import PrefilledPrompts

# Differences are taken to the first: transformers' defaults. The second has the lengths of our defaults.
LOOKUPS: dict[str, dict[str, Any]] = {
    "hf prompt lookup, 10 tokens": {"prompt_lookup_num_tokens": 10},
    "hf prompt lookup, 8 tokens, size 3": {"prompt_lookup_num_tokens": 8, "max_matching_ngram_size": 3},
}
NGRAMS: dict[str, dict[str, Any]] = {
    "n-grams, both": {},
    "n-grams, pool": {"ngram_source": "pool"},
    "n-grams, lookup": {"ngram_source": "lookup"},
    "n-grams, lookup, one path of 10": {
        "ngram_source": "lookup",
        "ngram_candidates": 1,
        "num_assistant_tokens": 10,
    },
    "n-grams, both, 4 paths of 4": {"ngram_candidates": 4, "num_assistant_tokens": 4},
}


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    model = load_target(args.target, torch.float32)
    tokens, origin = load_prompts(args.target, args.data, max(args.lengths), args.prompts)
    settings = {"target": Path(args.target).name, "tokens": args.tokens, "repeats": args.repeats, **origin}
    settings["defaults"] = hf_longspec.NgramDraftModel.settings | {"gate": False}
    with start(args, "ngram", settings) as results:
        prompts = prefilled(model, tokens, results)
        if "speed" in args.parts:
            # one prompt at a time, as transformers' prompt lookup has it
            sizes = {"contexts": args.lengths, "batches": [1], "dtypes": ["float32"]}
            sizes |= {"tokens": args.tokens, "repeats": args.repeats}
            measure_speed(results, {"float32": model}, make_methods, prompts, **sizes)
        if "tau" in args.parts:
            measure_tau(model, prompts, args, results)


def measure_tau(model: PreTrainedModel, prompts: PrefilledPrompts, args: argparse.Namespace, results: Run) -> None:
    """tau of every method on every prompt."""
    methods = {name: method for name, method in make_methods(model).items() if name != PLAIN}
    plan = [(name, Setting.of(mode), length) for length in args.lengths for mode in MODES for name in methods]
    AcceptanceBenchmark(model, methods, prompts, args.tokens, args.batch).run(plan, results)


def make_methods(model: PreTrainedModel) -> dict[str, Any]:
    """transformers' prompt lookup, our loop without a draft, and n-grams from every source."""
    methods: dict[str, Any] = {name: HfMethod(options, max_batch=1) for name, options in LOOKUPS.items()}
    methods[PLAIN] = hf_longspec.PlainDraftModel.from_target(model)
    for name, options in NGRAMS.items():
        methods[name] = hf_longspec.NgramDraftModel.from_target(model, **options)
    return methods


def parse(arguments: list[str] | None) -> argparse.Namespace:
    made = parser(__doc__, "ngram", minutes=40)
    add_repeats(made)
    add_prompts(made)
    made.add_argument("--parts", type=names, default=["speed", "tau"], help="default: speed,tau")
    made.add_argument("--lengths", type=integers, default=[2048, 8192], help="default: 2048,8192")
    made.add_argument("--prompts", type=int, default=24, help="per length (default: %(default)s)")
    made.add_argument("--tokens", type=int, default=128, help="per prompt (default: %(default)s)")
    made.add_argument("--batch", type=int, default=8, help="prompts of one call where tau is counted, ours only")
    return made.parse_args(arguments)


if __name__ == "__main__":
    main()
