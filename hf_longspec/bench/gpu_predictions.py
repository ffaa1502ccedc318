"""What was predicted before any GPU ran, and what a run found: written before the first measurement, judged at the end.

The predictions are for a Llama-3.1-8B shape in bfloat16 on an H200. On another machine they are still judged, as
stated; on the tiny shape they mean nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .engine import PLAIN
from .results import Record

SHORT, MIDDLE = 8192, 32768
Judgement = tuple[float, bool]


@dataclass(frozen=True)
class Prediction:
    """One statement about the lines of a run.

    Args:
        name (`str`): Short.
        text (`str`): What is expected.
        judge (`Callable`): Takes the lines and yields `(value, holds)` for everything the statement is about.
    """

    name: str
    text: str
    judge: Callable[[Sequence[Record]], Iterator[Judgement]]

    def outcome(self, records: Sequence[Record]) -> Record:
        """What became of it: measured values, and whether all of them are as expected."""
        found = list(self.judge(records))
        values = [float(f"{value:.3g}") for value, _ in found]
        return {
            "name": self.name,
            "text": self.text,
            "values": values,
            "holds": all(holds for _, holds in found) if found else None,
        }


def _lines(records: Sequence[Record], kind: str = "kernel", **where: object) -> Iterator[Record]:
    for record in records:
        if record["kind"] == kind and all(record.get(name) == value for name, value in where.items()):
            yield record


def _ms(record: Record) -> float:
    return float(record["ms"]["median"])


def _bandwidth(records: Sequence[Record]) -> Iterator[Judgement]:
    for record in _lines(records, batch=1, context=MIDDLE, nodes=1):
        yield record["tb_per_second"], record["tb_per_second"] >= 3.0 and record["times_floor"] < 1.4


def _against_one(nodes: int, low: float, high: float, kind: str = "kernel", **where: object):
    def judge(records: Sequence[Record]) -> Iterator[Judgement]:
        for record in _lines(records, kind, nodes=nodes, **where):
            same = {name: record.get(name) for name in ("backend", "batch", "context", "mode", "side")}
            for alone in _lines(records, kind, nodes=1, **same):
                ratio = _ms(record) / _ms(alone)
                yield ratio, low <= ratio <= high

    return judge


def _scores(records: Sequence[Record]) -> Iterator[Judgement]:
    for record in _lines(records, "score_rows"):
        yield record["overhead"], record["overhead"] < 0.02


def _masked_block(records: Sequence[Record]) -> Iterator[Judgement]:
    plain = {"side": "transformers", "mode": "eager", "context": MIDDLE, "batch": 1}
    for block in _lines(records, "forward", nodes=8, **plain):
        for alone in _lines(records, "forward", nodes=1, **plain):
            extra = _ms(block) - _ms(alone)
            yield extra, 6.0 <= extra <= 10.0


def _eager_step(records: Sequence[Record]) -> Iterator[Judgement]:
    eager = {"side": "transformers", "mode": "eager"}
    for record in _lines(records, "forward", **eager, nodes=1, context=SHORT, batch=1):
        yield _ms(record), 10.0 <= _ms(record) <= 20.0


def _captured_step(records: Sequence[Record]) -> Iterator[Judgement]:
    for record in _lines(records, "forward", side="ours", mode="captured", nodes=1, context=SHORT, batch=1):
        yield _ms(record), 5.0 <= _ms(record) <= 6.0


def _no_draft_beats_its_floor(records: Sequence[Record]) -> Iterator[Judgement]:
    for record in _lines(records, "iteration"):
        if record["draft"] != PLAIN:
            yield record["times_floor"], record["times_floor"] >= 1.0


PREDICTIONS = (
    Prediction("prefix bandwidth", "one node behind 32K: at least 3 TB/s and under 1.4 times the floor", _bandwidth),
    Prediction("17 nodes", "a kernel takes as long for 17 nodes as for one, within 20 %", _against_one(17, 0.8, 1.2)),
    Prediction("69 nodes", "a kernel takes 2 to 3 times as long for 69 nodes as for one", _against_one(69, 2.0, 3.0)),
    Prediction("score rows", "SpecAttn's score rows add less than 2 % to the kernel's time", _scores),
    Prediction("masked block", "8 nodes under transformers' mask cost 8 ms more than a step, at 32K", _masked_block),
    Prediction("eager step", "transformers' step takes 10 to 20 ms at 8K: launches, not bytes", _eager_step),
    Prediction("captured step", "ours as a CUDA graph takes 5 to 6 ms at 8K", _captured_step),
    Prediction(
        "captured verification",
        "17 nodes as a CUDA graph are within 10 % of one node",
        _against_one(17, 0.9, 1.1, "forward", side="ours", mode="captured"),
    ),
    Prediction("floors", "no iteration of a drafter is faster than its floor", _no_draft_beats_its_floor),
)
