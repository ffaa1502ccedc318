"""`hf-longspec publish`: upload a draft to the Hub, or write the repository to a folder."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from .. import CommandError, one_line, options


def explained(error: Exception) -> str | None:
    """The line for an error, with what helps if the Hub refuses or is not reached."""
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    from ..session import NetworkError

    if isinstance(error, LocalTokenNotFoundError):
        return "no access token was found: run `hf auth login`, or set HF_TOKEN."
    if isinstance(error, HfHubHTTPError):
        return f"the Hub refused: {one_line(error)} Check the name of --repo and that `hf auth whoami` may write there."
    if isinstance(error, NetworkError) and not isinstance(error, OSError):
        return f"the Hub was not reached: {one_line(error)}. Try again, or write the folder with --dry-run."
    return options.said(error)


def publish(
    source: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a saved draft.")],
    repo: Annotated[str | None, typer.Option(help="Repository to upload to, owner/name.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write a folder and upload nothing.")] = False,
    output: Annotated[Path | None, typer.Option(help="The folder of a dry run; DIR-hub by default.")] = None,
    results: Annotated[Path | None, typer.Option(help="Result file of benchmarks/acceptance.py for the draft.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the draft in --results; that of DIR by default.")] = None,
    base_model: Annotated[str | None, typer.Option(help="Hub id of the target.")] = None,
    license: Annotated[str | None, typer.Option(help="License of the weights, such as apache-2.0.")] = None,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    engine: Annotated[str | None, typer.Option(help="Repository that holds the code instead, owner/name.")] = None,
    debug: options.Debug = False,
) -> None:
    """Publish a draft on the Hub, with the code that it needs and a model card.

    With --dry-run the repository is written to a folder and no network is used. Nothing is uploaded without --repo.

    Examples:

    - hf-longspec publish runs/longspec --dry-run --base-model Qwen/Qwen3-8B
    - hf-longspec publish runs/longspec --repo org/longspec-draft --base-model Qwen/Qwen3-8B --license apache-2.0
    - hf-longspec publish runs/longspec --dry-run --results acceptance.jsonl --name mine
    - hf-longspec publish runs/longspec --repo org/longspec-draft --base-model Qwen/Qwen3-8B --engine org/engine

    Exit status: 0; 2 for what cannot be published.
    """
    with options.one_line_errors(debug, explained):
        from ...bench.markdown import acceptance_section
        from ...hub import push
        from ...hub.repository import check_engine, check_repo_id
        from ..publish import is_ours, load, read_card, write

        if repo is not None:
            check_repo_id(repo)
        if engine is not None:
            check_engine(engine, repo)
        if not dry_run and repo is None:
            raise CommandError("no repository was named, and nothing is uploaded without: pass --repo, or --dry-run.")
        if not dry_run and output is not None:
            raise CommandError(f"--output {output} goes with --dry-run; without it the draft is uploaded.")
        output = output or source.resolve().with_name(f"{source.resolve().name}-hub")
        if dry_run:
            ours = output.is_dir() and (output.samefile(source) or is_ours(output))
            options.require_writable_folder(output, new=not ours)
        card = read_card(source, repo=repo, base_model=base_model, license=license)
        if results is not None:
            card = replace(card, acceptance=acceptance_section(results, name or source.resolve().name))
        draft = load(source)
        if dry_run:
            write(draft, output, card, repo, engine)
        else:
            print(push(draft, str(repo), card=card, private=private or None, engine=engine).commit_url)
