"""Convert a checkpoint of the authors of LongSpec or TokenSwift.

    hf-longspec convert sail/longspec-Llama-3-8B-Instruct-262k --output longspec-llama-3
    hf-longspec convert TokenSwift/TokenSwift-Qwen2.5-7B --output tokenswift-qwen

Exit status: 0; 2 for what cannot be converted.
"""

import sys
from pathlib import Path

from ..modeling import convert as converting
from . import first_line


def main(source: str, target: str | None, output: Path, debug: bool = False) -> int:
    """Convert and save; returns the exit status.

    Args:
        source (`str`): A published id, a folder, or a weight file.
        target (`str`, *optional*): Id, folder or config.json of the target, if `source` is not a published id.
        output (`Path`): Folder to write; must be new or empty.
        debug (`bool`): Let errors end the process with their traceback.
    """
    try:
        if output.exists() and any(output.iterdir()):
            raise ValueError(f"{output} is not empty: pass a new folder as --output.")
        print(f"Reading {source}.", file=sys.stderr)
        draft = converting.convert(source, target)
        draft.save_pretrained(output)
    except (ValueError, OSError) as error:
        if debug:
            raise
        print(f"error: {first_line(error)}", file=sys.stderr)
        return 2
    parameters = sum(weight.numel() for weight in draft.parameters()) / 1e6
    print(f"{output}: {parameters:.1f}M parameters for {draft.config.target_name_or_path or target}.")
    return 0
