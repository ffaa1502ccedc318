"""Result files: one JSON object per line. [`Runner`] writes them."""

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

Record = dict[str, Any]

# Stands for prompts of their own length among contexts.
OWN_LENGTH = 0
PLOTS = ("speed", "tau", "depth")

# Parts of the environment that may differ between the parts of one benchmark.
MAY_CHANGE = {"date", "command", "load_average", "kind", "benchmark", "settings"}


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


def plot_beside(results: Path, kind: str) -> Path:
    """The file of a plot of [`PLOTS`]: `<name>-speed.png` and so on, beside `<name>.jsonl`."""
    return results.with_name(f"{results.stem}-{kind}.png")


def check_resume(path: Path, resume: bool) -> None:
    """Refuse to replace a result file, and to continue what does not exist or is none."""
    there = holds_something(path)
    if there and not resume:
        raise ValueError(f"{path} already exists. Pass --resume to continue it, or another file.")
    if resume and not there:
        raise ValueError(f"--resume: {path} does not exist. Drop --resume, or pass the file.")
    if resume:
        results_in(path)


def holds_something(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def results_in(path: Path) -> list[Record]:
    """The records of an interrupted run."""
    records = read_records(path)
    if not records or any("kind" not in record for record in records):
        raise ValueError(f"--resume {path}: not a result file. Pass another file.")
    return records


def refuse_other(
    path: Path,
    first: Record,
    benchmark: str,
    settings: Mapping[str, Any],
    here: Mapping[str, Any],
    option: str = "--resume",
) -> None:
    """Refuse a file of other settings or of another environment."""
    if first.get("kind") != "environment" or first.get("benchmark") != benchmark:
        raise ValueError(f"{option} {path}: not a result file of `hf-longspec {benchmark}`. Pass another file.")
    settings = json.loads(json.dumps(settings))  # tuples are lists in the file
    different = differences(first.get("settings", {}), settings)
    different += differences(*({k: v for k, v in side.items() if k not in MAY_CHANGE} for side in (first, here)))
    if different:
        raise ValueError(
            f"{option} {path}: other settings or environment: {'; '.join(different)}. Use the same ones, or "
            "another file."
        )


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


def records_of_draft(results: Path, draft: str) -> list[Record]:
    """Return what `benchmarks/acceptance.py` has measured of one draft, or refuse a file without it."""
    records = read_records(results)
    of_draft = [record for record in records if record.get("options", {}).get("draft", draft) == draft]
    if not of_kind(of_draft, "acceptance") or not of_kind(of_draft, "environment"):
        names = dict.fromkeys(record["options"].get("draft") for record in records if record.get("options"))
        found = ", ".join(str(name) for name in names if name) or "none"
        raise ValueError(f"{results} has no acceptance of the draft {draft!r}, only of {found}. Pass one of them.")
    return of_draft


def grouped(records: Sequence[Record], key: Callable[[Record], str]) -> dict[str, list[Record]]:
    """The records by a text that is made of each."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups
