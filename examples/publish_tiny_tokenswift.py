"""Write the Hub folder of the tiny target's TokenSwift heads: weights, settings, numbers and a generated card.

    python examples/publish_tiny_tokenswift.py --run runs/tiny-tokenswift --draft tiny-tokenswift \
        --results benchmarks/results/tokenswift.jsonl

`--run` is a folder written by `train_tiny_tokenswift.py`. `--results` is a file written by
`benchmarks/acceptance.py --draft`, with measurements under the name `--draft`. All numbers of the card come from these
two. `--before` names earlier stages in order: the published heads that the run continued, texts of
`write_target_texts.py`.
"""

from tiny_draft_folder import all_stages, load_trained, make_parser, training_facts, write_folder

import hf_longspec

# Every node costs time on a CPU. One candidate of each head is worth it: docs/tokenswift.md.
CPU_SETTINGS = {"self_draft": "verify_hidden", "tree_branching": [1, 1, 1, 1]}

SETTINGS = """\
The tree is a chain: one candidate of each head. If verifying nodes is cheap on your device, try the paper's
`draft.generation_config.tree_branching = [1, 3, 3, 3]`."""

TRAINING = """\
{steps:,} steps of {batch} rows, {tokens:.1f}M tokens, on {streams}. The loss is the divergence of the heads
from the target's distribution at the same place, summed over the heads; the target is frozen. It is {first:.3f} in the
first {every} steps and {last:.3f} in the last."""

HEADS = "How often each head has the target's most likely token first, or among its first three, at the end:"

# For heads that see no token after that of the hidden state.
LIMITS = """\
The heads do not see the token that the target took, so they guess worse if the target's predictions are flat. The
predictions of a target of this size are flat."""


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
    """Return a table of how often each head has the target's most likely token first, and among its first three."""
    shares = [(log[f"head_{head}_top1"], log[f"head_{head}_top3"]) for head in range(1, num_heads + 1)]
    rows = [f"| {head} | {first:.3f} | {three:.3f} |" for head, (first, three) in enumerate(shares, 1)]
    return "\n".join(["| head | first | among three |", "|---|---|---|", *rows])


if __name__ == "__main__":
    main()
