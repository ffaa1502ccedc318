"""What the Hub folders of the tiny target's drafts have in common: files, settings, and the numbers of their cards."""

import argparse
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoModel

import hf_longspec
from hf_longspec.bench.report_parts import environment_line, note
from hf_longspec.bench.results import Record, read_records

ROOT = Path(__file__).resolve().parents[1]
MAX_BYTES = 4_000_000  # what a clone of the repository is asked to carry
FILES = ("config.json", "generation_config.json", "model.safetensors")


def parse_arguments(description: str | None, draft: str, results: str) -> argparse.Namespace:
    """`--run`, `--results`, `--draft` and `--output`, for the draft of that name."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder that the training example wrote")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results" / results)
    parser.add_argument("--draft", default=draft, help="name of the draft in the results file")
    parser.add_argument("--output", type=Path, default=ROOT / "hub_cards" / draft)
    return parser.parse_args()


def write_folder(source: Path, output: Path, trainer: str, settings: dict[str, Any]) -> hf_longspec.DraftModel:
    """Copy a trained draft to its Hub folder, with the settings it is to draft with; returns it."""
    if missing := [name for name in FILES if not (source / name).is_file()]:
        raise SystemExit(f"{source} has no {', '.join(missing)}: train with examples/{trainer} first")
    if (size := sum((source / name).stat().st_size for name in FILES)) >= MAX_BYTES:
        raise SystemExit(f"{source} takes {size:,} bytes, expected less than {MAX_BYTES:,}: train a smaller draft")
    draft = AutoModel.from_pretrained(source)
    assert isinstance(draft, hf_longspec.DraftModel)
    output.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copyfile(source / name, output / name)
    # trained on the same weights under another folder
    draft.config.target_name_or_path = "tiny-target"
    draft.config.save_pretrained(output)
    draft.generation_config.update(**settings)
    draft.generation_config.save_pretrained(output)
    print(f"{output}: {size / 1e6:.1f} MB")
    return draft


def training_facts(run: Path) -> dict[str, Any]:
    """Steps, tokens, losses and command of a training run."""
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


def measured(results: Path, draft: str, table: Callable[[Sequence[Record]], str]) -> dict[str, str]:
    """Table, note and environment of what was measured of a draft, or that nothing was."""
    records = read_records(results) if results.is_file() else []
    own = [record for record in records if record.get("options", {}).get("draft", draft) == draft]
    if not any(record["kind"] == "acceptance" for record in own):
        return {"table": "Not measured.", "note": "", "environment": ""}
    return {"table": table(own), "note": note(own), "environment": environment_line(own)}
