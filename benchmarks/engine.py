"""Decoding speed on held-out text: transformers' own ways, our loop without a draft, SpecAttn, LongSpec.

Every prompt is prefilled once; each run continues a copy of its cache. Speed is counted from the first token to the
last, for all methods by the same clock. Headline rows sample at temperature 1; greedy text of small models repeats
itself, which flatters every drafter. What does not emit the greedy float32 text of plain `generate` is not timed.

    python benchmarks/engine.py --target hub_cards/tiny-target --draft hub_cards/tiny-longspec

With `--assistant`, an ordinary small model of the same vocabulary drafts in transformers' assisted generation.
"""

import argparse
import copy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_longspec
from hf_longspec.bench.arguments import add_prompts, add_repeats, integers, names, parser, set_threads
from hf_longspec.bench.ceilings import read_gb_per_second
from hf_longspec.bench.decoding import HfMethod, endless, load_target
from hf_longspec.bench.engine import COMPILED, PLAIN, EngineBenchmark, order_of_cells
from hf_longspec.bench.prefill import prefill
from hf_longspec.bench.progress import Progress
from hf_longspec.bench.prompts import STDLIB, load_prompts
from hf_longspec.bench.reports import engine_report
from hf_longspec.bench.results import ResultFile
from hf_longspec.bench.timing import TimeGuard

ROOT = Path(__file__).resolve().parents[1]
COMPILED_HELP = (
    "drafts to measure with compiled steps too, and the plain loop with them: 'SpecAttn, gamma 4; LongSpec, 1+1'"
)
TREES_HELP = "nodes per level of LongSpec's trees (default: 1+1+1,4+4+4+3,4+16+16+16+16)"


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    set_threads(args.threads)
    cells = order_of_cells(args.contexts, args.batches, args.dtypes)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    tokens, origin = load_prompts(tokenizer, args.data or [STDLIB], max(args.contexts), max(args.batches))
    guard = TimeGuard(args.minutes)
    progress = Progress(total=len(cells), quiet=args.quiet)
    settings = {"target": Path(args.target).name, "tokens": args.tokens, "repeats": args.repeats, **origin}
    with ResultFile(args.output, "engine", engine_report, guard, settings) as results:
        bandwidth = read_gb_per_second()
        results.write("ceilings", read_gb_per_second=round(bandwidth, 1))
        models = {name: load_target(args.target, getattr(torch, name)) for name in {"float32", *args.dtypes}}
        prompts = prefill(
            models["float32"], tokens, lambda index: progress.say(f"prefilled prompt {index + 1} of {len(tokens)}")
        )
        benchmark = EngineBenchmark(
            models,
            lambda model: make_methods(model, args),
            prompts,
            tokens=args.tokens,
            repeats=args.repeats,
            bandwidth=bandwidth,
        )
        for cell in cells:
            benchmark.measure(cell, results, progress)
            progress.step()
    progress.close()
    print(args.output.with_suffix(".md").read_text(encoding="utf-8"))


def make_methods(model: PreTrainedModel, args: argparse.Namespace) -> dict[str, Any]:
    """transformers' drafters, our baseline, SpecAttn with every number of drafted tokens, LongSpec with every tree."""
    lookup = {"prompt_lookup_num_tokens": args.lookup_tokens}
    methods: dict[str, Any] = {"hf prompt lookup": HfMethod(lookup, max_batch=1)}
    if args.assistant:
        assistant = endless(AutoModelForCausalLM.from_pretrained(args.assistant, dtype=model.dtype).eval())
        methods["hf assisted"] = HfMethod({"assistant_model": assistant}, max_batch=1)
    methods[PLAIN] = hf_longspec.PlainDraftModel.from_target(model)
    for gamma in args.gammas:
        draft = hf_longspec.SpecAttnDraftModel.from_target(model, num_assistant_tokens=gamma)
        methods[f"SpecAttn, gamma {gamma}"] = draft
    for widths in args.trees if args.draft else ():
        draft = hf_longspec.LongSpecDraftModel.from_pretrained(args.draft, dtype=model.dtype)
        draft.generation_config.tree_widths = widths
        methods[f"LongSpec, {'+'.join(map(str, widths))}"] = draft
    return methods | compiled(methods, args.compiled)


def compiled(methods: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """The same drafts with compiled steps, the baseline first."""
    twins = {}
    for name in (PLAIN, *names) if names else ():
        if name not in methods:
            raise ValueError(f"--compiled {name!r}: expected some of {', '.join(methods)}, separated by semicolons.")
        twin = copy.copy(methods[name])
        twin.generation_config = copy.deepcopy(twin.generation_config)
        twin.generation_config.compile = "compile"
        twins[name + COMPILED] = twin
    return twins


def trees(text: str) -> list[list[int]]:
    """Widths of several trees.

    >>> trees("4+4+4,1+1")
    [[4, 4, 4], [1, 1]]
    """
    return [[int(width) for width in tree.split("+")] for tree in text.split(",")]


def methods_named(text: str) -> list[str]:
    """Names of methods.

    >>> methods_named("SpecAttn, gamma 4; LongSpec, 1+1+1")
    ['SpecAttn, gamma 4', 'LongSpec, 1+1+1']
    """
    return [name.strip() for name in text.split(";")]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    made = parser(__doc__, ROOT / "benchmarks" / "results" / "engine.jsonl", minutes=15)
    add_repeats(made)
    add_prompts(made, target=str(ROOT / "hub_cards" / "tiny-target"))
    made.add_argument("--contexts", type=integers, default=[2048, 8192, 16128], help="default: 2048,8192,16128")
    made.add_argument("--batches", type=integers, default=[1, 4], help="default: 1,4")
    made.add_argument("--dtypes", type=names, default=["float32", "bfloat16"], help="default: float32,bfloat16")
    made.add_argument("--gammas", type=integers, default=[4, 6], help="drafted tokens of SpecAttn (default: 4,6)")
    made.add_argument("--draft", help="folder or Hub id of a LongSpec draft (default: none)")
    made.add_argument("--trees", type=trees, default=[[1, 1, 1], [4, 4, 4, 3], [4, 16, 16, 16, 16]], help=TREES_HELP)
    made.add_argument("--assistant", help="folder or Hub id of an ordinary small model with the target's vocabulary")
    made.add_argument("--compiled", type=methods_named, default=[], help=COMPILED_HELP)
    made.add_argument("--lookup-tokens", type=int, default=4, help="of transformers' prompt lookup (default: 4)")
    made.add_argument("--tokens", type=int, default=48, help="per row and run (default: %(default)s)")
    return made.parse_args(arguments)


if __name__ == "__main__":
    main()
