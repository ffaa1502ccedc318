"""N-grams against transformers' prompt lookup on held-out text: tau with 95 % intervals, then speed side by side.

Both copy what followed earlier in the text. Speeds are taken first, while there is time; a method that does not emit
the greedy float32 text of plain `generate` is not timed. `--parts tau` times nothing, so that other work may go on
beside it.

    python -m benchmarks.ngram --target hub_cards/tiny-target --data novels --data stdlib --threads 1
"""

from typing import Any

import torch
from transformers import PreTrainedModel

import hf_longspec
from benchmarks import harness
from benchmarks.acceptance import AcceptanceBenchmark, Setting
from benchmarks.engine import measure_speed
from hf_longspec.bench.calls import MODES, PLAIN, HfMethod

LENGTHS, PROMPTS, TOKENS = [2048, 8192], 24, 128
BATCH = 8  # prompts of one call where tau is counted, ours only
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
    made = harness.parser(__doc__, "ngram", minutes=40, repeats=harness.MIN_REPEATS, prompts=True)
    made.add_argument("--parts", type=harness.names, default="speed,tau", help="default: %(default)s")
    args = made.parse_args(arguments)
    model = harness.load_target(args.target, torch.float32)
    tokens, origin = harness.load_prompts(args.target, args.data, max(LENGTHS), PROMPTS)
    defaults = hf_longspec.NgramDraftModel.settings | {"gate": False}
    settings = {"tokens": TOKENS, "repeats": args.repeats, **origin, "defaults": defaults}
    with harness.start(args, "ngram", settings) as results:
        prompts = harness.prefilled(model, tokens, results)
        if "speed" in args.parts:
            # one prompt at a time, as transformers' prompt lookup has it
            sizes = {"contexts": LENGTHS, "batches": [1], "dtypes": ["float32"], "tokens": TOKENS}
            measure_speed(results, {"float32": model}, make_methods, prompts, **sizes, repeats=args.repeats)
        if "tau" in args.parts:
            methods = {name: method for name, method in make_methods(model).items() if name != PLAIN}
            plan = [(name, Setting.of(mode), length) for length in LENGTHS for mode in MODES for name in methods]
            AcceptanceBenchmark(model, methods, prompts, TOKENS, BATCH).run(plan, results)


def make_methods(model: PreTrainedModel) -> dict[str, Any]:
    """transformers' prompt lookup, our loop without a draft, and n-grams from every source."""
    methods: dict[str, Any] = {name: HfMethod(options, max_batch=1) for name, options in LOOKUPS.items()}
    methods[PLAIN] = hf_longspec.PlainDraftModel.from_target(model)
    for name, options in NGRAMS.items():
        methods[name] = hf_longspec.NgramDraftModel.from_target(model, **options)
    return methods


if __name__ == "__main__":
    main()
