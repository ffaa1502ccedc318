"""What a training run notes beside the draft for its model card, which `hf-longspec publish` reads."""

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from ..bench.environment import git_commit
from ..hub.repository import CARD_FACTS
from .recipes import Recipe


def write_facts(recipe: Recipe, folder: Path, state: Any) -> None:
    """Write card.json into the folder of the draft; what somebody has added to it before stays.

    Args:
        recipe ([`Recipe`]): What was trained.
        folder (`Path`): Where the draft was saved.
        state (`TrainerState`): Steps and log of the run.
    """
    file = folder / CARD_FACTS
    try:
        facts = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError:
        print(f"{file} is not JSON and stays as it is: what was trained is not noted in it.", file=sys.stderr)
        return
    dataset = str((recipe.dataset or {}).get("path", ""))
    losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
    loss = f", loss {losses[-1]:.3f} in the last ones" if losses else ""
    found = {
        "base_model": None if Path(recipe.target).exists() else recipe.target,
        "datasets": [dataset] if "/" in dataset and not Path(dataset).exists() else [],
        "training": f"{state.global_step:,} steps{loss}.",
        "command": shlex.join(["hf-longspec", *map(_without_home, sys.argv[1:])]),
        "commit": git_commit(),
    }
    facts |= {name: value for name, value in found.items() if value}
    file.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def _without_home(argument: str) -> str:
    """A command-line argument with paths as one would type them: a card is public."""
    return argument.replace(os.getcwd() + os.sep, "").replace(str(Path.home()), "~")
