"""The cost of Anchor-Offset Indices for the target: its loss on held-out windows whose positions are moved.

The draft can only learn long positions from short rows if the target itself understands such rows. Every window is run
at every offset, with and without anchored first positions, and compared with its own loss at offset 0.

    python -m benchmarks.offsets --data novels --data stdlib
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import DynamicCache, PreTrainedModel

from benchmarks.harness import add_prompts, integers, load_prompts, load_target, parser, set_threads, show
from benchmarks.parts import report_page
from hf_longspec.bench.markdown import markdown_table, plus_minus
from hf_longspec.bench.results import Record, ResultFile, TimeGuard, of_kind
from hf_longspec.bench.summaries import mean_interval
from hf_longspec.modeling.longspec.training_longspec import anchor_offset_positions

HEADLINE = "The target under offsets"
NOTE = (
    "Cross-entropy in nats per token of held-out windows whose positions after the anchored ones are moved; mean "
    "over windows with its 95 % interval, differences window by window."
)


def offsets_headline(records: Sequence[Record]) -> str:
    """One row per offset and number of anchored positions."""
    rows = [
        [
            str(row["offset"]),
            str(row["anchors"]),
            f"{row['loss']['mean']:.3f}{plus_minus(row['loss'])}",
            f"{row['difference']['mean']:+.4f}{plus_minus(row['difference'], 4)}",
        ]
        for row in of_kind(records, "offsets")
    ]
    return markdown_table(["offset", "anchors", "target's loss", "difference to offset 0"], rows)


def offsets_report(records: Sequence[Record]) -> str:
    """The table with its environment."""
    return report_page(HEADLINE, NOTE, [offsets_headline(records)], records)


ANCHORS = 4


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    set_threads(args.threads)
    model = load_target(args.target, torch.float32)
    tokens, origin = load_prompts(args.target, args.data, args.length, args.windows)
    settings = {"target": Path(args.target).name, "length": args.length, **origin}
    with ResultFile(args.output, "offsets", offsets_report, TimeGuard(args.minutes), settings) as results:
        base = losses(model, tokens, 0, 0)
        for offset in args.offsets:
            for anchors in (ANCHORS, 0) if offset else (ANCHORS,):
                moved = losses(model, tokens, offset, anchors)
                results.write(
                    "offsets",
                    offset=offset,
                    anchors=anchors,
                    loss=mean_interval(moved.tolist()),
                    difference=mean_interval((moved - base).tolist()),
                )
    show(results)


@torch.no_grad()
def losses(model: PreTrainedModel, tokens: torch.Tensor, offset: int, anchors: int) -> torch.Tensor:
    """Mean cross-entropy of every window `(P,)`. Without a cache, a jump of positions begins a new text."""
    found = []
    for row in tokens:
        positions = anchor_offset_positions(len(row), [offset], anchors)
        logits = model(input_ids=row[None], position_ids=positions, past_key_values=DynamicCache()).logits[0, :-1]
        found.append(torch.nn.functional.cross_entropy(logits.float(), row[1:]))
    return torch.stack(found)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    made = parser(__doc__, "offsets", minutes=10)
    add_prompts(made)
    made.add_argument("--offsets", type=integers, default=[0, 1024, 4096, 8192, 15360], help="default: 0 to 15K")
    made.add_argument("--length", type=int, default=512, help="tokens per window (default: %(default)s)")
    made.add_argument("--windows", type=int, default=24, help="default: %(default)s")
    return made.parse_args(arguments)


if __name__ == "__main__":
    main()
