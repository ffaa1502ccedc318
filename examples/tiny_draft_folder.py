"""Common parts of the Hub folders of the tiny target's drafts: files, settings, and the numbers of their cards."""

import argparse
import json
import re
from pathlib import Path
from typing import Any

from transformers import AutoModel

import hf_longspec
from hf_longspec.bench.markdown import acceptance_section
from hf_longspec.hub import Card, write_repository

ROOT = Path(__file__).resolve().parents[1]
MAX_BYTES = 4_000_000  # keeps a clone of the repository small
GOING_ON = """\
Then {steps:,} steps of {batch} rows, {tokens:.1f}M tokens, on {streams}. The loss is {first:.3f} in the first
{every} steps and {last:.3f} in the last."""
FILES = ("config.json", "generation_config.json", "model.safetensors")


def make_parser(description: str | None, draft: str, results: str) -> argparse.ArgumentParser:
    """Make a parser with `--run`, `--before`, `--results`, `--draft` and `--output` for the draft of this name."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder written by the training example")
    parser.add_argument("--before", type=Path, action="append", default=[], help="earlier stage; repeatable")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results" / results)
    parser.add_argument("--draft", default=draft, help="name of the draft in the results file")
    parser.add_argument("--output", type=Path, default=ROOT / "hub_cards" / draft)
    return parser


def load_trained(source: Path, trainer: str, settings: dict[str, Any]) -> hf_longspec.DraftModel:
    """Load a trained draft and set the settings for drafting."""
    if missing := [name for name in FILES if not any(source.rglob(name))]:
        raise SystemExit(f"{source} has no {', '.join(missing)}: train with examples/{trainer} first")
    if (size := sum(file.stat().st_size for file in source.rglob("*") if file.is_file())) >= MAX_BYTES:
        raise SystemExit(f"{source} takes {size:,} bytes, expected less than {MAX_BYTES:,}: train a smaller draft")
    draft = AutoModel.from_pretrained(source)
    assert isinstance(draft, hf_longspec.DraftModel)
    draft.generation_config.update(**settings)
    return draft


def write_folder(draft: hf_longspec.DraftModel, args: argparse.Namespace, **facts: Any) -> None:
    """Write the complete repository; `facts` are fields of `hf_longspec.hub.Card`."""
    commit = args.run / "commit.txt"
    measured = args.results.is_file() and args.draft in args.results.read_text(encoding="utf-8")
    card = Card(
        repo=f"hub_cards/{args.draft}",
        base_model="tiny-target",
        target="hub_cards/tiny-target",
        license="apache-2.0",
        language="en",
        commit=(commit.read_text(encoding="utf-8").strip() if commit.is_file() else None) or None,
        acceptance=acceptance_section(args.results, args.draft) if measured else "",
        **facts,
    )
    files = write_repository(draft, args.output, card)
    print(f"{args.output}: {sum((args.output / file).stat().st_size for file in files) / 1e6:.1f} MB")


def training_facts(run: Path) -> dict[str, Any]:
    """Return steps, tokens, losses and command of a training run."""
    state = json.loads((run / "trainer_state.json").read_text(encoding="utf-8"))
    losses = [entry for entry in state["log_history"] if "loss" in entry]
    return {
        "steps": state["global_step"],
        "batch": state["train_batch_size"],
        "tokens": state["num_input_tokens_seen"] / 1e6,
        "every": losses[0]["step"],
        "first": losses[0]["loss"],
        "last": losses[-1]["loss"],
        "last_log": losses[-1],
        "command": (run / "command.txt").read_text(encoding="utf-8").strip(),
    }


def all_stages(args: argparse.Namespace, training: str, **facts: Any) -> tuple[str, str]:
    """Return text and commands of the whole training for the card: of the earlier stages, then of the run.

    Args:
        training (`str`): Template for a run that began with a new draft, filled with its numbers and `facts`.
    """
    stages = [_stage(folder, training, **facts) for folder in (*args.before, args.run)]
    texts, commands = (list(filter(None, parts)) for parts in zip(*stages, strict=True))
    return "\n\n".join(texts), "\n".join(commands)


def _stage(folder: Path, training: str, **facts: Any) -> tuple[str, str]:
    if (folder / "card.json").is_file():
        card = json.loads((folder / "card.json").read_text(encoding="utf-8"))
        return card["training"], card["command"]
    if not (folder / "trainer_state.json").is_file():
        return "", (folder / "command.txt").read_text(encoding="utf-8").strip()
    facts |= training_facts(folder)
    streams = " and ".join(f"`{name}`" for name in re.findall(r"--streams (\S+)", facts["command"]))
    text = GOING_ON if "--draft" in facts["command"] else training
    return text.format(streams=streams, **facts), facts["command"]
