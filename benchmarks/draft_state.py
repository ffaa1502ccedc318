"""The state of a LongSpec draft, and the time of one draft, from 1K to 64K tokens of context.

A random Llama with 65,536 positions and a cache filled with random numbers: neither bytes nor times depend on their
values, and prefilling 64K tokens would take most of the run.

    python -m benchmarks.draft_state
"""

import argparse
from collections.abc import Sequence
from statistics import median

import torch

import hf_longspec
from benchmarks.harness import integers, parser, seconds_of, set_threads, show
from benchmarks.parts import report_page
from hf_longspec.attention_backends.lengths import SeqLens
from hf_longspec.bench.markdown import markdown_table
from hf_longspec.bench.results import Record, ResultFile, TimeGuard, of_kind
from hf_longspec.generation.cache import SpeculativeCache
from hf_longspec.generation.drafter import Binding, Verification
from hf_longspec.generation.target import TargetView
from hf_longspec.testing import tiny_target

HEADLINE = "State of a LongSpec draft"
NOTE = (
    "Bytes that the draft keeps for one row beside the target's cache, bytes of that cache, and the median time to "
    "draft one tree, on a random model of 3 layers."
)


def draft_state_headline(records: Sequence[Record]) -> str:
    """One row per context."""
    header = ["context", "draft state, KiB", "target's cache, MiB", "ms per draft tree"]
    rows = [
        [
            str(row["context"]),
            f"{row['draft_state_bytes'] / 2**10:.0f}",
            f"{row['target_cache_bytes'] / 2**20:.1f}",
            f"{row['draft_ms']:.2f}",
        ]
        for row in of_kind(records, "draft_state")
    ]
    return markdown_table(header, rows)


def draft_state_report(records: Sequence[Record]) -> str:
    """The table with its environment."""
    return report_page(HEADLINE, NOTE, [draft_state_headline(records)], records)


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
    show(results)


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
    drafter.start([text], Verification(path, [1], SeqLens([context - 1])))
    root = text[-1:]
    seconds = [seconds_of(lambda: drafter.propose(root)) for _ in range(repeats + WARM_UPS)][WARM_UPS:]
    return {
        "draft_state_bytes": drafter.state_bytes,
        "target_cache_bytes": cache.nbytes,
        "draft_ms": round(median(seconds) * 1000, 2),
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    made = parser(__doc__, "draft_state", minutes=5)
    made.add_argument("--contexts", type=integers, default=[1024, 4096, 16384, 65536], help="default: 1K to 64K")
    made.add_argument("--repeats", type=int, default=15)
    return made.parse_args(arguments)


if __name__ == "__main__":
    main()
