"""`hf-longspec publish`: upload a draft to the Hub, or write the repository to a folder."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError
from transformers import AutoModel

from ..bench.report import acceptance_section
from ..cli import CommandError, one_line
from ..hub import Card, push, write_repository
from ..hub.repository import WITH_NGRAMS, engine_of, write_engine
from .models import NetworkError, loading, quiet

# The engine's repository, below the folder that a dry run writes.
ENGINE_FOLDER = Path("engine")


def run(args: SimpleNamespace) -> None:
    engine = engine_of(args.repo, args.engine, args.self_contained)
    options = {"repo": args.repo, "base_model": args.base_model, "license": args.license}
    card = Card.read(args.facts | {name: value for name, value in options.items() if value is not None})
    if args.measured:
        card = replace(card, acceptance=acceptance_section(args.measured))
    draft = load(args.source)
    for name in settings_left_out(draft, engine):
        value = draft.setting(name)
        print(f"note: the published code refuses {name}={value!r}: users have to install hf_longspec.", file=sys.stderr)
    if args.dry_run:
        write(draft, args.output, card, args.repo, engine)
    else:
        with errors_of_the_hub():
            where = {"engine": args.engine, "self_contained": args.self_contained}
            print(push(draft, str(args.repo), card=card, private=args.private or None, **where).commit_url)


def settings_left_out(draft: Any, engine: str | None) -> list[str]:
    """The settings of a draft for which the code of its repository has no part."""
    if not getattr(draft, "_is_longspec_draft", False):
        return []  # refused when it is written
    without_ngrams = engine is None and draft.config.model_type not in WITH_NGRAMS and draft.takes_ngrams
    found = ["ngram_candidates"] if without_ngrams and draft.setting("ngram_candidates") else []
    return found + (["compile"] if draft.setting("compile") not in ("auto", "off") else [])


@contextmanager
def errors_of_the_hub() -> Iterator[None]:
    """Name what helps if the Hub refuses or is not reached."""
    try:
        yield
    except LocalTokenNotFoundError as error:
        raise CommandError("no access token. Run `hf auth login`, or set HF_TOKEN.") from error
    except HfHubHTTPError as error:
        remedy = "Check the name of --repo and that `hf auth whoami` may write there."
        raise CommandError(f"the Hub refused: {one_line(error)} {remedy}") from error
    except NetworkError as error:
        if isinstance(error, OSError):
            raise
        remedy = "Try again, or write the folder with --dry-run."
        raise CommandError(f"the Hub was not reached: {one_line(error)}. {remedy}") from error


def load(source: Path) -> Any:
    with quiet(progress_bars=False), loading(str(source), "draft"):
        return AutoModel.from_pretrained(source)


def write(draft: Any, output: Path, card: Card, repo: str | None, engine: str | None) -> None:
    """Write the repository to a folder, and print its files with their sizes."""
    with quiet(progress_bars=False):
        files = write_repository(draft, output, card, repo, engine)
        if engine is not None:
            files += [ENGINE_FOLDER / file for file in write_engine(output / ENGINE_FOLDER, engine)]
    sizes = [(output / file).stat().st_size for file in files]
    for file, size in zip(files, sizes, strict=True):
        print(f"{size:>13,}  {file.as_posix()}")
    where = f"{output} would be uploaded to {repo or 'a repository'}"
    if engine is not None:
        where += f", the folder {ENGINE_FOLDER} of it to {engine} if that does not exist"
    print(f"{sum(sizes):>13,}  bytes in {len(sizes)} files of {where}. Nothing was uploaded.")
