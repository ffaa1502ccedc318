"""`hf-longspec publish`: upload a draft to the Hub, or write the repository to a folder."""

import json
from pathlib import Path
from typing import Any

from transformers import AutoModel

from ..cli import CommandError, one_line
from ..hub import Card, write_repository
from ..hub.repository import CARD_FACTS, MARK, write_engine
from .session import loading, quiet

# The engine's repository, below the folder that a dry run writes.
ENGINE_FOLDER = Path("engine")


def is_ours(folder: Path) -> bool:
    return any(path.read_text(encoding="utf-8", errors="replace").startswith(MARK) for path in folder.rglob("*.py"))


def read_card(source: Path, **given: Any) -> Card:
    """The facts beside the draft, with those that are `given` instead.

    Raises:
        CommandError: If they cannot be read.
        ValueError: If the card has unknown fields.
    """
    file = source / CARD_FACTS
    facts: Any = {}
    if file.is_file():
        try:
            facts = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CommandError(f"{file} is not JSON: {one_line(error)}.") from error
        if not isinstance(facts, dict):
            raise CommandError(f"{file} holds a {type(facts).__name__}: expected the facts of a card by name.")
    return Card.read(facts | {name: value for name, value in given.items() if value is not None})


def load(source: Path) -> Any:
    """The draft in a folder, by the installed class.

    Raises:
        CommandError: If there is none.
    """
    if not (source / "config.json").is_file():
        raise CommandError(f"{source} has no config.json: pass the folder of a saved draft.")
    with quiet(progress_bars=False), loading(str(source), "draft"):
        return AutoModel.from_pretrained(source)


def write(draft: Any, output: Path, card: Card, repo: str | None, engine: str | None) -> None:
    """Write the repository to a folder, and print its files with their sizes."""
    with quiet(progress_bars=False):
        files = write_repository(draft, output, card, repo, engine)
        if engine is not None and not (output / ENGINE_FOLDER).exists():
            files += [ENGINE_FOLDER / file for file in write_engine(output / ENGINE_FOLDER, engine)]
    sizes = [(output / file).stat().st_size for file in files]
    for file, size in zip(files, sizes, strict=True):
        print(f"{size:>13,}  {file.as_posix()}")
    where = f"{output} would be uploaded to {repo or 'a repository'}"
    if engine is not None:
        where += f", the folder {ENGINE_FOLDER} of it to {engine} if that does not exist"
    print(f"{sum(sizes):>13,}  bytes in {len(sizes)} files of {where}. Nothing was uploaded.")
