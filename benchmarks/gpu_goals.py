"""What the kernels and the captured steps should reach on a GPU, and whether a run has reached it.

Every goal is a ratio of measurements of one run, at fixed sizes: other sizes have no goal. The limits were set before
anything was measured, from the floors of `roofline.py` and from counts of launches and bytes. That of P3 came after the
first run: it was a ratio to the attention alone, whose few microseconds are nothing beside an iteration.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hf_longspec.bench.calls import PLAIN
from hf_longspec.bench.report import table
from hf_longspec.bench.results import Record, of_kind

TRITON = "hf_longspec_triton"
HF_ATTENTION = "transformers sdpa, repeated keys and mask"
# How steps run: as they are, captured, with fused kernels and captured, or compiled and captured.
OFF, GRAPH, FUSED, COMPILE = "off", "graph", "fused", "compile"
MODES = (FUSED, GRAPH)  # of captured steps, the default first
NOT_MEASURED = "not measured"


class Sizes(NamedTuple):
    """Sizes at which the goals hold, for a batch of one and a target of 8B parameters."""

    context: int = 32768
    long_context: int = 131072
    few: int = 16  # nodes
    many: int = 64
    drafts: tuple[str, str] = ("LongSpec, 4+16+16+16+11", "SpecAttn, gamma 6")


SIZES = Sizes()


class Rows:
    """The measurements of a run, with steps in one mode."""

    def __init__(self, records: Sequence[Record], sizes: Sizes, mode: str):
        self.records, self.sizes, self.mode = records, sizes, mode

    def value(self, kind: str, field: str, **where: Any) -> float | None:
        """A number of the first row of a kind; the median of a summary; None if there is no such row."""
        row = next(iter(of_kind(self.records, kind, **where)), {})
        value = row.get(field)
        return value["median"] if isinstance(value, dict) else value

    def attention(self, kind: str, field: str, nodes: int, **where: Any) -> float | None:
        """A number of a row about one layer."""
        return self.value(kind, field, batch=1, context=self.sizes.context, nodes=nodes, **where)

    def bandwidth(self, nodes: int) -> float | None:
        """The share of the bandwidth of a copy at which the kernel reads the keys and values of the prefix."""
        read = self.attention("kernel", "tb_per_second", nodes, backend=TRITON)
        return ratio(read, self.value("gpu_ceilings", "tb_per_second"))

    def scores(self) -> float | None:
        """The share of an iteration of SpecAttn in which its verification computes scores, in all layers."""
        milliseconds = (self.attention(kind, "ms", self.sizes.few, backend=TRITON) for kind in ("score_rows", "kernel"))
        scored, alone = milliseconds
        if scored is None or alone is None:
            return None
        layers = of_kind(self.records, "environment")[0]["settings"]["shape"]["layers"]
        return ratio((scored - alone) * layers, self.iteration(self.sizes.drafts[1], self.sizes.context))

    def forward(self, nodes: int) -> float | None:
        """Milliseconds of a captured forward."""
        return self.value("forward", "ms", forward="ours", mode=self.mode, context=self.sizes.context, nodes=nodes)

    def iteration(self, draft: str, context: int, field: str = "ms") -> float | None:
        """Milliseconds of a captured iteration, or another number of it."""
        return self.value("iteration", field, draft=draft, mode=self.mode, batch=1, context=context)

    def over_plain(self, draft: str, context: int) -> float | None:
        """An iteration over a step without a draft."""
        return ratio(self.iteration(draft, context), self.iteration(PLAIN, context))


def ratio(value: float | None, base: float | None) -> float | None:
    """A quotient; None if either number is missing.

    >>> ratio(3.0, 2.0), ratio(None, 2.0)
    (1.5, None)
    """
    return None if value is None or not base else value / base


@dataclass(frozen=True)
class Goal:
    """A ratio that should reach a limit."""

    name: str
    what: Callable[[Sizes], str]
    measured: Callable[[Rows], float | None]
    limit: float
    at_least: bool = False  # otherwise at most

    def judged(self, records: Sequence[Record], sizes: Sizes) -> Record:
        """A row of the table: the ratio in every mode of captured steps; the first one, the default, is judged."""
        found = {mode: self.measured(Rows(records, sizes, mode)) for mode in MODES}
        sign, value = "at least" if self.at_least else "at most", found[MODES[0]]
        row = {"name": self.name, "what": self.what(sizes), "goal": f"{sign} {self.limit:g}", "met": NOT_MEASURED}
        if value is not None:
            row["met"] = "yes" if (value >= self.limit if self.at_least else value <= self.limit) else "NO"
        return row | {mode: NOT_MEASURED if value is None else f"{value:.3f}" for mode, value in found.items()}


GOALS = (
    Goal(
        "P1",
        lambda at: f"bandwidth of the kernel / that of a copy, 1 node after {at.context}",
        lambda rows: rows.bandwidth(1),
        0.8,
        at_least=True,
    ),
    Goal(
        "P1",
        lambda at: f"the same with {at.few} nodes",
        lambda rows: rows.bandwidth(rows.sizes.few),
        0.8,
        at_least=True,
    ),
    Goal(
        "P2",
        lambda at: f"attention of {at.many} nodes / transformers' sdpa with a mask",
        lambda rows: ratio(
            rows.attention("kernel", "ms", rows.sizes.many, backend=TRITON),
            rows.attention("baseline", "ms", rows.sizes.many, baseline=HF_ATTENTION),
        ),
        0.15,
    ),
    Goal(
        "P3",
        lambda at: f"scores of {at.few} nodes in all layers / iteration of {at.drafts[1]}, after {at.context}",
        Rows.scores,
        0.01,
    ),
    Goal(
        "P4",
        lambda at: f"captured forward of {at.few} nodes / of 1 node, after {at.context}",
        lambda rows: ratio(rows.forward(rows.sizes.few), rows.forward(1)),
        1.1,
    ),
    Goal(
        "P5",
        lambda at: f"captured step without a draft / its bandwidth floor, after {at.context}",
        lambda rows: rows.iteration(PLAIN, rows.sizes.context, "times_floor"),
        1.35,
    ),
    Goal(
        "P6",
        lambda at: f"iteration of {at.drafts[0]} / step without a draft, after {at.context}",
        lambda rows: rows.over_plain(rows.sizes.drafts[0], rows.sizes.context),
        1.45,
    ),
    Goal(
        "P7",
        lambda at: f"iteration of {at.drafts[1]} / step without a draft, after {at.long_context}",
        lambda rows: rows.over_plain(rows.sizes.drafts[1], rows.sizes.long_context),
        4.6,
    ),
)


def judged(records: Sequence[Record]) -> str:
    """The table of all goals; a measurement that the run lacks is named as such."""
    rows = [goal.judged(records, SIZES) for goal in GOALS]
    columns = {"": "name", "ratio": "what", "goal": "goal", **{mode: mode for mode in MODES}, "met": "met"}
    return table(rows, columns)
