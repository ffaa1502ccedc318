"""A text of 100,000 tokens: our loop without a draft, TokenSwift in several settings, plain `generate` at the marks.

All texts begin behind the same prompt with the same seed. Sampled rows use temperature 1, min_p and the contextual
penalty of the paper. Speed at a mark is from the first token to that one; plain `generate` and our loop without a draft
also run for a few hundred tokens behind every mark, on the keys and values of a row's text.

    python benchmarks/long_generation.py --draft hub_cards/tiny-tokenswift --rows all --tokens 20000
    python benchmarks/long_generation.py --draft hub_cards/tiny-tokenswift --rows both --tokens 100000
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

import hf_longspec
from hf_longspec.bench.arguments import add_prompts, integers, parser, set_threads
from hf_longspec.bench.decoding import MODES, HfMethod, load_target
from hf_longspec.bench.engine import HF, PLAIN
from hf_longspec.bench.long_run import LongBenchmark, LongRow
from hf_longspec.bench.progress import Progress
from hf_longspec.bench.prompts import STDLIB, load_prompts
from hf_longspec.bench.reports import long_report
from hf_longspec.bench.results import ResultFile
from hf_longspec.bench.timing import TimeGuard

ROOT = Path(__file__).resolve().parents[1]
NGRAMS = {"ngram_candidates": 1, "ngram_num_tokens": 4}
# Beside the draft's own settings, the most telling first.
SETTINGS: dict[str, dict[str, Any]] = {
    "TokenSwift, n-grams": NGRAMS,
    "TokenSwift, partial_kv": {"self_draft": "partial_kv"},
    "TokenSwift, partial_kv, n-grams": {"self_draft": "partial_kv", **NGRAMS},
    "TokenSwift, [1, 1]": {"tree_branching": [1, 1]},
    "TokenSwift, [1, 2, 1]": {"tree_branching": [1, 2, 1]},
    "TokenSwift, 4 n-grams": NGRAMS | {"ngram_candidates": 4},
    "TokenSwift, [1, 3, 3, 3]": {"tree_branching": [1, 3, 3, 3]},
}


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    set_threads(args.threads)
    model = load_target(args.target, getattr(torch, args.dtype))
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    tokens, origin = load_prompts(tokenizer, args.data or [STDLIB], args.prompt, 1)
    rows = [row for row in make_rows(model, args) if row.mode in args.modes]
    rows = [row for row in rows if not args.only or row.method in args.only]
    guard, progress = TimeGuard(args.minutes), Progress(total=len(rows), quiet=args.quiet)
    names = ("compile", "tokens", "dtype", "prompt", "min_p", "penalty", "penalty_window", "near")
    settings = {"target": Path(args.target).name, **{name: getattr(args, name) for name in names}, **origin}
    penalty = hf_longspec.ContextualPenaltyLogitsProcessor(args.penalty, args.penalty_window)
    baselines = {HF: HfMethod(), PLAIN: hf_longspec.PlainDraftModel.from_target(model)}
    marks = sorted({mark for mark in args.marks if mark < args.tokens} | {args.tokens})
    if args.compile:
        for method in (baselines[PLAIN], *(row.draft for row in rows)):
            method.generation_config.compile = "compile"
    benchmark = LongBenchmark(model, tokens, marks, {"min_p": args.min_p}, [penalty], levels=args.levels)
    with ResultFile(args.output, "long", long_report, guard, settings) as results:
        for row in rows:
            progress.say(f"{row.method}, {row.mode}{', penalty' if row.penalised else ''}: {row.tokens} tokens")
            benchmark.measure(row, baselines if row is rows[0] or row.method == PLAIN else {}, args.near, results)
            progress.step()
    progress.close()
    print(args.output.with_suffix(".md").read_text(encoding="utf-8"))


def make_rows(model: PreTrainedModel, args: argparse.Namespace) -> list[LongRow]:
    """The rows asked for; sampled with the penalty unless they say otherwise."""
    plain = hf_longspec.PlainDraftModel.from_target(model)

    def draft(options: dict[str, Any]) -> Any:
        made = AutoModel.from_pretrained(args.draft, dtype=model.dtype)
        made.generation_config.update(**options)
        return made

    rows = [LongRow("TokenSwift", draft({}), args.tokens), LongRow(PLAIN, plain, args.tokens)]
    if args.rows != "all":
        return {"both": rows, "one": rows[:1], "plain": rows[1:]}[args.rows]
    names = list(SETTINGS)
    others = [LongRow(name, draft(SETTINGS[name]), args.tokens) for name in names]
    for mode, penalised in (("sample", False), ("greedy", True)):
        others[2:2] = [LongRow(row.method, row.draft, args.tokens, mode, penalised) for row in (*rows, others[0])]
    return [*rows, *others]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    made = parser(__doc__, ROOT / "benchmarks" / "results" / "long.jsonl", minutes=40)
    add_prompts(made, target=str(ROOT / "hub_cards" / "tiny-target"))
    made.add_argument("--draft", default=str(ROOT / "hub_cards" / "tiny-tokenswift"), help="folder or Hub id")
    made.add_argument("--rows", choices=["all", "both", "one", "plain"], default="all", help="default: %(default)s")
    made.add_argument("--only", action="append", help="a method among the rows, such as 'plain loop'; repeatable")
    made.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES), help="default: both")
    made.add_argument(
        "--compile", action="store_true", help="compile the steps of all our methods, before the clock starts"
    )
    made.add_argument("--tokens", type=int, default=20_000, help="per row (default: %(default)s)")
    made.add_argument("--marks", type=integers, default=[20_000, 40_000, 60_000, 80_000, 100_000])
    made.add_argument("--prompt", type=int, default=2048, help="tokens (default: %(default)s)")
    made.add_argument("--dtype", default="bfloat16", help="default: %(default)s")
    made.add_argument("--min-p", type=float, default=0.1, help="default: %(default)s")
    made.add_argument("--penalty", type=float, default=1.2, help="default: %(default)s")
    made.add_argument("--penalty-window", type=int, default=1024, help="tokens (default: %(default)s)")
    made.add_argument("--levels", type=int, default=4, help="of logits, for alpha and beta (default: %(default)s)")
    made.add_argument("--near", type=int, default=512, help="tokens of each baseline at every mark (default: 512)")
    return made.parse_args(arguments)


if __name__ == "__main__":
    main()
