"""Write the Hub folder of a draft of the tiny target: weights, settings, numbers and a generated card.

    python examples/publish_tiny_draft.py --run runs/tiny-longspec
    python examples/publish_tiny_draft.py --kind eagle3 --run runs/tiny-eagle3

`--run` is a folder written by `train_tiny_draft.py`. `--results` is a file written by `benchmarks/acceptance.py
--draft`, with measurements under the name `--draft`. All numbers of the card come from these two. `--before` names
earlier stages in order: the published draft that the run continued, other runs, texts of `write_target_texts.py`.
"""

from typing import Any

from tiny_draft_folder import all_stages, load_trained, make_parser, write_folder

import hf_longspec

# A chain pays on two CPU cores: verifying 16 nodes takes four times as long as one (benchmarks/results/engine.md).
CPU_TREE = [1, 1, 1]
SETTINGS: dict[str, dict[str, Any]] = {
    "longspec": {"tree_widths": CPU_TREE},
    "eagle3": {"tree_widths": CPU_TREE},
    "assistant": {"num_assistant_tokens": len(CPU_TREE), "window": 512},
}

CHAIN = f"""\
The tree is a chain of {len(CPU_TREE)} tokens, which pays most on a CPU. Wider trees accept more. If verifying them is
cheap on your device, try `draft.generation_config.tree_widths = [4, 4, 4, 3]`."""
WHY = {
    "longspec": CHAIN,
    "eagle3": CHAIN,
    "assistant": f"""\
The model drafts chains of {len(CPU_TREE)} tokens and keeps the last 512 tokens of the text, so that its cost does not
grow with the context. `draft.generation_config.window = None` keeps all.""",
}

TRAINING = {
    "longspec": """\
{steps:,} steps of {batch} rows, {tokens:.1f}M tokens, on the texts of the target's training. The loss is the KL
divergence to the target's distribution, with Anchor-Offset Indices over {positions:,} positions. Each row has a gap of
{low} to {high} places between a query and the newest target key that it sees. The loss is {first:.3f} in the first
{every} steps and {last:.3f} in the last.""",
    "eagle3": """\
{steps:,} steps of {batch} rows, {tokens:.1f}M tokens, on {streams}. The loss is the KL divergence to the target's
distribution, summed over {chained} chained steps. It is {first:.3f} in the first {every} steps and {last:.3f} in the
last.""",
    "assistant": """\
{steps:,} steps of {batch} rows, {tokens:.1f}M tokens, on {streams}. The loss is the KL divergence to the target's
distribution. It is {first:.3f} in the first {every} steps and {last:.3f} in the last.""",
}

LIMITS = "Greedy text of a small model repeats itself, which makes greedy numbers too favourable."


def main() -> None:
    made = make_parser(__doc__, "tiny-longspec", "longspec.jsonl")
    made.add_argument("--kind", choices=sorted(SETTINGS), default="longspec")
    kind = made.parse_known_args()[0].kind
    made.set_defaults(draft=f"tiny-{kind}", output=made.get_default("output").with_name(f"tiny-{kind}"))
    made.set_defaults(results=made.get_default("results").with_name(f"{kind}.jsonl"))
    args = made.parse_args()
    draft = load_trained(args.run / "final", "train_tiny_draft.py", SETTINGS[kind])
    training, commands = all_stages(args, TRAINING[kind], **facts_of(draft))
    write_folder(draft, args, settings=WHY[kind], training=training, command=commands, limits=LIMITS)


def facts_of(draft: hf_longspec.DraftModel) -> dict[str, Any]:
    """Return what the training's text names of a draft's configuration."""
    if isinstance(draft, hf_longspec.LongSpecDraftModel):
        low, high = draft.config.noise_range
        return {"positions": draft.config.trained_max_length, "low": low, "high": high}
    if isinstance(draft, hf_longspec.Eagle3DraftModel):
        return {"chained": draft.config.training_steps}
    return {}


if __name__ == "__main__":
    main()
