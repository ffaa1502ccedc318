"""A result file that an interrupted benchmark goes on with."""

import json
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from .environment import environment
from .results import Record, ResultFile
from .timing import TimeGuard

# Parts of the environment that may differ between the parts of one benchmark.
MAY_CHANGE = {"date", "command", "load_average", "kind", "benchmark", "settings"}
REPORT_SECONDS = 5.0
_ABSOLUTE = re.compile(r"(?<![\w.~/-])~?/[^\s'\",]+")


class ResumableFile(ResultFile):
    """Appends to a file that is there, if it is of the same settings and environment.

    Args:
        path (`Path`): The `.jsonl` file.
        benchmark (`str`): Name of the benchmark.
        report (`Callable`): Turns all records into Markdown.
        guard ([`TimeGuard`]): Time limit.
        settings (`dict`): What is measured; JSON values only.
        facts (`Mapping[str, Any]`): What [`environment`] does not know, such as the device.
        resume (`bool`): Whether the file shall be gone on with.

    Raises:
        ValueError: If the file is there and `resume` is false, or it was measured otherwise; it is not touched then.
    """

    def __init__(
        self,
        path: Path,
        benchmark: str,
        report: Callable[[list[Record]], str],
        guard: TimeGuard,
        settings: dict[str, Any],
        facts: Mapping[str, Any],
        resume: bool,
    ):
        here = {**environment(), "command": command_line(sys.argv), **facts}
        if path.exists() and path.stat().st_size and not resume:
            raise ValueError(f"{path} is there already: pass --resume to go on with it, or another --output.")
        before = _whole_records(path) if path.exists() else []
        if not before:
            self._begin(path, report, guard)
            self.write("environment", benchmark=benchmark, **here, settings=settings)
            return
        refuse_other(path, before[0], benchmark, settings, here)
        self._begin(path, report, guard, [record for record in before if record["kind"] != "end"])
        self.write("resumed", **{name: here[name] for name in ("date", "command", "load_average")})

    def write(self, kind: str, **values: Any) -> Record:
        """Add a record. The table follows at the end, and every few seconds: it is made of all records."""
        record = {"kind": kind, **values}
        self.records.append(record)
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if time.monotonic() - self._reported > REPORT_SECONDS:
            self._write_report()
        return record

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)
        self._write_report()

    def _write_report(self) -> None:
        self.path.with_suffix(".md").write_text(self._report(self.records), encoding="utf-8")
        self._reported = time.monotonic()

    def _begin(
        self, path: Path, report: Callable[[list[Record]], str], guard: TimeGuard, records: list[Record] | None = None
    ) -> None:
        self.path, self.guard, self._report = path, guard, report
        self.records = list(records or [])
        self._reported = time.monotonic()
        path.parent.mkdir(parents=True, exist_ok=True)
        # written anew beside the file: a cut-off last line goes, and a full disk costs nothing
        fresh = path.with_name(path.name + ".new")
        fresh.write_text("".join(json.dumps(record) + "\n" for record in self.records), encoding="utf-8")
        fresh.replace(path)
        self._file = path.open("a", encoding="utf-8")


def refuse_other(
    path: Path, first: Record, benchmark: str, settings: Mapping[str, Any], here: Mapping[str, Any]
) -> None:
    """Refuse a file that was measured otherwise.

    Raises:
        ValueError: With what differs, old and new value.
    """
    if first.get("kind") != "environment" or first.get("benchmark") != benchmark:
        raise ValueError(f"--resume {path}: it is no result file of `hf-longspec {benchmark}`. Pass another --output.")
    settings = json.loads(json.dumps(settings))  # tuples are lists in the file
    different = _differences(first["settings"], settings)
    different += _differences(*({k: v for k, v in side.items() if k not in MAY_CHANGE} for side in (first, here)))
    if different:
        raise ValueError(
            f"--resume {path}: it was measured otherwise: {'; '.join(different)}. Repeat its settings, or pass another "
            "--output."
        )


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    return [f"{key} was {old.get(key)}, now {new.get(key)}" for key in {**old, **new} if old.get(key) != new.get(key)]


def _whole_records(path: Path) -> list[Record]:
    """Every record; a last line that was cut off is dropped."""
    lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ValueError(f"{path}, line {number} is no JSON. Repair it, or pass another --output.") from error
    return records


def command_line(arguments: list[str]) -> str:
    """A command as one would type it, without the folders of this machine.

    What lies below the current folder is written from there; of other absolute paths only the name is left.

    >>> command_line(["/opt/bin/hf-longspec", "bench", "--data=/home/me/novels", "--target", "org/model"])
    'hf-longspec bench --data=novels --target org/model'
    """
    program, *others = arguments
    name = Path(program).name
    return shlex.join(["hf-longspec" if name == "app.py" else name, *(without_folders(part) for part in others)])


def without_folders(text: str) -> str:
    """A text in which absolute paths are shortened."""
    return _ABSOLUTE.sub(lambda found: _shortened(found[0]), text)


def _shortened(path: str) -> str:
    relative = os.path.relpath(os.path.expanduser(path))
    return Path(path).name if relative.startswith("..") else relative
