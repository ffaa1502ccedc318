"""The cost of Anchor-Offset Indices for the target: its loss on held-out windows whose positions are moved.

The draft can only learn long positions from short rows if the target itself understands such rows. Every window is run
at every offset, with and without anchored first positions, and compared with its own loss at offset 0.

    python -m benchmarks.offsets --data novels --data stdlib
"""

import torch
from transformers import DynamicCache, PreTrainedModel

from benchmarks.harness import load_prompts, load_target, parser, start
from benchmarks.report import mean_interval
from hf_longspec.generation.cache import CACHE_NAME
from hf_longspec.training.row_noise import anchor_offset_positions

ANCHORS = 4
OFFSETS = (0, 1024, 4096, 8192, 15360)
LENGTH, WINDOWS = 512, 24


def main(arguments: list[str] | None = None) -> None:
    args = parser(__doc__, "offsets", minutes=10, prompts=True).parse_args(arguments)
    model = load_target(args.target, torch.float32)
    tokens, origin = load_prompts(args.target, args.data, LENGTH, WINDOWS)
    with start(args, "offsets", {"length": LENGTH, **origin}) as results:
        base = losses(model, tokens, 0, 0)
        for offset in OFFSETS:
            for anchors in (ANCHORS, 0) if offset else (ANCHORS,):
                loss = losses(model, tokens, offset, anchors)
                record = {"loss": mean_interval(loss.tolist()), "difference": mean_interval((loss - base).tolist())}
                results.write("offsets", offset=offset, anchors=anchors, **record)


@torch.no_grad()
def losses(model: PreTrainedModel, tokens: torch.Tensor, offset: int, anchors: int) -> torch.Tensor:
    """Mean cross-entropy of every window `(P,)`. Without a cache, a jump of positions begins a new text."""
    result = []
    for row in tokens:
        positions = anchor_offset_positions(len(row), [offset], anchors)
        logits = model(input_ids=row[None], position_ids=positions, **{CACHE_NAME: DynamicCache()}).logits[0, :-1]
        result.append(torch.nn.functional.cross_entropy(logits.float(), row[1:]))
    return torch.stack(result)


if __name__ == "__main__":
    main()
