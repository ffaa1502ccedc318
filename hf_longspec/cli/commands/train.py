"""`hf-longspec train`: train a draft as a recipe describes."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from .. import one_line, options


def train(
    config: Annotated[Path, typer.Option(help="Recipe, such as examples/longspec_pretrain.yaml.")],
    target: Annotated[str | None, typer.Option(help="Hub id or folder of the target.")] = None,
    draft: Annotated[str | None, typer.Option(help="Hub id or folder of a draft to go on with.")] = None,
    output_dir: Annotated[
        Path | None,
        options.output("Where checkpoints and the draft are written.", options.require_writable_folder, new=False),
    ] = None,
    max_steps: Annotated[int | None, options.number(1, "Optimizer steps.")] = None,
    learning_rate: Annotated[float | None, options.number(0, "Peak learning rate.", float, above=True)] = None,
    setting: Annotated[list[str] | None, typer.Option("--set", help="Any other key: training.seed=1.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last complete checkpoint.")] = False,
    debug: options.Debug = False,
) -> None:
    """Train a draft as a recipe describes.

    A recipe names the target, the settings of the draft, the data and the arguments of the trainer; options replace its
    values. Checkpoints and the trained draft are written to a folder; nothing is uploaded.

    Examples:

    - hf-longspec train --config examples/longspec_pretrain.yaml --target Qwen/Qwen3-8B
    - hf-longspec train --config examples/longspec_long.yaml --draft runs/longspec_pretrain --output-dir runs/long
    - hf-longspec train --config examples/tokenswift.yaml --max-steps 100 --set training.seed=1 --resume

    Exit status: 0; 1 if the loss stopped being a number; 2 for what cannot be run; 130 after Ctrl-C.
    """
    named = {
        "target": target,
        "draft": draft,
        "training.output_dir": output_dir and str(output_dir),
        "training.max_steps": max_steps,
        "training.learning_rate": learning_rate,
    }
    with options.one_line_errors(debug, interrupted="Interrupted. --resume goes on from the last checkpoint."):
        from ..train import read_recipe, run

        overrides = {name: value for name, value in named.items() if value is not None}
        overrides |= options.read_settings(setting, "training.seed=1")
        try:
            run(read_recipe(config, overrides), resume)
        except FloatingPointError as error:
            if debug:
                raise
            print(f"error: {one_line(error)}", file=sys.stderr)
            raise typer.Exit(1) from error
