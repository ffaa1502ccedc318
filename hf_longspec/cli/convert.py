"""`hf-longspec convert`: a checkpoint of EAGLE-3, LongSpec or TokenSwift as a draft of this package."""

import sys
from pathlib import Path

from ..modeling.register_draft import convert


def run(source: str, output: Path, target: str | None) -> None:
    """Convert and save."""
    print(f"Reading {source}.", file=sys.stderr)
    draft = convert(source, target)
    draft.save_pretrained(output)
    parameters = sum(weight.numel() for weight in draft.parameters()) / 1e6
    print(f"{output}: {parameters:.1f}M parameters for {draft.config.target_name_or_path or target}.")
