"""`hf-longspec publish`: upload a draft to the Hub, or write the repository to a folder."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import AutoModel

from ..cli import CARD_FACTS, CommandError, options
from ..hub import Card, push, write_repository
from ..hub.repository import STUB, engine_of, write_engine
from .files import claim
from .models import loading, quiet

# The engine's repository, below the folder that a dry run writes.
ENGINE_FOLDER = Path("engine")


def run(args: SimpleNamespace) -> None:
    if not args.dry_run and args.repo is None:
        raise CommandError("no repository to upload to. Pass --repo, or --dry-run.")
    if not args.dry_run and args.output is not None:
        raise CommandError(f"--output {args.output} needs --dry-run. Without it, the draft is uploaded.")
    engine = engine_of(args.repo, args.engine, args.self_contained)
    name = args.source.resolve().name
    output = args.output or args.source.resolve().with_name(f"{name}-hub")
    if args.dry_run:
        claim(output, overwrite=args.overwrite)
    file = args.source / CARD_FACTS
    facts = options.read_json(file) if file.is_file() else {}
    given = {"repo": args.repo, "base_model": args.base_model, "license": args.license}
    card = Card.read(facts | {name: value for name, value in given.items() if value is not None})
    if args.acceptance is not None:
        card = replace(card, acceptance=options.read_text(args.acceptance, None)[1].strip())
    if card.warning:
        print(f"warning: {card.warning}", file=sys.stderr)
    options.require_model("draft", str(args.source))
    draft = load(args.source)
    if args.dry_run:
        write(draft, output, card, args.repo, engine)
    else:
        where = {"engine": args.engine, "self_contained": args.self_contained}
        print(push(draft, str(args.repo), card=card, private=args.private or None, **where).commit_url)


def load(source: Path) -> Any:
    with quiet(), loading(str(source), "draft"):
        return AutoModel.from_pretrained(source)


def write(draft: Any, output: Path, card: Card, repo: str | None, engine: str | None) -> None:
    """Write the repository to a folder, and say where it would be uploaded to."""
    # an engine without a commit is uploaded with the draft if it does not exist
    is_pinned = engine is None or "@" in engine
    with quiet():
        files = write_repository(draft, output, card, repo, engine)
        if not is_pinned:
            files += [ENGINE_FOLDER / file for file in write_engine(output / ENGINE_FOLDER)]
    size = sum((output / file).stat().st_size for file in files)
    where = f"{output} would be uploaded to {repo or 'a repository'}"
    if not is_pinned:
        where += f", the folder {ENGINE_FOLDER} of it to {engine} if that does not exist, whose commit {STUB} gets"
    print(f"{size:,} bytes in {len(files)} files of {where}. Nothing was uploaded.")
