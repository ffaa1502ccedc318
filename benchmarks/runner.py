"""The run that every benchmark writes to: each measurement once, in turns, after a warm-up, until the time is over."""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import torch

from benchmarks.pages import PAGES
from benchmarks.records import differences, of_kind, read_records
from hf_longspec.cli.env import environment
from hf_longspec.cli.files import Record, replace_file

T = TypeVar("T")
NO_TIME = "no time left"
# Parts of the environment that may differ between the parts of one benchmark.
MAY_CHANGE = {"date", "command", "load_average", "kind", "benchmark", "settings"}


class Run:
    """A result file, written line by line, and the report beside it, which is written and printed at the end.

    The first line has `kind` "environment", with the settings and further `facts`; the last one, `kind` "end", is
    missing from a run that was interrupted. Also then the report is written.

    Args:
        path (`Path`): `<name>.jsonl`; the report is `<name>.md`.
        benchmark (`str`): Name of the benchmark in pages.yaml.
        seconds (`float`): Time limit, counted from `started`, by default from now.
        resume (`bool`, *optional*): Continue an existing file in place of replacing it.
        quiet (`bool`, *optional*): Show no progress on standard error.
    """

    def __init__(
        self,
        path: Path,
        benchmark: str,
        seconds: float,
        settings: Mapping[str, Any] | None = None,
        *,
        resume: bool = False,
        quiet: bool = False,
        facts: Mapping[str, Any] | None = None,
        now: Callable[[], float] = time.perf_counter,
        started: float | None = None,
    ):
        self.path, self.seconds, self.quiet, self._now = path, seconds, quiet, now
        self._report, settings = PAGES[benchmark].report, settings or {}
        self._started = now() if started is None else started
        here = {**environment(), **(facts or {})}
        here["commit"] = here["commit"] or "unknown"
        before = read_records(path) if resume and path.exists() else []
        if before:
            refuse_other(path, before, benchmark, settings, here)
        # what was left out is tried again
        self.records = [record for record in before if record["kind"] not in ("end", "skipped")]
        self._longest: dict[str, float] = {}  # seconds, by what is alike
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
        """Add a record."""
        record = {"kind": kind, **values}
        self.records.append(record)
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        return record

    def skip(self, reason: str, **what: Any) -> None:
        """Record a measurement that was left out, and the reason."""
        self.write("skipped", reason=reason, **what)
        self.say(f"left out, {reason}: {', '.join(map(str, what.values()))}")

    def say(self, text: str) -> None:
        if not self.quiet:
            minutes, seconds = divmod(int(self.elapsed), 60)
            print(f"[{minutes:3d}:{seconds:02d}] {text}", file=sys.stderr, flush=True)

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
        if not of_kind(self.records, "skipped", **what):  # the first reason counts
            self.skip(reason, **what)
        return None

    def in_time(self, planned: Iterable[T], describe: Callable[[T], Mapping[str, Any]]) -> Iterator[T]:
        """Yield what there is time for, as long as the longest before took; add a line by `describe` for all else."""
        longest = 0.0
        for item in planned:
            if self.fits(longest):
                start = self.elapsed
                yield item
                longest = max(longest, self.elapsed - start)
            else:
                self.skip(NO_TIME, **describe(item))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.write("end", seconds=round(self.elapsed, 1))
        self._file.close()
        report = self._report(self.records)
        replace_file(self.path.with_suffix(".md"), report)
        if kind is None:
            print(report)


def refuse_other(
    path: Path,
    records: Sequence[Record],
    benchmark: str,
    settings: Mapping[str, Any],
    here: Mapping[str, Any],
) -> None:
    """Refuse a file of another benchmark, of other settings or of another environment."""
    first = records[0]
    if first.get("kind") != "environment" or first.get("benchmark") != benchmark:
        raise ValueError(f"--resume {path}: not a result file of `{benchmark}`. Pass another file.")
    settings = json.loads(json.dumps(settings))  # tuples are lists in the file
    different = differences(first.get("settings", {}), settings)
    different += differences(*({k: v for k, v in side.items() if k not in MAY_CHANGE} for side in (first, here)))
    if different:
        raise ValueError(
            f"--resume {path}: other settings or environment: {'; '.join(different)}. Use the same ones, or "
            "another file."
        )
