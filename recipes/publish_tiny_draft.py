"""Write the folder of a draft of the tiny target in hub_cards: weights, settings, numbers and a generated card.

    python recipes/publish_tiny_draft.py --run runs/tiny-longspec
    python recipes/publish_tiny_draft.py --kind eagle3 --run runs/tiny-eagle3

`--run` is a folder written by `train_tiny_draft.py`. `--results` is a file written by `benchmarks/acceptance.py
--draft`, with measurements under the name `--draft`. All numbers of the card come from these two. `--before` names
earlier stages in order: the published draft that the run continued, other runs, texts of `write_target_texts.py`.
"""

import argparse
import itertools
import json
import operator
import re
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoModel

import hf_longspec
from benchmarks.acceptance_card import acceptance_section, records_of_draft
from hf_longspec.hub import Card, write_repository

ROOT = Path(__file__).resolve().parents[1]
MAX_BYTES = 4_000_000  # keeps a clone of the repository small
FILES = ("config.json", "generation_config.json", "model.safetensors")

# Depth of the learning curve's chains.
CHAIN = 3
# The fastest settings of each draft on a CPU after 16K tokens (benchmarks/results/figure.md).
SETTINGS: dict[str, dict[str, Any]] = {
    "longspec": {"tree_widths": [1, 1, 1, 1], "cross_attention_window": 1020},
    "eagle3": {"tree_widths": [4, 4, 4, 3]},
    "dflash": {"num_tree_nodes": None},
    "assistant": {"num_assistant_tokens": 4, "window": 512},
    "tokenswift": {"self_draft": "verify_hidden", "tree_branching": [1, 1, 1, 1]},
}
WHY = {
    "longspec": """\
The tree is a chain of 4 tokens, and the cross-attention reads the first 4 and the last 1,020 keys: the fastest settings
on a CPU after 16K tokens (benchmarks/results/figure.md). Wider trees accept more. If verifying them is cheap on your
device, try `draft.generation_config.tree_widths = [4, 4, 4, 3]`.""",
    "eagle3": """\
The tree has 4, 4, 4 and 3 nodes per level. After 16K tokens on a CPU it was as fast as a chain of 4 tokens, which
verifies less (benchmarks/results/figure.md): `draft.generation_config.tree_widths = [1, 1, 1, 1]`.""",
    "dflash": """\
The draft is a chain of all tokens of a block. If verifying nodes is cheap on your device, try a tree:
`draft.generation_config.num_tree_nodes = 16`.""",
    "assistant": """\
The model drafts chains of 4 tokens and keeps the last 512 tokens of the text, so that its cost does not
grow with the context. `draft.generation_config.window = None` keeps all.""",
    "tokenswift": """\
The tree is a chain: one candidate of each head. If verifying nodes is cheap on your device, try the paper's
`draft.generation_config.tree_branching = [1, 3, 3, 3]`.""",
}

TRAINED = """\
{minutes:.0f} minutes of processor time: {steps:,} steps of {rows} of {length:,} tokens, {tokens:.1f}M tokens, on
{streams}. {loss} It is {first:.3f} in the first {every} steps and {last:.3f} in the last."""
CURVE = """\
Tokens per verification to expect of a chain of {depth} tokens, from the shares of right tokens since the line before,
on the texts of each stage. Tokens and minutes are those of all stages so far."""
CURVE_POINTS = 12  # of all stages together
LOSS = {
    "longspec": """\
The loss is the KL divergence to the target's distribution, with Anchor-Offset Indices over {positions:,} positions.
Each row has a gap of {low} to {high} places between a query and the newest target key that it sees, drawn by the
chance that drafting reaches its level.""",
    "eagle3": "The loss is the KL divergence to the target's distribution, summed over {chained} chained steps.",
    "dflash": """\
The loss is the KL divergence to the target's distribution in {chained} blocks at random places of each row, summed over
the tokens of a block, of which later ones count less.""",
    "assistant": "The loss is the KL divergence to the target's distribution.",
    "tokenswift": """\
The loss is the KL divergence to the target's distribution at the same place, summed over the heads; the target is
frozen.""",
}
# Names of shares in logs: of a small model, of LongSpec's gaps or EAGLE-3's steps, of heads.
SHARE = re.compile(r"acceptance|acceptance_\w+_[1-9]")
HEADS = "How often each head has the target's most likely token first, or among its first three, at the end:"
LIMITS = (
    "Greedy text of a small model repeats itself, which makes greedy numbers too favourable. docs/results.md compares "
    "this draft\nwith all other kinds of draft."
)


def main() -> None:
    args = parse_arguments()
    draft = load_trained(args.run / "final", SETTINGS[args.kind])
    training, commands = all_stages(args, LOSS[args.kind].format(**facts_of(draft)))
    if isinstance(draft, hf_longspec.TokenSwiftDraftModel):
        log = training_facts(args.run)["log"][-1]
        training = f"{training}\n\n{HEADS}\n\n{accuracies(log, draft.config.num_heads)}"
    commit = args.run / "commit.txt"
    measured = args.results.is_file() and args.draft in args.results.read_text(encoding="utf-8")
    card = Card(
        repo=f"hub_cards/{args.draft}",
        base_model="tiny-target",
        target="hub_cards/tiny-target",
        license="apache-2.0",
        language="en",
        commit=(commit.read_text(encoding="utf-8").strip() if commit.is_file() else None) or None,
        acceptance=acceptance_section(records_of_draft(args.results, args.draft)) if measured else "",
        settings=WHY[args.kind],
        training=training,
        command=commands,
        limits=LIMITS,
    )
    with tempfile.TemporaryDirectory() as name:
        # without the copy of the package; `make cards` builds complete repositories
        written = write_repository(draft, Path(name), card)
        files = [file for file in written if file.parts[0] != "hf_longspec"]
        for file in files:
            (args.output / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(name) / file, args.output / file)
    print(f"{args.output}: {sum((args.output / file).stat().st_size for file in files) / 1e6:.1f} MB")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=sorted(SETTINGS), default="longspec")
    parser.add_argument("--run", type=Path, required=True, help="folder written by train_tiny_draft.py")
    parser.add_argument("--before", type=Path, action="append", default=[], help="earlier stage; repeatable")
    parser.add_argument("--results", type=Path, help="default: benchmarks/results/drafts.jsonl")
    parser.add_argument("--draft", help="name of the draft in the results file (default: tiny-KIND)")
    parser.add_argument("--output", type=Path, help="default: hub_cards/tiny-KIND")
    args = parser.parse_args()
    args.draft = args.draft or f"tiny-{args.kind}"
    args.output = args.output or ROOT / "hub_cards" / args.draft
    args.results = args.results or ROOT / "benchmarks" / "results" / "drafts.jsonl"
    return args


def load_trained(source: Path, settings: dict[str, Any]) -> hf_longspec.DraftModel:
    if missing := [name for name in FILES if not any(source.rglob(name))]:
        raise SystemExit(f"{source} has no {', '.join(missing)}: train with recipes/train_tiny_draft.py first")
    if (size := sum(file.stat().st_size for file in source.rglob("*") if file.is_file())) >= MAX_BYTES:
        raise SystemExit(f"{source} takes {size:,} bytes, expected less than {MAX_BYTES:,}: train a smaller draft")
    draft = AutoModel.from_pretrained(source)
    assert isinstance(draft, hf_longspec.DraftModel)
    draft.generation_config.update(**settings)
    return draft


def facts_of(draft: hf_longspec.DraftModel) -> dict[str, Any]:
    """Return what the text about the loss names of a draft's configuration."""
    if isinstance(draft, hf_longspec.LongSpecDraftModel):
        low, high = draft.config.noise_range
        return {"positions": draft.config.trained_max_length, "low": low, "high": high}
    return {"chained": getattr(draft.config, "training_steps", getattr(draft.config, "training_blocks", None))}


def training_facts(run: Path) -> dict[str, Any]:
    """Return time, steps, tokens, losses, log and command of a training run."""
    state = json.loads((run / "trainer_state.json").read_text(encoding="utf-8"))
    command = (run / "command.txt").read_text(encoding="utf-8").strip()
    losses = [entry for entry in state["log_history"] if "loss" in entry]
    return {
        "minutes": losses[-1]["cpu_minutes"],
        "log": losses,
        "steps": state["global_step"],
        "rows": "one row" if state["train_batch_size"] == 1 else f"{state['train_batch_size']} rows",
        "length": round(state["num_input_tokens_seen"] / state["global_step"] / state["train_batch_size"]),
        "tokens": state["num_input_tokens_seen"] / 1e6,
        "streams": " and ".join(f"`{name}`" for name in re.findall(r"--streams (\S+)", command)),
        "every": losses[0]["step"],
        "first": losses[0]["loss"],
        "last": losses[-1]["loss"],
        "command": command,
    }


def learning_curve(stages: list[dict[str, Any]]) -> str:
    """Return a table of expected tau, with tokens and minutes until then, in about `CURVE_POINTS` lines.

    Args:
        stages (`list[dict]`): From [`training_facts`], in order.
    """
    rows, depth, tokens, minutes = [], 0, 0.0, 0.0
    for number, facts in enumerate(stages, 1):
        for entry, shares in averaged(facts["log"], max(3, CURVE_POINTS // len(stages))):
            depth, tau = len(shares), sum(itertools.accumulate([1.0, *shares], operator.mul))
            seen = tokens + entry["num_input_tokens_seen"] / 1e6
            rows.append(f"| {number} | {seen:.2f}M | {minutes + entry['cpu_minutes']:.1f} | {tau:.2f} |")
        tokens, minutes = tokens + facts["tokens"], minutes + facts["minutes"]
    heading = ["| stage | tokens | minutes | tau |", "|---|---|---|---|"]
    return "\n".join([CURVE.format(depth=depth), "", *heading, *rows]) if rows else ""


def averaged(log: list[dict[str, float]], count: int) -> list[tuple[dict[str, float], list[float]]]:
    """Return the last entry and the mean shares of at most `count` parts of a log.

    A share is that of right tokens at one depth of a chain, after right tokens. LongSpec draws depths at random, so an
    entry need not have all of them; each part has.
    """
    names = {name for entry in log for name in entry if SHARE.fullmatch(name)}
    parts: list[list[dict[str, float]]] = [[]]
    for entry in log:
        parts[-1].append(entry)
        if len(parts[-1]) * count >= len(log) and names <= {name for each in parts[-1] for name in each}:
            parts.append([])
    rest = parts.pop()
    if not names or not parts:
        return []
    parts[-1] += rest
    ordered = sorted(names) * (CHAIN if names == {"acceptance"} else 1)
    return [
        (part[-1], [statistics.fmean(each[name] for each in part if name in each) for name in ordered])
        for part in parts
    ]


def all_stages(args: argparse.Namespace, loss: str) -> tuple[str, str]:
    """Return text and commands of the whole training for the card: of the earlier stages, then of the run.

    Args:
        loss (`str`): Description of the loss.
    """
    texts, commands, runs = [], [], []
    for folder in (*args.before, args.run):
        if (folder / "card.json").is_file():
            card = json.loads((folder / "card.json").read_text(encoding="utf-8"))
            texts.append(card["training"])
            commands.append(card["command"])
            continue
        commands.append((folder / "command.txt").read_text(encoding="utf-8").strip())
        if (folder / "trainer_state.json").is_file():
            runs.append(facts := training_facts(folder))
            goes_on = "--draft" in commands[-1]
            own = ", without shifted positions" if "--max-offset 0" in commands[-1] else ""
            told = TRAINED.format(loss=f"The loss is that of the first stage{own}." if goes_on else loss, **facts)
            texts.append(f"{'Then ' if goes_on else ''}{told}")
    return "\n\n".join(filter(None, [*texts, learning_curve(runs)])), "\n".join(commands)


def accuracies(log: dict[str, float], num_heads: int) -> str:
    """Return a table of how often each head has the target's most likely token first."""
    rows = [f"| {head} | {log[f'acceptance_head_{head}']:.3f} |" for head in range(1, num_heads + 1)]
    return "\n".join(["| head | first |", "|---|---|", *rows])


if __name__ == "__main__":
    main()
