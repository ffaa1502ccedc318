"""What Anchor-Offset Indices cost the target: its loss on held-out windows whose positions are moved.

The draft can only learn long positions from short rows if the target itself understands such rows. Every window is run
at every offset, with and without anchored first positions, and compared with its own loss at offset 0.

    python benchmarks/offsets.py --data novels --data stdlib
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoTokenizer, DynamicCache, PreTrainedModel

from hf_longspec.bench.arguments import add_prompts, integers, parser, set_threads
from hf_longspec.bench.decoding import load_target
from hf_longspec.bench.prompts import STDLIB, load_prompts
from hf_longspec.bench.reports import offsets_report
from hf_longspec.bench.results import ResultFile
from hf_longspec.bench.summaries import mean_interval
from hf_longspec.bench.timing import TimeGuard
from hf_longspec.modeling.longspec.training_longspec import anchor_offset_positions

ROOT = Path(__file__).resolve().parents[1]
ANCHORS = 4


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    set_threads(args.threads)
    model = load_target(args.target, torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    tokens, origin = load_prompts(tokenizer, args.data or [STDLIB], args.length, args.windows)
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
                    loss=mean_interval(moved.tolist()).to_dict(),
                    difference=mean_interval((moved - base).tolist()).to_dict(),
                )
    print(args.output.with_suffix(".md").read_text(encoding="utf-8"))


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
    made = parser(__doc__, ROOT / "benchmarks" / "results" / "offsets.jsonl", minutes=10)
    add_prompts(made, target=str(ROOT / "hub_cards" / "tiny-target"))
    made.add_argument("--offsets", type=integers, default=[0, 1024, 4096, 8192, 15360], help="default: 0 to 15K")
    made.add_argument("--length", type=int, default=512, help="tokens per window (default: %(default)s)")
    made.add_argument("--windows", type=int, default=24, help="default: %(default)s")
    return made.parse_args(arguments)


if __name__ == "__main__":
    main()
