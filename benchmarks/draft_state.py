"""What a LongSpec draft keeps, and what one draft costs, from 1K to 64K tokens of context.

A random Llama with 65,536 positions and a cache filled with random numbers: neither bytes nor times depend on their
values, and prefilling 64K tokens would take most of the run.

    python benchmarks/draft_state.py
"""

import argparse
from pathlib import Path
from statistics import median

import torch

import hf_longspec
from hf_longspec.bench.arguments import integers, parser, set_threads
from hf_longspec.bench.reports import draft_state_report
from hf_longspec.bench.results import ResultFile
from hf_longspec.bench.timing import TimeGuard, seconds_of
from hf_longspec.generation.cache import SpeculativeCache
from hf_longspec.generation.drafters.base import Binding, Verification
from hf_longspec.generation.target import TargetView
from hf_longspec.testing import tiny_target

ROOT = Path(__file__).resolve().parents[1]
WARM_UPS = 3


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    set_threads(args.threads)
    target = tiny_target("llama", max_position_embeddings=max(args.contexts) + 64, vocab_size=4096, hidden_size=256)
    draft = hf_longspec.LongSpecDraftModel.from_target(target)
    settings = {"widths": draft.setting("tree_widths"), "window": draft.config.window, "repeats": args.repeats}
    with ResultFile(args.output, "draft_state", draft_state_report, TimeGuard(args.minutes), settings) as results:
        for context in args.contexts:
            results.write("draft_state", context=context, **measure(target, draft, context, args.repeats))
    print(args.output.with_suffix(".md").read_text(encoding="utf-8"))


@torch.no_grad()
def measure(target: torch.nn.Module, draft: hf_longspec.LongSpecDraftModel, context: int, repeats: int) -> dict:
    """Bytes of the draft's state and of the target's cache, and milliseconds per draft tree."""
    view, torch_generator = TargetView(target), torch.Generator().manual_seed(0)
    nodes = draft.num_tree_nodes(view)
    cache = SpeculativeCache(target.config, 1, context + nodes, tree_slots=nodes)
    heads, size = target.config.num_key_value_heads, target.config.head_dim
    for layer in cache.layers:
        filling = (torch.randn(1, heads, context, size, generator=torch_generator) for _ in range(2))
        layer.update(*filling)
    cache.set_lengths([context])
    drafter = draft.drafter(Binding(view, cache, None, context + nodes))
    text = torch.randint(3, target.config.vocab_size, (context,), generator=torch_generator)
    path = torch.zeros(1, 1, dtype=torch.long)
    drafter.start([text], Verification(path, [1], (context - 1,)))
    root = text[-1:]
    seconds = [seconds_of(lambda: drafter.propose(root)) for _ in range(repeats + WARM_UPS)][WARM_UPS:]
    return {
        "draft_state_bytes": drafter.state_bytes,
        "target_cache_bytes": cache.nbytes,
        "draft_ms": round(median(seconds) * 1000, 2),
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    made = parser(__doc__, ROOT / "benchmarks" / "results" / "draft_state.jsonl", minutes=5)
    made.add_argument("--contexts", type=integers, default=[1024, 4096, 16384, 65536], help="default: 1K to 64K")
    made.add_argument("--repeats", type=int, default=15)
    return made.parse_args(arguments)


if __name__ == "__main__":
    main()
