"""Result files: one JSON object per line, written as soon as it is known, and a Markdown report beside them."""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self, TypeVar

from .machine import environment

Record = dict[str, Any]
T = TypeVar("T")

# Parts of the environment that may differ between the parts of one benchmark.
MAY_CHANGE = {"date", "command", "load_average", "kind", "benchmark", "settings"}


class ResultFile:
    """Write `<name>.jsonl` line by line, and `<name>.md` every few seconds, so that the results of an interrupted run
    can be used. It keeps the time limit, too: a measurement that would not fit is left out, and the result names it.

    The first line has `kind` "environment", with the settings and further `facts`; the last one, `kind` "end", is
    missing from a run that was interrupted. `resume` says whether an existing file is continued; `None` replaces it.
    The time limit counts from `started`. Without a `report`, a function of all records, no `.md` is written.
    """

    report_every = 5.0  # seconds

    def __init__(
        self,
        path: Path,
        benchmark: str,
        report: Callable[[list[Record]], str] | None,
        seconds: float,
        settings: Mapping[str, Any],
        facts: Mapping[str, Any] | None = None,
        resume: bool | None = None,
        *,
        now: Callable[[], float] = time.perf_counter,
        started: float | None = None,
    ):
        self.path, self.seconds, self._report, self._now = path, seconds, report, now
        self._started = now() if started is None else started
        here = {**environment(), **(facts or {})}
        if resume is False:
            check_resume(path, resume)
        before = _results_in(path) if resume and _holds_something(path) else []
        if before:
            refuse_other(path, before[0], benchmark, settings, here)
        # what was left out is tried again
        self.records = [record for record in before if record["kind"] not in ("end", "skipped")]
        self._reported = self.elapsed
        write_anew(path, self.records)  # without a cut-off last line
        self._file = path.open("a", encoding="utf-8")
        if before:
            self.write("resumed", **{name: here[name] for name in ("date", "command", "load_average")})
        else:
            self.write("environment", benchmark=benchmark, **here, settings=dict(settings))

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._now() - self._started

    @property
    def left(self) -> float:
        """Seconds that remain, 0 at least."""
        return max(0.0, self.seconds - self.elapsed)

    def fits(self, seconds: float = 0.0) -> bool:
        """Whether there is time for a measurement that takes so long."""
        return self.left > 0 and seconds <= self.left

    def write(self, kind: str, **values: Any) -> Record:
        """Add a record. The report, which is made of all records, follows at the end and every few seconds."""
        record = {"kind": kind, **values}
        self.records.append(record)
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self.elapsed - self._reported > self.report_every:
            self._write_report()
        return record

    def skip(self, reason: str, **what: Any) -> None:
        """Record a measurement that was left out, and the reason."""
        self.write("skipped", reason=reason, **what)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.write("end", seconds=round(self.elapsed, 1))
        self._file.close()
        self._write_report()

    def _write_report(self) -> None:
        if self._report is None:
            return
        replace_file(self.path.with_suffix(".md"), self._report(self.records))
        self._reported = self.elapsed


def write_anew(path: Path, records: Iterable[Record]) -> None:
    """Replace a file by JSON lines."""
    replace_file(path, "".join(json.dumps(record) + "\n" for record in records))


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
    with TemporaryDirectory(prefix=".hf-longspec-", dir=place.parent) as beside:
        new = Path(beside) / "new"
        with new.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if place.exists():
            shutil.copymode(place, new)
        os.replace(new, place)


def check_resume(path: Path, resume: bool) -> None:
    """Refuse to replace a result file, and to continue what does not exist or is none."""
    there = _holds_something(path)
    if there and not resume:
        raise ValueError(f"{path} already exists. Pass --resume to continue it, or another file.")
    if resume and not there:
        raise ValueError(f"--resume: {path} does not exist. Drop --resume, or pass the file.")
    if resume:
        _results_in(path)


def _holds_something(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _results_in(path: Path) -> list[Record]:
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
    """The records of one kind that have these values."""
    fields = {"kind": kind, **values}
    return [record for record in records if all(record.get(name) == value for name, value in fields.items())]


def grouped(records: Sequence[Record], key: Callable[[Record], str]) -> dict[str, list[Record]]:
    """The records by a text that is made of each."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups


def in_turns(names: Sequence[T], repeats: int) -> Iterator[tuple[int, T]]:
    """Pairs `(repeat, name)` with all names in every repeat, each repeat beginning with another one.

    >>> [name for _, name in in_turns(["a", "b", "c"], 2)]
    ['a', 'b', 'c', 'b', 'c', 'a']
    """
    for repeat in range(repeats):
        for name in rotated(names, repeat):
            yield repeat, name


def rotated(names: Sequence[T], turn: int) -> list[T]:
    """Return all names, each turn beginning with another one."""
    first = turn % len(names)
    return [*names[first:], *names[:first]]
