"""The command `hf-longspec`."""

import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

from . import CommandError

try:
    import typer

    from . import audit, bench, env, generate, tune
    from .options import INPUT_ERROR, INTERRUPTED
except ModuleNotFoundError as error:
    missing = (error.name or "").partition(".")[0]
    if missing not in ("typer", "rich"):
        raise
    print(f"error: hf-longspec needs {missing}, which is not installed: pip install typer rich", file=sys.stderr)
    sys.exit(2)

# Of the click that typer brings along, or of the installed one: versions differ.
USAGE_ERROR: Any = typer.BadParameter.__base__

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Lossless speculative decoding at long context.",
)


app.command()(generate.generate)
app.command()(audit.audit)
app.command()(tune.tune)
app.command()(env.env)
app.command()(bench.bench)


@app.command()
def train(
    config: Annotated[Path, typer.Option(help="Recipe, such as examples/longspec_pretrain.yaml.")],
    target: Annotated[str | None, typer.Option(help="Hub id or folder of the target.")] = None,
    draft: Annotated[str | None, typer.Option(help="Hub id or folder of a draft to go on with.")] = None,
    output_dir: Annotated[str | None, typer.Option(help="Where checkpoints and the draft are written.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    setting: Annotated[list[str] | None, typer.Option("--set", help="Any other key: training.seed=1.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last complete checkpoint.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from.")] = False,
) -> None:
    """Train a draft as a recipe says.

    A recipe names the target, the settings of the draft, the data and the arguments of the trainer; options replace
    what it says. Checkpoints and the trained draft are written to a folder; nothing is uploaded.

    Examples:

    \b
    hf-longspec train --config examples/longspec_pretrain.yaml --target Qwen/Qwen3-8B
    hf-longspec train --config examples/longspec_long.yaml --draft runs/longspec_pretrain --output-dir runs/long
    hf-longspec train --config examples/tokenswift.yaml --max-steps 100 --set training.seed=1 --resume

    Exit status: 0; 1 if the loss stopped being a number; 2 for what cannot be run; 130 after Ctrl-C.
    """
    named = {
        "target": target,
        "draft": draft,
        "training.output_dir": output_dir,
        "training.max_steps": max_steps,
        "training.learning_rate": learning_rate,
    }
    try:
        from . import recipes
        from . import train as command

        overrides = {name: value for name, value in named.items() if value is not None}
        overrides |= dict(recipes.parse_setting(text) for text in setting or [])
        status = command.main(config, overrides, resume, debug)
    except CommandError as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        status = 2
    raise typer.Exit(status)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="Published id, folder or weight file of the authors' draft.")],
    output: Annotated[Path, typer.Option(help="New folder for the converted draft.")],
    target: Annotated[str | None, typer.Option(help="Id, folder or config.json of its target.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from.")] = False,
) -> None:
    """Convert a checkpoint of the authors of LongSpec or TokenSwift.

    Their published drafts are known by their ids. For other files, also those that the authors' training wrote, name
    the target; only its configuration is read.

    Examples:

    \b
    hf-longspec convert sail/longspec-Llama-3-8B-Instruct-262k --output longspec-llama-3
    hf-longspec convert TokenSwift/TokenSwift-Qwen2.5-7B --output tokenswift-qwen
    hf-longspec convert ./draft_model_weights.pth --target my-org/my-target --output my-draft

    Exit status: 0; 2 for what cannot be converted.
    """
    from . import convert as command

    raise typer.Exit(command.main(source, target, output, debug))


@app.command()
def publish(
    source: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a saved draft.")],
    repo: Annotated[str | None, typer.Option(help="Repository to upload to, owner/name.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write a folder and upload nothing.")] = False,
    output: Annotated[Path | None, typer.Option(help="That folder; DIR-hub by default.")] = None,
    results: Annotated[Path | None, typer.Option(help="What benchmarks/acceptance.py measured of the draft.")] = None,
    name: Annotated[str | None, typer.Option(help="Its name in there; that of DIR by default.")] = None,
    base_model: Annotated[str | None, typer.Option(help="Hub id of the target.")] = None,
    license: Annotated[str | None, typer.Option(help="License of the weights, such as apache-2.0.")] = None,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from.")] = False,
) -> None:
    """Publish a draft on the Hub, with the code that it needs and a model card.

    With --dry-run the repository is written to a folder and no network is used. Nothing is uploaded without --repo.

    Examples:

    \b
    hf-longspec publish runs/longspec --dry-run --base-model Qwen/Qwen3-8B
    hf-longspec publish runs/longspec --repo org/longspec-draft --base-model Qwen/Qwen3-8B --license apache-2.0
    hf-longspec publish runs/longspec --dry-run --results acceptance.jsonl --name mine

    Exit status: 0; 2 for what cannot be published.
    """
    from . import publish as command

    request = command.Request(source, repo, dry_run, output, results, name, base_model, license, private)
    raise typer.Exit(command.main(request, debug))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    help="Continue a long document with and without speculation, and compare.",
)
def demo(context: typer.Context) -> None:
    """Everything behind `demo` is for the demo, `--help` too."""
    from .demo import main as run

    raise typer.Exit(run(context.args))


def main() -> None:
    """Entry point of the command. Wrong options take one line, as every other error does."""
    try:
        status = app(prog_name="hf-longspec", standalone_mode=False)
    except USAGE_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.ctx.get_help())
        else:
            what = error.format_message().rstrip(".")
            print(f"error: {what}. `{error.ctx.command_path} --help` says what there is.", file=sys.stderr)
        status = INPUT_ERROR
    except typer.Abort:
        status = INTERRUPTED
    except Exception:  # shown by --debug; the status that Python ends with, 1, is a verdict of `audit`
        traceback.print_exc()
        status = INPUT_ERROR
    sys.exit(status or 0)


if __name__ == "__main__":
    main()
