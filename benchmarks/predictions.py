"""Predictions for a Llama-3.1-8B shape in bfloat16 on an H200, made before any GPU ran, and judged by a run's lines.

They stand at the beginning of a result file, their outcomes at its end. On another machine they are judged all the
same; on the tiny shape they mean nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hf_longspec.bench.calls import PLAIN
from hf_longspec.bench.results import Record, of_kind

SHORT, MIDDLE = 8192, 32768
# Records to (measured value, whether it is as expected), for everything that a statement is about.
Judge = Callable[[Sequence[Record]], Iterator[tuple[float, bool]]]


@dataclass(frozen=True)
class Prediction:
    """One statement about the lines of a run: its name, its words, and how it is judged."""

    name: str
    text: str
    judge: Judge

    def outcome(self, records: Sequence[Record]) -> Record:
        """The measured values, and whether all of them are as expected; `None` if nothing was measured."""
        found = list(self.judge(records))
        holds = all(fine for _, fine in found) if found else None
        values = [float(f"{value:.3g}") for value, _ in found]
        return {"name": self.name, "text": self.text, "values": values, "holds": holds}


def value_of(
    key: str, low: float = float("-inf"), high: float = float("inf"), most_floors: float = float("inf"), **where: Any
) -> Judge:
    """A value of the lines that `where` selects is within bounds, and their time within so many floors."""

    def judge(records: Sequence[Record]) -> Iterator[tuple[float, bool]]:
        for line in of_kind(records, **where):
            value = line["ms"]["median"] if key == "ms" else line[key]
            yield value, low <= value <= high and line.get("times_floor", 0.0) <= most_floors

    return judge


def against_one(
    nodes: int, low: float, high: float, compare: Callable[[float, float], float] = lambda a, b: a / b, **where: Any
) -> Judge:
    """The time for some nodes over that for one node, or another comparison of the two, is within bounds."""

    def judge(records: Sequence[Record]) -> Iterator[tuple[float, bool]]:
        for line in of_kind(records, nodes=nodes, **where):
            same = {name: line.get(name) for name in ("kind", "backend", "batch", "context", "mode", "side")}
            for alone in of_kind(records, nodes=1, **same):
                value = compare(line["ms"]["median"], alone["ms"]["median"])
                yield value, low <= value <= high

    return judge


def _no_draft_beats_its_floor(records: Sequence[Record]) -> Iterator[tuple[float, bool]]:
    drafts = (line for line in of_kind(records, "iteration") if line["draft"] != PLAIN)
    return ((line["times_floor"], line["times_floor"] >= 1.0) for line in drafts)


KERNEL, THEIRS = {"kind": "kernel"}, {"kind": "forward", "side": "transformers", "mode": "eager", "batch": 1}
CAPTURED = {"kind": "forward", "side": "ours", "mode": "captured"}
PREDICTIONS = (
    Prediction(
        "prefix bandwidth",
        "one node after 32K: at least 3 TB/s and under 1.4 times the floor",
        value_of("tb_per_second", low=3.0, most_floors=1.4, **KERNEL, batch=1, context=MIDDLE, nodes=1),
    ),
    Prediction(
        "16 nodes", "a kernel takes as long for 16 nodes as for one, within 20 %", against_one(16, 0.8, 1.2, **KERNEL)
    ),
    Prediction(
        "64 nodes", "a kernel takes 2 to 3 times as long for 64 nodes as for one", against_one(64, 2.0, 3.0, **KERNEL)
    ),
    Prediction(
        "score rows",
        "SpecAttn's score rows add less than 2 % to the kernel's time",
        value_of("overhead", high=0.02, kind="score_rows"),
    ),
    Prediction(
        "masked block",
        "8 nodes under transformers' mask cost 8 ms more than a step, at 32K",
        against_one(8, 6.0, 10.0, lambda block, step: block - step, **THEIRS, context=MIDDLE),
    ),
    Prediction(
        "eager step",
        "transformers' step takes 10 to 20 ms at 8K: launches, not bytes",
        value_of("ms", 10.0, 20.0, **THEIRS, nodes=1, context=SHORT),
    ),
    Prediction(
        "captured step",
        "ours as a CUDA graph takes 5 to 6 ms at 8K",
        value_of("ms", 5.0, 6.0, **CAPTURED, nodes=1, context=SHORT, batch=1),
    ),
    Prediction(
        "captured verification",
        "16 nodes as a CUDA graph are within 10 % of one node",
        against_one(16, 0.9, 1.1, **CAPTURED),
    ),
    Prediction("floors", "no iteration of a drafter is faster than its floor", _no_draft_beats_its_floor),
)
