"""Result files: one JSON object per line."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_longspec.cli.files import Record


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


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What has another value, in words."""
    return [f"{key} was {old.get(key)}, now {new.get(key)}" for key in {**old, **new} if old.get(key) != new.get(key)]
