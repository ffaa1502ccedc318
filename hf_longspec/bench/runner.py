"""The runner of all benchmarks: methods in cells in turns, each warmed up once, until the time is over.

A suite is a list of cells, of methods and of turns: in code, or in a file such as benchmarks/suites/figure.yaml.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import torch

from .calls import Decoding, changed
from .machine import environment
from .report import NO_TIME
from .results import Record, check_resume, holds_something, of_kind, refuse_other, replace_file, results_in

T = TypeVar("T")
Point = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Method:
    """A way to decode."""

    name: str  # in the results
    how: Any  # as [`run_call`] takes it
    point: Point = ()  # settings of the draft that differ from its own

    def with_settings(self) -> Any:
        return changed(self.how, dict(self.point))


@dataclass(frozen=True)
class Cell:
    """One combination of the values that are varied; `context` 0 stands for prompts of their own length."""

    dtype: str
    context: int
    batch: int
    decoding: Decoding = field(default_factory=Decoding)

    def key(self) -> dict[str, Any]:
        decoding = self.decoding.to_dict()
        return {"dtype": self.dtype, "context": self.context, "batch": self.batch, "decoding": decoding}


class Runner:
    """Measure what a result file lacks, as long as there is time; the file names what is left out.

    `<name>.jsonl` is written line by line, and `<name>.md` every few seconds, so that the results of an interrupted run
    can be used.

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
        before = results_in(path) if resume and holds_something(path) else []
        if before:
            refuse_other(path, before[0], benchmark, settings, here)
        # what was left out is tried again
        self.records = [record for record in before if record["kind"] not in ("end", "skipped")]
        self._longest: dict[str, float] = {}  # seconds, by what is alike
        self._reported = self.elapsed
        # without a cut-off last line
        replace_file(path, "".join(json.dumps(record) + "\n" for record in self.records))
        self._file = path.open("a", encoding="utf-8")
        if before:
            self.write("resumed", **{name: here[name] for name in ("date", "command", "load_average")})
        else:
            self.write("environment", benchmark=benchmark, **here, settings=dict(settings))

    @property
    def elapsed(self) -> float:
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

    def measure(
        self,
        kind: str,
        place: Mapping[str, Any],
        run: Callable[[], Mapping[str, Any]],
        warm_up: Callable[[], object] | None = None,
        alike: Sequence[str] | None = None,
    ) -> Record | None:
        """Return the record at `place`, written from what `run` returns unless the file has it.

        There is none, and a line of the file has the reason, where it would not fit into the time, where memory is out,
        and where a ValueError refuses it; other turns of it are not tried then. `warm_up` precedes the first of those
        that are `alike`: the values of these names in `place`, by default all but `turn`, decide how long `run` takes.
        """
        place = json.loads(json.dumps(place))  # as in the file, where tuples are lists
        if known := of_kind(self.records, kind, **place):
            return known[0]
        what, reason = {name: value for name, value in place.items() if name != "turn"}, NO_TIME
        like = json.dumps([place[name] for name in (what if alike is None else alike)])
        if self.fits(self._longest.get(like, 0.0)) and not of_kind(self.records, "skipped", **what):
            try:
                if warm_up is not None and like not in self._longest:
                    warm_up()
                started = self.elapsed
                found = run()
            except torch.OutOfMemoryError:
                reason = "out of memory"
            except ValueError as error:  # a refusal, which names its rule and remedy
                reason = str(error).split("\n")[0]
            else:
                self._longest[like] = max(self._longest.get(like, 0.0), self.elapsed - started)
                return self.write(kind, **place, **found)
        self.leave_out(reason, **what)
        return None

    def leave_out(self, reason: str, **what: Any) -> None:
        """Record that something is not measured, and the reason; the first one counts."""
        if not of_kind(self.records, "skipped", **what):
            self.skip(reason, **what)

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


def rotated(names: Sequence[T], turn: int) -> list[T]:
    """Return all names, each turn beginning with another one."""
    first = turn % max(1, len(names))
    return [*names[first:], *names[:first]]
