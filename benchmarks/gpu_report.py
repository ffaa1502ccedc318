"""The report of a GPU run, and the predictions that were made before any GPU ran.

The predictions are for a Llama-3.1-8B shape in bfloat16 on an H200. They are written before the first measurement and
judged at the end. On another machine they are judged all the same; on the tiny shape they mean nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.parts import report_page
from hf_longspec.bench.calls import PLAIN
from hf_longspec.bench.markdown import markdown_table, range_of
from hf_longspec.bench.results import Record, of_kind

HEADLINE = "On a GPU"
NOTE = (
    "Milliseconds, median of the repeats with the lowest and highest. The target has random weights, keys and "
    "values. Floors are computed from the ceilings measured in the same run. Error: relative, of "
    "attention against float64, of a forward against transformers' logits. c: time of a step without a draft over "
    "that of an iteration; c times the tau of a paper is what that tau would give here, not a measured speed-up. "
    "Timed by: graph (replay of a CUDA graph), events (calls between CUDA events, launches included), wall (host "
    "clock)."
)


# For each kind of line: title, and the columns in addition to time and floor.
TABLES = {
    "forward": ("One forward of the target", ("side", "backend", "mode", "batch", "context", "nodes", "error")),
    "iteration": (
        "One iteration of a drafter",
        ("draft", "compiled", "batch", "context", "nodes", "c", "c_floor", "tau_of_paper", "c_times_tau"),
    ),
    "kernel": ("Attention of one layer", ("backend", "batch", "context", "nodes", "tb_per_second", "error")),
    "baseline": ("Other ways to compute it", ("baseline", "batch", "context", "nodes", "error")),
    "score_rows": ("With SpecAttn's score rows", ("backend", "batch", "context", "nodes", "overhead")),
    "commit": ("Commit of an accepted path, all layers", ("nodes", "context")),
    "batch": ("Larger batches", ("backend", "batch", "context", "nodes")),
    "fp8": ("Matrix products in FP8", ("backend", "batch", "context", "nodes")),
}


def gpu_headline(records: Sequence[Record]) -> str:
    """Forwards and iterations."""
    return "\n\n".join(part for kind in ("forward", "iteration") for part in _table(records, kind, "####"))


def gpu_report(records: Sequence[Record]) -> str:
    """Everything that was measured, refused and left out."""
    parts = [*_ceilings(records), *_predictions(records)]
    parts += [part for kind in TABLES for part in _table(records, kind)]
    parts += [*_correctness(records), *_profiles(records), *_failed(records)]
    return report_page("GPU", NOTE, parts, records)


def _ceilings(records: Sequence[Record]) -> list[str]:
    return [
        f"{found.get('gpu', found['device'])}: {found['tb_per_second']} TB/s copied, {found['tflops']} TFLOP/s in "
        f"bfloat16 matrix products, measured in this run; CUDA {found['cuda']}, triton {found['triton']}."
        for found in of_kind(records, "gpu_ceilings")
    ]


def _predictions(records: Sequence[Record]) -> list[str]:
    outcomes = {record["name"]: record for record in of_kind(records, "outcome")}
    rows = []
    for predicted in of_kind(records, "prediction"):
        found = outcomes.get(predicted["name"], {"holds": None, "values": []})
        verdict = {True: "held", False: "did not hold", None: "not measured"}[found["holds"]]
        rows.append(
            [predicted["name"], predicted["text"], verdict, ", ".join(f"{value:g}" for value in found["values"])]
        )
    return ["## Predictions", markdown_table(["", "predicted", "outcome", "measured"], rows)] if rows else []


def _table(records: Sequence[Record], kind: str, heading: str = "##") -> list[str]:
    title, columns = TABLES[kind]
    rows = [
        [*(_cell(record.get(name)) for name in columns), *_times(record), record["how"]]
        for record in of_kind(records, kind)
    ]
    if not rows:
        return []
    return [f"{heading} {title}", markdown_table([*columns, "ms", "floor, ms", "times floor", "timed by"], rows)]


def _times(record: Record) -> list[str]:
    return [range_of(record["ms"], 3), f"{record['floor_ms']:g}", _cell(record["times_floor"])]


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _correctness(records: Sequence[Record]) -> list[str]:
    rows = []
    for name in dict.fromkeys(record["backend"] for record in of_kind(records, "correctness")):
        own = [record for record in of_kind(records, "correctness") if record["backend"] == name]
        wrong = [f"{record['lengths']} x {record['nodes']}: {record['error']}" for record in own if not record["right"]]
        rows.append([name, str(len(own)), "; ".join(wrong) or "none"])
    return ["## Against float64", markdown_table(["backend", "cases", "wrong"], rows)] if rows else []


def _profiles(records: Sequence[Record]) -> list[str]:
    parts = []
    for found in of_kind(records, "profile"):
        rows = [[top["name"], str(top["calls"]), f"{top['ms']:g}"] for top in found["top"]]
        what = f"{found['nodes']} nodes after {found['context']}, {found['launches']} launches"
        parts += [f"## Profile of {found['side']}: {what}", markdown_table(["operation", "calls", "ms"], rows)]
    return parts


def _failed(records: Sequence[Record]) -> list[str]:
    lines = [
        f"- {', '.join(f'{name}={value}' for name, value in record.items() if name not in ('kind', 'reason'))}: "
        f"{record['reason']}"
        for record in of_kind(records, "failed")
    ]
    return ["Failed:\n\n" + "\n".join(lines)] if lines else []


SHORT, MIDDLE = 8192, 32768
Judgement = tuple[float, bool]


@dataclass(frozen=True)
class Prediction:
    """One statement about the lines of a run.

    Args:
        name (`str`): Short.
        text (`str`): The expectation in words.
        judge (`Callable`): Takes the lines and yields `(value, holds)` for everything the statement is about.
    """

    name: str
    text: str
    judge: Callable[[Sequence[Record]], Iterator[Judgement]]

    def outcome(self, records: Sequence[Record]) -> Record:
        """The outcome: measured values, and whether all of them are as expected."""
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
    Prediction("prefix bandwidth", "one node after 32K: at least 3 TB/s and under 1.4 times the floor", _bandwidth),
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
