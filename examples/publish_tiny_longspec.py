"""Write the Hub folder of the tiny target's LongSpec draft: weights, settings, numbers and a generated card.

    python examples/publish_tiny_longspec.py --run runs/tiny-longspec --draft tiny-longspec \
        --results benchmarks/results/longspec.jsonl

`--run` is the folder that `train_tiny_longspec.py` wrote, `--results` what `benchmarks/acceptance.py --draft` measured
of it under the name `--draft`. A card states no number that is not in one of them. What came before that run is named
by `--before`, in order: the published draft that it went on with, other runs, texts of `write_target_texts.py`.
"""

import json
import re
from pathlib import Path
from typing import Any

from tiny_draft_folder import load_trained, make_parser, training_facts, write_folder

import hf_longspec

# What pays on two CPU cores: checking 16 nodes takes four times as long as checking one (benchmarks/results/engine.md).
CPU_TREE = [1, 1, 1]

SETTINGS = """\
They ask for a chain of {depth} tokens, which pays most on a CPU. Wider trees accept more; where checking them is cheap,
try `draft.generation_config.tree_widths = [4, 4, 4, 3]`."""

TRAINING = """\
{steps:,} steps of {batch} rows, {tokens:.1f}M tokens, on the texts of the target's training: KL divergence to the
target's distribution, Anchor-Offset Indices over {positions:,} positions, and for every row a gap of {low} to {high}
places between a query and the newest target key it sees. Loss {first:.3f} in the first {every} steps and {last:.3f} in
the last."""

GOING_ON = """\
Then {steps:,} steps of {batch} rows, {tokens:.1f}M tokens, on {streams}. Loss {first:.3f} in the first {every} steps
and {last:.3f} in the last."""

LIMITS = "A small model's text repeats itself under greedy decoding, which flatters greedy numbers."


def main() -> None:
    parser = make_parser(__doc__, "tiny-longspec", "longspec.jsonl")
    parser.add_argument("--before", type=Path, action="append", default=[], help="what came before; repeatable")
    args = parser.parse_args()
    draft = load_trained(args.run / "final", "train_tiny_longspec.py", {"tree_widths": CPU_TREE})
    assert isinstance(draft, hf_longspec.LongSpecDraftModel)
    low, high = draft.config.noise_range
    facts = {"positions": draft.config.trained_max_length, "low": low, "high": high}
    stages = [told(folder, **facts) for folder in (*args.before, args.run)]
    training, commands = ("\n".join(filter(None, parts)) for parts in zip(*stages, strict=True))
    settings = SETTINGS.format(depth=len(CPU_TREE))
    write_folder(draft, args, settings=settings, training=training, command=commands, limits=LIMITS)


def told(folder: Path, **facts: Any) -> tuple[str, str]:
    """What a card says of one stage, and its command."""
    if (folder / "card.json").is_file():
        card = json.loads((folder / "card.json").read_text(encoding="utf-8"))
        return card["training"], card["command"]
    if not (folder / "trainer_state.json").is_file():
        return "", (folder / "command.txt").read_text(encoding="utf-8").strip()
    facts |= training_facts(folder)
    streams = " and ".join(f"`{name}`" for name in re.findall(r"--streams (\S+)", facts["command"]))
    text = GOING_ON if "--draft" in facts["command"] else TRAINING
    return text.format(streams=streams, **facts), facts["command"]


if __name__ == "__main__":
    main()
