"""`hf-longspec convert`: a checkpoint of EAGLE-3, LongSpec or TokenSwift as a draft of this package."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from .. import options


def convert(
    source: Annotated[str, typer.Argument(help="Published id, folder or weight file of the authors' draft.")],
    output: Annotated[Path, options.output("New folder for the converted draft.", options.require_writable_folder)],
    target: Annotated[str | None, typer.Option(help="Id, folder or config.json of its target.")] = None,
    debug: options.Debug = False,
) -> None:
    """Convert a checkpoint of EAGLE-3, or of the authors of LongSpec or TokenSwift.

    Published drafts are known by their ids. For other files, also those that the authors' training wrote, name
    the target; only its configuration is read.

    Examples:

    - hf-longspec convert sail/longspec-Llama-3-8B-Instruct-262k --output longspec-llama-3
    - hf-longspec convert TokenSwift/TokenSwift-Qwen2.5-7B --output tokenswift-qwen
    - hf-longspec convert yuhuili/EAGLE3-LLaMA3.1-Instruct-8B --output eagle3-llama
    - hf-longspec convert ./draft_model_weights.pth --target my-org/my-target --output my-draft

    Exit status: 0; 2 for what cannot be converted.
    """
    with options.one_line_errors(debug):
        from ...modeling import register_draft

        print(f"Reading {source}.", file=sys.stderr)
        draft = register_draft.convert(source, target)
        draft.save_pretrained(output)
        parameters = sum(weight.numel() for weight in draft.parameters()) / 1e6
        print(f"{output}: {parameters:.1f}M parameters for {draft.config.target_name_or_path or target}.")
