"""What the kernels and the captured steps should reach on a GPU, and whether a run has reached it.

Every goal is a ratio of measurements of one run, at fixed sizes: other sizes have no goal. The limits were set before
anything was measured, from the floors of `roofline.py` and from counts of launches and bytes. That of P3 came after the
first run: it was a ratio to the attention alone, whose few microseconds are nothing beside an iteration.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks import read_yaml
from benchmarks.records import of_kind
from benchmarks.report import table
from hf_longspec.cli.files import Record
from hf_longspec.cli.measuring import PLAIN

SUITE = read_yaml("suites/gpu.yaml")
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
    one: int = 1


SIZES = Sizes()


@dataclass
class Measurements:
    """The measurements of a run, with steps in one mode. A ratio is None if one of its measurements is missing."""

    records: Sequence[Record]
    sizes: Sizes
    mode: str

    def value(self, kind: str, field: str, **where: Any) -> float | None:
        """A number of the first row of a kind; the median of a summary; None if there is no such row."""
        row = next(iter(of_kind(self.records, kind, **where)), {})
        value = row.get(field)
        return value["median"] if isinstance(value, dict) else value

    def _attention(self, kind: str, nodes: int, field: str = "ms", **where: Any) -> float | None:
        return self.value(kind, field, batch=1, context=self.sizes.context, nodes=nodes, **where)

    def _forward(self, nodes: int) -> float | None:
        where = {"mode": self.mode, "context": self.sizes.context, "nodes": nodes}
        return self.value("forward", "ms", forward="ours", **where)

    def _iteration(self, draft: str, context: int, field: str = "ms") -> float | None:
        return self.value("iteration", field, draft=draft, mode=self.mode, batch=1, context=context)

    def bandwidth(self, nodes: int) -> float | None:
        """The share of the bandwidth of the memory at which the kernel reads the keys and values of the prefix."""
        read = self._attention("kernel", nodes, "tb_per_second", backend=TRITON)
        return ratio(read, self.value("gpu_ceilings", "tb_per_second"))

    def over_sdpa(self, nodes: int) -> float | None:
        base = self._attention("baseline", nodes, baseline=HF_ATTENTION)
        return ratio(self._attention("kernel", nodes, backend=TRITON), base)

    def scores(self, nodes: int) -> float | None:
        """The share of an iteration of SpecAttn in which its verification computes scores, in all layers."""
        scored, alone = (self._attention(kind, nodes, backend=TRITON) for kind in ("score_rows", "kernel"))
        if scored is None or alone is None:
            return None
        layers = of_kind(self.records, "environment")[0]["settings"]["shape"]["layers"]
        return ratio((scored - alone) * layers, self._iteration(self.sizes.drafts[1], self.sizes.context))

    def over_one_node(self, nodes: int) -> float | None:
        return ratio(self._forward(nodes), self._forward(1))

    def over_floor(self) -> float | None:
        return self._iteration(PLAIN, self.sizes.context, "times_floor")

    def over_plain(self, draft: int, context: int) -> float | None:
        """An iteration of one of the drafts over a step without a draft."""
        return ratio(self._iteration(self.sizes.drafts[draft], context), self._iteration(PLAIN, context))


def ratio(value: float | None, base: float | None) -> float | None:
    """A quotient; None if either number is missing.

    >>> ratio(3.0, 2.0), ratio(None, 2.0)
    (1.5, None)
    """
    return None if value is None or not base else value / base


GOALS: list[Record] = SUITE["goals"]


def _row(goal: Record, records: Sequence[Record], sizes: Sizes) -> Record:
    """A row of the table: the ratio in every mode of captured steps; the first one, the default, is judged."""
    (method, *names), limit, at_least = goal["measured"], goal["limit"], goal.get("at_least", False)
    arguments = [getattr(sizes, name) if isinstance(name, str) else name for name in names]
    found = {mode: getattr(Measurements(records, sizes, mode), method)(*arguments) for mode in MODES}
    row = {"": goal["name"], "ratio": goal["what"].format(**sizes._asdict())}
    row["goal"] = f"{'at least' if at_least else 'at most'} {limit:g}"
    row |= {mode: NOT_MEASURED if value is None else f"{value:.3f}" for mode, value in found.items()}
    if (value := found[MODES[0]]) is None:
        return row | {"met": NOT_MEASURED}
    return row | {"met": "yes" if (value >= limit if at_least else value <= limit) else "NO"}


def judged(records: Sequence[Record]) -> str:
    """The table of all goals; a measurement that the run lacks is named as such."""
    return table([_row(goal, records, SIZES) for goal in GOALS])
