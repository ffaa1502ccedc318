"""Write the Hub folder of the tiny target's LongSpec draft: weights, settings, numbers and a generated card.

    python examples/publish_tiny_longspec.py --run runs/tiny-longspec --draft tiny-longspec \
        --results benchmarks/results/longspec.jsonl

`--run` is a folder written by `train_tiny_longspec.py`. `--results` is a file written by
`benchmarks/acceptance.py --draft`, with measurements under the name `--draft`. All numbers of the card come from these
two. `--before` names earlier stages in order: the published draft that the run continued, other runs, texts of
`write_target_texts.py`.
"""

from tiny_draft_folder import all_stages, load_trained, make_parser, write_folder

import hf_longspec

# A chain pays on two CPU cores: verifying 16 nodes takes four times as long as one (benchmarks/results/engine.md).
CPU_TREE = [1, 1, 1]

SETTINGS = """\
The tree is a chain of {depth} tokens, which pays most on a CPU. Wider trees accept more. If verifying them is cheap on
your device, try `draft.generation_config.tree_widths = [4, 4, 4, 3]`."""

TRAINING = """\
{steps:,} steps of {batch} rows, {tokens:.1f}M tokens, on the texts of the target's training. The loss is the KL
divergence to the target's distribution, with Anchor-Offset Indices over {positions:,} positions. Each row has a gap of
{low} to {high} places between a query and the newest target key that it sees. The loss is {first:.3f} in the first
{every} steps and {last:.3f} in the last."""

LIMITS = "Greedy text of a small model repeats itself, which makes greedy numbers too favourable."


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
