"""The gate on held-out text: the plain loop, and drafts with the gate and without it.

The useless draft has random weights; the others are a trained chain, a trained draft that is asked for a wide tree
first and may choose the chain, and n-grams. Every prompt is prefilled once, and all ways to decode continue copies of
its cache by the same tokens, in turns of a few tokens each. With the gate a draft should be about as fast as the
faster of the plain loop and itself without the gate, whichever of the two that is.

    python benchmarks/gate.py
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoTokenizer

import hf_longspec
from hf_longspec.bench.arguments import add_prompts, add_repeats, integers, parser, set_threads
from hf_longspec.bench.decoding import MODES, load_target
from hf_longspec.bench.engine import PLAIN
from hf_longspec.bench.gated import GateBenchmark, gate_report
from hf_longspec.bench.prefill import prefill
from hf_longspec.bench.progress import Progress
from hf_longspec.bench.prompts import STDLIB, load_prompts
from hf_longspec.bench.results import ResultFile
from hf_longspec.bench.timing import TimeGuard

ROOT = Path(__file__).resolve().parents[1]
WIDE, CHOOSING = "trained draft, wide", "trained draft, choosing"
WIDE_TREE = [4, 4, 4, 3]


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    set_threads(args.threads)
    model = load_target(args.target, torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    tokens, origin = load_prompts(tokenizer, args.data or [STDLIB], max(args.contexts), args.prompts)
    torch.manual_seed(0)  # of the random weights
    methods = {
        PLAIN: hf_longspec.PlainDraftModel.from_target(model),
        "random draft": hf_longspec.LongSpecDraftModel.from_target(model),
        "trained draft": hf_longspec.LongSpecDraftModel.from_pretrained(args.draft, dtype=model.dtype),
        "n-grams": hf_longspec.NgramDraftModel.from_target(model),
    }
    methods["trained draft"].generation_config.tree_widths = args.tree_widths
    for name in (WIDE, CHOOSING):
        methods[name] = hf_longspec.LongSpecDraftModel.from_pretrained(args.draft, dtype=model.dtype)
        methods[name].generation_config.tree_widths = WIDE_TREE
    methods[CHOOSING].generation_config.tree_choices = [args.tree_widths]
    methods = {name: draft for name, draft in methods.items() if name == PLAIN or name in (args.only or methods)}
    guard, progress = TimeGuard(args.minutes), Progress(total=len(args.contexts), quiet=args.quiet)
    settings = {"target": Path(args.target).name, "tokens": args.tokens, "repeats": args.repeats, "mode": args.mode}
    settings |= origin
    settings["drafts"] = {
        "random draft": {"tree_widths": methods["random draft"].setting("tree_widths")},
        "trained draft": {"name": Path(args.draft).name, "tree_widths": args.tree_widths},
        WIDE: {"tree_widths": WIDE_TREE},
        CHOOSING: {"tree_widths": WIDE_TREE, "tree_choices": [args.tree_widths]},
    }
    longest = 0.0
    with ResultFile(args.output, "gate", gate_report, guard, settings) as results:
        prompts = prefill(model, tokens, lambda index: progress.say(f"prefilled prompt {index + 1} of {len(tokens)}"))
        how = {"tokens": args.tokens, "repeats": args.repeats, "mode": args.mode}
        how |= {"gated_only": ["random draft", CHOOSING], "ungated_only": [WIDE]}
        how["choices"] = {CHOOSING: ["trained draft", WIDE]}
        benchmark = GateBenchmark(model, methods, prompts, **how)
        for context in sorted(args.contexts):
            if not guard.fits(longest):
                results.skip("no time left", context=context)
                continue
            before = guard.elapsed
            benchmark.measure(context, results)
            longest = max(longest, guard.elapsed - before)
            progress.step()
    progress.close()
    print(args.output.with_suffix(".md").read_text(encoding="utf-8"))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    made = parser(__doc__, ROOT / "benchmarks" / "results" / "gate.jsonl", minutes=20)
    add_repeats(made)
    made.set_defaults(repeats=6)
    add_prompts(made, target=str(ROOT / "hub_cards" / "tiny-target"))
    made.add_argument("--draft", default=str(ROOT / "hub_cards" / "tiny-longspec"), help="folder or Hub id")
    made.add_argument("--only", action="append", help="a kind of draft, such as 'n-grams'; repeatable")
    made.add_argument("--contexts", type=integers, default=[1024, 4096, 15872], help="default: 1024,4096,15872")
    made.add_argument("--prompts", type=int, default=6, help="default: %(default)s")
    made.add_argument("--tokens", type=int, default=1000, help="per run (default: %(default)s)")
    made.add_argument("--mode", choices=sorted(MODES), default="greedy", help="default: %(default)s")
    made.add_argument("--tree-widths", type=integers, default=[1, 1], help="of the trained draft (default: 1,1)")
    return made.parse_args(arguments)


if __name__ == "__main__":
    main()
