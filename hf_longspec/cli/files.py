"""Files that commands write and read: whole or not at all.

What exists is refused before any work, except what `--resume` continues, and what `--overwrite` gives up.
"""

import os
import shutil
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
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
    with TemporaryDirectory(prefix=".hf-longspec-", dir=place.parent) as folder:
        new = Path(folder) / "new"
        with new.open("wb") as file:
            file.write(content.encode())
            file.flush()
            os.fsync(file.fileno())
        if place.exists():
            shutil.copymode(place, new)
        os.replace(new, place)


def claim(
    outputs: Sequence[Path],
    inputs: Iterable[Any] = (),
    *,
    overwrite: bool,
    resume: bool | None = None,
    kept: Collection[str] = (),
) -> None:
    """Refuse outputs that exist, or that the command reads.

    Args:
        outputs: Every file and folder that the command writes, with those whose names it derives from an option.
        inputs: The files and folders that it reads. Other values, such as Hub ids and `None`, are ignored.
        overwrite: Whether existing outputs are replaced. Outputs that are read are refused all the same.
        resume: Whether existing outputs are continued; `None` for a command without `--resume`.
        kept: Names in a folder that the command adds to and does not replace.
    """
    if overwrite and resume:
        raise CommandError("--resume continues what --overwrite would replace. Pass one of them.")
    read = [Path(name) for name in inputs if name is not None and Path(name).exists()]
    for output in outputs:
        for file in read:
            if output.exists() and output.samefile(file):
                raise CommandError(
                    f"{output} is an output, and {file} is read: they are the same. Name another output."
                )
            if not resume and output.resolve() in file.resolve().parents:
                raise CommandError(f"{file} is read, and lies in the output folder {output}. Name another folder.")
    if overwrite or resume:
        return
    if there := [name for output in outputs for name in _content(output, kept)]:
        more = [f"{len(there) - MOST_NAMES} others"] if len(there) > MOST_NAMES else []
        *first, last = there[:MOST_NAMES] + more
        names = f"{', '.join(first)} and {last} exist" if first else f"{last} exists"
        remedy = "" if resume is None else "--resume to continue, "
        raise CommandError(
            f"{names}. Pass {remedy}--overwrite to replace what has the name of an output, or name another output."
        )


def _content(output: Path, kept: Collection[str]) -> list[str]:
    """What writing to `output` could cost: the file if it is not empty, or what lies in the folder."""
    if output.is_dir():
        return sorted(str(path) for path in output.iterdir() if path.name not in kept)
    return [str(output)] if output.exists() and output.stat().st_size else []
