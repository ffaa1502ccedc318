"""tau on held-out text with 95 % intervals over prompts: of SpecAttn's settings, or of trained drafts' trees.

tau is the mean number of tokens emitted per verification, the target's own token included. Nothing here is timed, so
other work may go on beside it. Every result is written as soon as it is known, the most telling settings first.

    python benchmarks/acceptance.py --target hub_cards/tiny-target --data novels --data stdlib --threads 1
    python benchmarks/acceptance.py --draft hub_cards/tiny-longspec --output benchmarks/results/longspec.jsonl
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

import hf_longspec
from hf_longspec.bench.acceptance import AcceptanceBenchmark, Planned, Setting
from hf_longspec.bench.arguments import add_prompts, integers, parser, set_threads
from hf_longspec.bench.decoding import MODES, load_target
from hf_longspec.bench.prefill import prefill
from hf_longspec.bench.progress import Progress
from hf_longspec.bench.prompts import STDLIB, load_prompts
from hf_longspec.bench.reports import acceptance_report
from hf_longspec.bench.results import ResultFile
from hf_longspec.bench.timing import TimeGuard
from hf_longspec.generation.partial_policy import POLICIES

ROOT = Path(__file__).resolve().parents[1]
DRAFT_HELP = "NAME=FOLDER, a folder or a Hub id of a trained draft; repeat to compare (default: SpecAttn)"

# Differences are taken to the first setting of each mode.
SETTINGS = (
    Setting.of(selection="two_rows"),
    Setting.of(selection="window"),
    Setting.of(selection="all_rows"),
    Setting.of(selection="last_accepted"),
    Setting.of(selection="quest"),
    Setting.of(selection="two_rows", score="logits"),
    Setting.of(selection="all_rows", score="logits"),
    Setting.of(selection="two_rows", num_assistant_tokens=6),
    Setting.of("greedy", selection="two_rows"),
    Setting.of("greedy", selection="window"),
    Setting.of("greedy", selection="all_rows"),
)
# At the middle length only.
MINOR_SETTINGS = (
    Setting.of(selection="two_rows", granularity="kv_head"),
    Setting.of(selection="two_rows", acceptance="coupled"),
    Setting.of(selection="two_rows", sparse_ratio=0.03),
    Setting.of(selection="two_rows", sparse_ratio=0.15),
)


CHAIN = {"tree_branching": [1, 1, 1, 1]}
# By model type of the draft, each in both modes. Drafts are compared with the first one, the first has the others too.
OF_TRAINED: dict[str, list[dict[str, Any]]] = {
    "longspec": [{"tree_widths": widths} for widths in ([4, 4, 4, 3], [1, 1, 1], [4, 16, 16, 16, 16])],
    "tokenswift": [
        {"self_draft": "partial_kv", **CHAIN},
        {"self_draft": "verify_hidden", **CHAIN},
        {"self_draft": "verify_hidden", **CHAIN, "ngram_candidates": 2, "ngram_num_tokens": 4},
        *(
            {"self_draft": "partial_kv", **CHAIN, "partial_kv_policy": policy, "partial_kv_budget": 512}
            for policy in POLICIES
        ),
        {"self_draft": "verify_hidden", "tree_branching": [1, 3, 3, 3]},
        {"self_draft": "partial_kv", "tree_branching": [1, 3, 3, 3]},
    ],
}


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    set_threads(args.threads)
    model = load_target(args.target, torch.float32)
    drafts = make_drafts(model, args.draft)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    tokens, origin = load_prompts(tokenizer, args.data or [STDLIB], max(args.lengths), args.prompts)
    guard = TimeGuard(args.minutes)
    runs = plan(list(drafts), next(iter(drafts.values())).config.model_type, args.lengths)
    progress = Progress(total=len(runs), quiet=args.quiet)
    settings = {"target": Path(args.target).name, "tokens": args.tokens, **origin}
    if not args.draft:
        settings["defaults"] = hf_longspec.SpecAttnDraftModel.settings | {"gate": False}
    with ResultFile(args.output, "acceptance", acceptance_report, guard, settings) as results:
        prompts = prefill(model, tokens, lambda index: progress.say(f"prefilled prompt {index + 1} of {len(tokens)}"))
        AcceptanceBenchmark(model, drafts, prompts, args.tokens, args.batch).run(runs, results, progress)
    progress.close()
    print(args.output.with_suffix(".md").read_text(encoding="utf-8"))


def plan(names: Sequence[str | None], kind: str, lengths: Sequence[int]) -> list[Planned]:
    """What is measured, the most telling first: trained drafts are compared with one tree, the first has others."""
    first, middle = names[0], sorted(lengths)[len(lengths) // 2]
    if first is None:
        runs: list[Planned] = [(first, setting, length) for setting in SETTINGS for length in lengths]
        return runs + [(first, setting, middle) for setting in MINOR_SETTINGS]
    first_one, *others = OF_TRAINED[kind]
    pairs = [(Setting.of(mode, **first_one), length) for mode in MODES for length in lengths]
    compared = [(name, *pair) for name in names for pair in pairs]
    rest = [(Setting.of(mode, **options), length) for options in others for mode in MODES for length in lengths]
    return compared + [(first, *pair) for pair in rest]


def make_drafts(model: PreTrainedModel, named: Sequence[str] | None) -> dict[str | None, Any]:
    """Trained drafts by the name before "=", or by the last part of the path; SpecAttn, without a name, if none."""
    if not named:
        return {None: hf_longspec.SpecAttnDraftModel.from_target(model)}
    pairs = (entry.split("=", 1) if "=" in entry else (Path(entry).name, entry) for entry in named)
    return {name: AutoModel.from_pretrained(path, dtype=torch.float32) for name, path in pairs}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    made = parser(__doc__, ROOT / "benchmarks" / "results" / "acceptance.jsonl", minutes=40)
    add_prompts(made, target=str(ROOT / "hub_cards" / "tiny-target"))
    made.add_argument("--draft", action="append", help=DRAFT_HELP)
    made.add_argument("--lengths", type=integers, default=[2048, 8192, 15872], help="default: 2048,8192,15872")
    made.add_argument("--prompts", type=int, default=24, help="per length (default: %(default)s)")
    made.add_argument("--tokens", type=int, default=128, help="per prompt (default: %(default)s)")
    made.add_argument("--batch", type=int, default=8, help="prompts decoded together (default: %(default)s)")
    return made.parse_args(arguments)


if __name__ == "__main__":
    main()
