"""The files of `hf-longspec generate --data`: finished rows in a hidden folder, and the output when all are done.

Each process appends to a file of its own in the folder, whose first line names the data, the settings and their digest.
Every row has a digest of the settings and of its prompt, so that a row of another run is recognised in the output too.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..cli import CommandError
from .files import Record, differences

COMMAND = "hf-longspec generate --data"
FINISHED = "rows.jsonl"  # of earlier parts of the run


class Work:
    """The files of one run.

    Args:
        output (`Path`): The file for all rows.
        source (`str`): The value of `--data`.
        prompts: The texts, `None` for a row without one.
        settings: All values that decide the texts.
    """

    def __init__(self, output: Path, source: str, prompts: Sequence[str | None], settings: Mapping[str, Any]):
        self._name, self._output, self._folder = output, output.resolve(), folder_of(output)
        self._settings = json.loads(json.dumps(settings))  # tuples are lists in the file
        self._digest = _digest(json.dumps(settings))
        self._prompts = [_digest(prompt or "") for prompt in prompts]
        self.header = _line({"command": COMMAND, "data": source, "settings": settings, "digest": self._digest})

    def finished(self) -> dict[int, Record]:
        """The rows that have a text, by number. The folder has those of the output, too.

        Raises:
            CommandError: If a file is none of this command, or has rows of other prompts or settings.
        """
        records = [record for part in self._parts() for record in self._read_part(part)]
        if not self._parts() and self._output.exists():
            lines = self._output.read_text(encoding="utf-8", errors="replace").split("\n")
            records = self._rows(self._name, lines if lines[-1] else lines[:-1], 1)
        done = {record["row"]: record for record in records if "error" not in record}
        if any(record["digest"].split("-")[0] != self._digest for record in done.values()):
            raise self._refusal("its rows were continued with other settings")
        if other := [str(row) for row, record in sorted(done.items()) if record["digest"] != self._digest_of(row)]:
            more = f" and {len(other) - 3} more" if len(other) > 3 else ""
            raise self._refusal(f"{', '.join(other[:3])}{more} of its rows belong to other prompts than in --data now")
        return done

    def begin(self, done: Mapping[int, Record]) -> None:
        """Keep these rows in one file, and remove those of the processes of earlier parts of the run."""
        self._folder.mkdir(parents=True, exist_ok=True)
        earlier = self._parts()
        self._replace(self._folder / FINISHED, self.header, done)
        for part in earlier:
            if part.name != FINISHED:
                part.unlink()

    def writer(self, process: int) -> Callable[..., object]:
        """Begin the file of one process, and return a function that adds a row to it, given its number and values."""
        file = (self._folder / f"rows-{process}.jsonl").open("w", encoding="utf-8", buffering=1)  # written line by line
        file.write(self.header)
        return lambda row, **values: file.write(_line({"row": row, **values, "digest": self._digest_of(row)}))

    def end(self) -> list[Record]:
        """Write all rows in the order of the prompts to the output, and remove the folder."""
        found = {record["row"]: record for part in self._parts() for record in self._read_part(part)}
        if any(record["digest"] != self._digest_of(row) for row, record in found.items()):
            raise CommandError(f"{self._name}: another run writes to it. Pass another --output.")
        if missing := len(self._prompts) - len(found):
            raise CommandError(
                f"{missing} of {len(self._prompts)} rows are missing, since a process ended early. Pass --resume."
            )
        self._replace(self._output, "", found)
        for part in self._parts():
            part.unlink()
        with suppress(OSError):  # something else is in it, and stays
            self._folder.rmdir()
        return list(found.values())

    def _digest_of(self, row: int) -> str:
        """Digest of the settings and of a prompt; empty for a row that `--data` does not have."""
        return f"{self._digest}-{self._prompts[row]}" if 0 <= row < len(self._prompts) else ""

    def _parts(self) -> list[Path]:
        return sorted(self._folder.glob("rows*.jsonl"))

    def _replace(self, path: Path, header: str, rows: Mapping[int, Record]) -> None:
        """Write rows beside the files of the processes, and move them to their place."""
        new = self._folder / "new"
        new.write_text(header + "".join(_line(rows[row]) for row in sorted(rows)), encoding="utf-8")
        if path.exists():
            shutil.copymode(path, new)
        new.replace(path)

    def _read_part(self, path: Path) -> list[Record]:
        """The rows of a process, whose last line may be cut off."""
        *lines, cut_off = path.read_text(encoding="utf-8", errors="replace").split("\n")
        if not lines and self.header.startswith(cut_off):
            return []
        first = _record(lines[0]) if lines else {}
        if first.get("command") != COMMAND or not isinstance(first.get("settings"), dict):
            raise self._refusal(f"{path} is not a file of this command")
        if different := differences(first["settings"], self._settings):
            raise self._refusal(f"other settings: {'; '.join(different)}")
        return self._rows(path, lines[1:], 2)

    def _rows(self, path: Path, lines: Iterable[str], first: int) -> list[Record]:
        """The rows on lines, the first of which has the number `first`."""
        rows = []
        for number, line in enumerate(lines, first):
            rows.append(_record(line))
            if type(rows[-1].get("row")) is not int or not isinstance(rows[-1].get("digest"), str):
                raise self._refusal(f"{path}, line {number}, is not a row of this command")
        return rows

    def _refusal(self, what: str) -> CommandError:
        return CommandError(f"--resume {self._name}: {what}. Pass the same ones, another --output, or --overwrite.")


def folder_of(output: Path) -> Path:
    """The folder for finished rows, beside the file that `output` is or links to."""
    output = output.resolve()
    return output.with_name(f".{output.name}.hf-longspec")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]  # JSON may have lone surrogates


def _line(record: Record) -> str:
    return json.dumps(record) + "\n"


def _record(line: str) -> Record:
    """The object on a line; empty if there is none."""
    with suppress(ValueError, RecursionError):
        if isinstance(record := json.loads(line), dict):
            return record
    return {}
