"""Write the Hub folder of the tiny target's TokenSwift heads: weights, settings, numbers and a generated card.

    python examples/publish_tiny_tokenswift.py --run runs/tiny-tokenswift --draft tiny-tokenswift \
        --results benchmarks/results/tokenswift.jsonl

`--run` is the folder that `train_tiny_tokenswift.py` wrote, `--results` what `benchmarks/acceptance.py --draft`
measured of it under the name `--draft`. A card states no number that is not in one of them. What came before that run
is named by `--before`, in order: the published heads that it went on with, texts of `write_target_texts.py`.
"""

from tiny_draft_folder import all_stages, load_trained, make_parser, training_facts, write_folder

import hf_longspec

# On a CPU every further node is paid for, and one of each head is worth it: docs/tokenswift.md.
CPU_SETTINGS = {"self_draft": "verify_hidden", "tree_branching": [1, 1, 1, 1]}

SETTINGS = """\
They ask for a chain: one candidate of each head. Where checking nodes is cheap, try
`draft.generation_config.tree_branching = [1, 3, 3, 3]`, the paper's."""

TRAINING = """\
{steps:,} steps of {batch} rows, {tokens:.1f}M tokens, on {streams}: the sum over the heads of their
divergence from the distribution that the target has there, the target itself frozen. Loss {first:.3f} in the
first {every} steps and {last:.3f} in the last."""

HEADS = "How often each head had the target's most likely token first, or among its first three, at the end:"

# Of heads that see no token behind the hidden state's.
LIMITS = """\
The heads do not know which of its likely tokens the target took, so they guess less well the flatter its predictions
are; those of a target of this size are flat."""


def main() -> None:
    args = make_parser(__doc__, "tiny-tokenswift", "tokenswift.jsonl").parse_args()
    draft = load_trained(args.run / "final", "train_tiny_tokenswift.py", CPU_SETTINGS)
    assert isinstance(draft, hf_longspec.TokenSwiftDraftModel)
    training, commands = all_stages(args, TRAINING)
    heads = accuracies(training_facts(args.run)["last_log"], draft.config.num_heads)
    training = f"{training}\n\n{HEADS}\n\n{heads}"
    write_folder(
        draft,
        args,
        settings=SETTINGS,
        training=training,
        command=commands,
        limits="" if draft.config.sequential else LIMITS,
    )


def accuracies(log: dict[str, float], num_heads: int) -> str:
    """How often each head had the target's most likely token first, and among its first three, in the last steps."""
    shares = [(log[f"head_{head}_top1"], log[f"head_{head}_top3"]) for head in range(1, num_heads + 1)]
    rows = [f"| {head} | {first:.3f} | {three:.3f} |" for head, (first, three) in enumerate(shares, 1)]
    return "\n".join(["| head | first | among three |", "|---|---|---|", *rows])


if __name__ == "__main__":
    main()
