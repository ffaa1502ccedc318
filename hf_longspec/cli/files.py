"""Files that commands write: whole or not at all.

What exists is refused before any work, except what `--resume` continues, and what `--overwrite` gives up.
"""

import os
import shutil
import tempfile
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from ..cli import CommandError

Record = dict[str, Any]
MOST_NAMES = 12  # in a message


def replace_file(path: Path, content: str) -> None:
    """Write a file beside its place and move it there, so that a reader finds the whole old file or the whole new one.

    The new file has the permissions of the old one. Missing folders are made. A link stays and the file that it points
    to is replaced.
    """
    place = path.resolve()
    place.parent.mkdir(parents=True, exist_ok=True)
    # a folder of its own: its name is new, and the file gets the usual permissions
    with tempfile.TemporaryDirectory(prefix=".hf-longspec-", dir=place.parent) as folder:
        new = Path(folder) / "new"
        with new.open("wb") as file:
            file.write(content.encode())
            file.flush()
            os.fsync(file.fileno())
        if place.exists():
            shutil.copymode(place, new)
        os.replace(new, place)


def claim(
    output: Path,
    inputs: Iterable[Any] = (),
    *,
    overwrite: bool,
    suffix: str = "",
    resume: bool | None = None,
    kept: Collection[str] = (),
) -> None:
    """Refuse an output that cannot be written, that exists, or that the command reads.

    Args:
        output: The file or folder that the command writes. Missing folders on its path are made with it.
        inputs: The files and folders that it reads. Other values, such as Hub ids and `None`, are ignored.
        overwrite: Whether an existing output is replaced. One that is read is refused all the same.
        suffix: How the name of a file ends; empty for a folder.
        resume: Whether an existing output is continued; `None` for a command without `--resume`.
        kept: Names in a folder that the command adds to and does not replace.
    """
    if overwrite and resume:
        raise CommandError("--resume continues what --overwrite would replace. Pass one of them.")
    if suffix and output.suffix != suffix:
        raise CommandError(f"{output} does not end with {suffix}. Name it {output.with_suffix(suffix)}.")
    if suffix and output.is_dir():
        raise CommandError(f"{output} is a folder. Name a file.")
    _require_writable(output.parent if suffix else output)
    for file in [Path(name) for name in inputs if name is not None and Path(name).exists()]:
        if output.exists() and output.samefile(file):
            raise CommandError(f"{output} is an output, and {file} is read: they are the same. Name another output.")
        if not resume and output.resolve() in file.resolve().parents:
            raise CommandError(f"{file} is read, and lies in the output folder {output}. Name another folder.")
    if not (overwrite or resume) and (there := _content(output, kept)):
        more = f" and {len(there) - MOST_NAMES} others" if len(there) > MOST_NAMES else ""
        remedy = "" if resume is None else "--resume to continue, "
        raise CommandError(
            f"already there: {', '.join(there[:MOST_NAMES])}{more}. Pass {remedy}--overwrite to replace what has "
            "the name of an output, or name another output."
        )


def _content(output: Path, kept: Collection[str]) -> list[str]:
    """What writing to `output` could cost: the file if it is not empty, or what lies in the folder."""
    if output.is_dir():
        return sorted(str(path) for path in output.iterdir() if path.name not in kept)
    return [str(output)] if output.exists() and output.stat().st_size else []


def _require_writable(folder: Path) -> None:
    """Refuse a folder that could not be made or written to."""
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    try:
        with tempfile.TemporaryDirectory(dir=there):
            pass  # permissions alone do not tell: nobody can write to /proc
    except NotADirectoryError as error:
        raise CommandError(f"{there} is a file. Pass another folder.") from error
    except OSError as error:
        raise CommandError(f"{there} cannot be written to: {error.strerror}. Pass another folder.") from error
