"""Result files: one JSON object per line, written as soon as it is known, and a Markdown table beside them."""

import json
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from .environment import environment
from .timing import TimeGuard

Record = dict[str, Any]


class ResultFile:
    """Writes `<name>.jsonl` line by line and keeps `<name>.md` up to date, so that an interrupted run is of use.

    The first line has `kind` "environment"; the last one, `kind` "end", is missing from a run that was interrupted.

    Args:
        path (`Path`): The `.jsonl` file; what it held before is replaced.
        benchmark (`str`): Name of the benchmark.
        report (`Callable`): Turns all records into Markdown.
        guard ([`TimeGuard`]): Time limit of the run.
        settings (`dict`): What was measured.
    """

    def __init__(
        self,
        path: Path,
        benchmark: str,
        report: Callable[[list[Record]], str],
        guard: TimeGuard,
        settings: dict[str, Any],
    ):
        self.path = path
        self.guard = guard
        self.records: list[Record] = []
        self._report = report
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")
        self.write("environment", benchmark=benchmark, **environment(), settings=settings)

    def write(self, kind: str, **values: Any) -> Record:
        """Add a record, and bring the table up to date."""
        record = {"kind": kind, **values}
        self.records.append(record)
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        self.path.with_suffix(".md").write_text(self._report(self.records), encoding="utf-8")
        return record

    def skip(self, reason: str, **what: Any) -> None:
        """Say what was left out and why."""
        self.write("skipped", reason=reason, **what)

    def __enter__(self) -> "ResultFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.write("end", seconds=round(self.guard.elapsed, 1))
        self._file.close()


def read_records(path: Path) -> list[Record]:
    """Every record of a result file; a last line that was cut off is dropped.

    Raises:
        ValueError: If another line holds no JSON object.
    """
    records: list[Record] = []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            if number == len(lines):
                break
            record = None
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number}: no JSON object. Pass a result file, one object per line.")
        records.append(record)
    return records
