"""From single calls to rows: medians with their spread, ratios within turns, tau with its interval."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from typing import Any

from ..auditing import EXACT, NEAR_TIE, NOT_LOSSLESS
from .engine import HF, PLAIN
from .report_parts import of_kind
from .results import Record
from .summaries import mean_interval, ratios, significant, summarize

# What a text turned out to be, the worst first.
REFERENCE, IDENTICAL, DIFFERS, NOT_COMPARED = "reference", "identical", "differs", "not compared"
VERDICTS = (DIFFERS, NOT_LOSSLESS, NEAR_TIE, NOT_COMPARED, EXACT, IDENTICAL, REFERENCE)
FAILED = (DIFFERS, NOT_LOSSLESS)

CELL = ("dtype", "context", "batch", "decoding")


@dataclass(frozen=True)
class Row:
    """One method in one cell.

    Args:
        cell (`dict[str, Any]`): dtype, context, batch, decoding.
        method (`str`): Its name.
        runs (`list[Record]`): Its calls.
        others (`dict[str, list[Record]]`): Calls of all methods of the cell.
        floor_seconds (`float`, *optional*): What a step takes at least, reading weights and cache once.
        audit (`Record`, *optional*): What the audit said of the first text that is not plain `generate`'s.
    """

    cell: dict[str, Any]
    method: str
    runs: list[Record]
    others: dict[str, list[Record]] = field(repr=False)
    floor_seconds: float | None = None
    audit: Record | None = None

    @property
    def tau(self) -> float:
        """Tokens per verification, over all calls."""
        return sum(run["tokens"] for run in self.runs) / max(1, sum(run["steps"] for run in self.runs))

    @property
    def taus(self) -> list[float]:
        """Of the single calls."""
        return [run["tokens"] / run["steps"] for run in self.runs if run["steps"]]

    @property
    def histogram(self) -> list[int]:
        """Verifications by the number of drafted tokens that were emitted."""
        return _added([run["histogram"] for run in self.runs])

    @property
    def accepted_by_depth(self) -> list[float]:
        """See [`by_depth`]; not cut at the token limit."""
        return by_depth(_added([run["accepted"] for run in self.runs]))

    @property
    def verdict(self) -> str:
        """Of the texts of all calls, the worst; an audit stands for all texts that are not plain `generate`'s."""
        found = {self._verdict_of(run) for run in self.runs}
        if self.audit is not None and self.audit["verdict"] in FAILED:
            found.add(self.audit["verdict"])
        return min(found, key=VERDICTS.index)

    def _verdict_of(self, run: Record) -> str:
        truth = run["compared_with"]
        if truth == self.method:
            return REFERENCE
        expected = [other["text"] for other in self.others.get(truth, ()) if other["turn"] == run["turn"]]
        if not expected:
            return NOT_COMPARED
        if run["text"] == expected[0]:
            return IDENTICAL
        if self.cell["dtype"] == "float32":
            return DIFFERS
        return NOT_COMPARED if self.audit is None else self.audit["verdict"]

    @property
    def failed(self) -> bool:
        """Whether its text was wrong; such a row has no speed."""
        return self.verdict in FAILED

    def ratio_to(self, name: str) -> dict[str, float] | None:
        """Speed over that of another method, turn by turn."""
        base = {run["turn"]: _speed(run) for run in self.others.get(name, ()) if run["decode_seconds"]}
        pairs = [(_speed(r), base[r["turn"]]) for r in self.runs if r["turn"] in base and r["decode_seconds"]]
        return ratios(*zip(*pairs, strict=True)).to_dict() if pairs else None

    def difference_to(self, first: "Row") -> dict[str, float] | None:
        """Of tau to that of another row, turn by turn, with its 95 % interval."""
        base = {run["turn"]: run["tokens"] / run["steps"] for run in first.runs if run["steps"]}
        gaps = [r["tokens"] / r["steps"] - base[r["turn"]] for r in self.runs if r["turn"] in base and r["steps"]]
        return mean_interval(gaps).to_dict() if gaps else None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        peaks = [run["peak_bytes"] for run in self.runs if run["peak_bytes"] is not None]
        values: dict[str, Any] = {
            **self.cell,
            "method": self.method,
            "point": self.runs[0]["point"],
            "prompt_tokens": significant(sum(run["prompt_tokens"] for run in self.runs) / len(self.runs)),
            "text": self.verdict,
            "audit": None if self.audit is None else self.audit["report"],
            "repeats": len(self.runs),
            "ttft_seconds": summarize([run["ttft_seconds"] for run in self.runs]).to_dict(),
            "tau": significant(self.tau),
            "tau_interval": mean_interval(self.taus).to_dict() if self.taus else None,
            "acceptance_histogram": self.histogram,
            "acceptance_by_depth": [significant(share) for share in self.accepted_by_depth],
            "peak_bytes": max(peaks) if peaks else None,
            "draft_state_bytes": max(run["draft_state_bytes"] for run in self.runs),
        }
        speeds = [_speed(run) for run in self.runs if run["decode_seconds"]]
        if self.failed or not speeds:
            return values
        speed = summarize(speeds)
        values |= {
            "tokens_per_second": speed.to_dict(),
            "ratio_to_hf": self.ratio_to(HF),
            "ratio_to_plain": self.ratio_to(PLAIN),
        }
        if self.floor_seconds is not None:
            # tau tokens per floor at most: for loops without a draft the share of the floor itself
            share = self.floor_seconds * speed.median / self.cell["batch"] / self.tau
            values["share_of_floor"] = significant(share)
        return values


def rows_of(records: Sequence[Record]) -> list[Row]:
    """One row per cell and method, in the order in which they were first measured."""
    cells: dict[str, dict[str, list[Record]]] = {}
    for run in of_kind(records, "run"):
        cells.setdefault(_key(run), {}).setdefault(run["method"], []).append(run)
    floors = {(r["dtype"], r["context"], r["batch"]): r["seconds"] for r in of_kind(records, "floor")}
    audits = {(_key(r), r["method"]): r for r in of_kind(records, "audit")}
    rows = []
    for key, methods in cells.items():
        cell = json.loads(key)
        floor = floors.get((cell["dtype"], cell["context"], cell["batch"]))
        for name in sorted(methods, key=_baselines_first):
            rows.append(Row(cell, name, methods[name], methods, floor, audits.get((key, name))))
    return rows


def _key(record: Record) -> str:
    """A cell as text."""
    return json.dumps({name: record[name] for name in CELL}, sort_keys=True)


def by_depth(histogram: Sequence[int]) -> list[float]:
    """Share of the verifications that accepted a drafted token at depth d, out of those that accepted at d - 1.

    Verifications to which nothing was proposed at that depth count as such that did not accept.

    >>> by_depth([2, 1, 1])
    [0.5, 0.5]
    """
    reached = [sum(histogram[depth:]) for depth in range(len(histogram))]
    return [after / before for before, after in pairwise(reached) if before]


def _added(histograms: Sequence[Sequence[int]]) -> list[int]:
    return [sum(counts) for counts in zip_longest(*histograms, fillvalue=0)]


def _speed(run: Record) -> float:
    return run["tokens"] / run["decode_seconds"]


def _baselines_first(name: str) -> int:
    return {HF: 0, PLAIN: 1}.get(name, 2)
