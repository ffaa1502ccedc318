"""The gate on held-out text: the plain loop, a useless and a trained LongSpec draft, both with the gate and without it.

The useless draft has random weights. Every prompt is prefilled once, and each run continues a copy of its cache by the
same number of sampled tokens. With the gate the useless draft should be about as fast as the plain loop, and the
trained one about as fast as the faster of the plain loop and itself without the gate.

    python benchmarks/gate.py
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoTokenizer

import hf_longspec
from hf_longspec.bench.arguments import add_prompts, add_repeats, integers, parser, set_threads
from hf_longspec.bench.decoding import load_target
from hf_longspec.bench.engine import PLAIN
from hf_longspec.bench.gated import GateBenchmark, gate_report
from hf_longspec.bench.prefill import prefill
from hf_longspec.bench.progress import Progress
from hf_longspec.bench.prompts import STDLIB, load_prompts
from hf_longspec.bench.results import ResultFile
from hf_longspec.bench.timing import TimeGuard

ROOT = Path(__file__).resolve().parents[1]


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
    }
    guard, progress = TimeGuard(args.minutes), Progress(total=len(args.contexts), quiet=args.quiet)
    settings = {"target": Path(args.target).name, "tokens": args.tokens, "repeats": args.repeats, **origin}
    settings["widths"] = {name: draft.setting("tree_widths") for name, draft in methods.items() if name != PLAIN}
    longest = 0.0
    with ResultFile(args.output, "gate", gate_report, guard, settings) as results:
        prompts = prefill(model, tokens, lambda index: progress.say(f"prefilled prompt {index + 1} of {len(tokens)}"))
        benchmark = GateBenchmark(model, methods, prompts, tokens=args.tokens, repeats=args.repeats)
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
    add_prompts(made, target=str(ROOT / "hub_cards" / "tiny-target"))
    made.add_argument("--draft", default=str(ROOT / "hub_cards" / "tiny-longspec"), help="folder or Hub id")
    made.add_argument("--contexts", type=integers, default=[1024, 4096, 15872], help="default: 1024,4096,15872")
    made.add_argument("--prompts", type=int, default=5, help="default: %(default)s")
    made.add_argument("--tokens", type=int, default=384, help="per run (default: %(default)s)")
    return made.parse_args(arguments)


if __name__ == "__main__":
    main()
