"""Write the Hub folder of the tiny target's LongSpec draft: weights, settings, numbers and a generated card.

    python examples/publish_tiny_longspec.py --run runs/tiny-longspec --draft tiny-longspec \
        --results benchmarks/results/longspec.jsonl

`--run` is the folder that `train_tiny_longspec.py` wrote, `--results` what `benchmarks/acceptance.py --draft` measured
of it under the name `--draft`. A card states no number that is not in one of them. What came before that run is named
by `--before`, in order: the published draft that it went on with, other runs, texts of `write_target_texts.py`.
"""

from tiny_draft_folder import all_stages, load_trained, make_parser, write_folder

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

LIMITS = "A small model's text repeats itself under greedy decoding, which flatters greedy numbers."


def main() -> None:
    args = make_parser(__doc__, "tiny-longspec", "longspec.jsonl").parse_args()
    draft = load_trained(args.run / "final", "train_tiny_longspec.py", {"tree_widths": CPU_TREE})
    assert isinstance(draft, hf_longspec.LongSpecDraftModel)
    low, high = draft.config.noise_range
    facts = {"positions": draft.config.trained_max_length, "low": low, "high": high}
    training, commands = all_stages(args, TRAINING, **facts)
    settings = SETTINGS.format(depth=len(CPU_TREE))
    write_folder(draft, args, settings=settings, training=training, command=commands, limits=LIMITS)


if __name__ == "__main__":
    main()
