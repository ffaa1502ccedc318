"""Extra memory of `generate`: the peak beyond the target's weights, keys and values, for every kind of draft.

Decoding is measured behind a full cache, the prefill in its last chunk, on a small random model on the CPU; what counts
is not the size but what grows with the context. Nothing is timed, so other work may go on beside it.

    python benchmarks/memory.py
"""

import argparse
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

import hf_longspec
from hf_longspec.bench.arguments import integers, parser, set_threads
from hf_longspec.bench.engine import PLAIN
from hf_longspec.bench.gpu_inputs import random_target
from hf_longspec.bench.memory import SHAPE, MeasuredDraft, MemoryBenchmark
from hf_longspec.bench.memory_report import memory_report
from hf_longspec.bench.progress import Progress
from hf_longspec.bench.results import ResultFile
from hf_longspec.bench.timing import TimeGuard

ROOT = Path(__file__).resolve().parents[1]


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    set_threads(args.threads)
    torch.manual_seed(0)
    guard = TimeGuard(args.minutes)
    dtype = getattr(torch, args.dtype)
    settings = {"shape": vars(SHAPE), "dtype": args.dtype, "chunk": args.chunk, "budget": args.budget}
    with ResultFile(args.output, "memory", memory_report, guard, settings) as results:
        model = random_target(SHAPE, max(args.contexts) + 64, torch.device("cpu"), dtype)
        drafts = make_drafts(model, args)
        progress = Progress(total=len(args.contexts) * (len(drafts) + 3), quiet=args.quiet)
        benchmark = MemoryBenchmark(model, SHAPE, drafts, chunk=args.chunk, results=results, progress=progress)
        benchmark.run(args.contexts)
    progress.close()
    print(args.output.with_suffix(".md").read_text(encoding="utf-8"))


def make_drafts(model: LlamaForCausalLM, args: argparse.Namespace) -> dict[str, MeasuredDraft]:
    """Every kind of draft with its default settings, and what its memory may depend on."""
    specattn = hf_longspec.SpecAttnDraftModel.from_target(model, num_assistant_tokens=4)
    ratio, floor = specattn.setting("sparse_ratio"), specattn.setting("sparse_min_tokens")
    heads = hf_longspec.TokenSwiftDraftModel.from_target(model)
    heads.generation_config.update(self_draft="partial_kv", partial_kv_budget=args.budget)
    return {
        PLAIN: MeasuredDraft(hf_longspec.PlainDraftModel.from_target(model)),
        "SpecAttn, gamma 4": MeasuredDraft(specattn, ratio, floor),
        "LongSpec, 4+4+4+3": MeasuredDraft(hf_longspec.LongSpecDraftModel.from_target(model)),
        "TokenSwift, verify_hidden": MeasuredDraft(hf_longspec.TokenSwiftDraftModel.from_target(model)),
        "TokenSwift, partial_kv": MeasuredDraft(heads),
        "n-grams": MeasuredDraft(hf_longspec.NgramDraftModel.from_target(model), index=True),
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    made = parser(__doc__, ROOT / "benchmarks" / "results" / "memory.jsonl", minutes=6)
    made.add_argument("--contexts", type=integers, default=[8192, 16384, 32768, 65536], help="default: 8K to 64K")
    made.add_argument("--chunk", type=int, default=128, help="tokens per forward of the prefill (default: %(default)s)")
    made.add_argument("--budget", type=int, default=1024, help="TokenSwift's partial cache (default: %(default)s)")
    made.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="default: float32")
    return made.parse_args(arguments)


if __name__ == "__main__":
    main()
