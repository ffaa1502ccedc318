"""Files that commands write and read: whole or not at all, and those with one JSON object per line."""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

Record = dict[str, Any]


def replace_file(path: Path, content: str | bytes, through_links: bool = True) -> None:
    """Write a file beside its place and move it there, so that a reader finds the whole old file or the whole new one.

    The new file has the permissions of the old one. Missing folders are made. A link stays and the file that it points
    to is replaced, unless `through_links` is false. A device or a pipe is written to.
    """
    content = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    place = path.resolve() if through_links else path
    place.parent.mkdir(parents=True, exist_ok=True)
    # a folder of its own: its name is new, and the file gets the usual permissions
    with TemporaryDirectory(prefix=".hf-longspec-", dir=place.parent) as folder:
        new = Path(folder) / "new"
        with new.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if place.exists():
            shutil.copymode(place, new)
        os.replace(new, place)


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What has another value, in words."""
    return [f"{key} was {old.get(key)}, now {new.get(key)}" for key in {**old, **new} if old.get(key) != new.get(key)]


def read_records(path: Path) -> list[Record]:
    """Every record of a result file; a last line that was cut off is dropped."""
    records: list[Record] = []
    lines = [line for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if line.strip()]
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            if number == len(lines):
                break
            record = None
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number}: not a JSON object. Repair it, or pass another result file.")
        records.append(record)
    return records


def of_kind(records: Sequence[Record], kind: str, **values: Any) -> list[Record]:
    fields = {"kind": kind, **values}
    return [record for record in records if all(record.get(name) == value for name, value in fields.items())]
