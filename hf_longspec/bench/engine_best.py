"""Of every kind of method that `engine.py` measured, the setting that was fastest."""

from collections.abc import Sequence

from .engine import COMPILED, HF
from .report_parts import of_kind
from .results import Record

Cell = tuple[str, int, int, str]


def kind_of(method: str) -> str:
    """A method without its settings.

    >>> kind_of("LongSpec, 1+1, compiled")
    'LongSpec, compiled'
    """
    return method.split(",")[0] + (COMPILED if method.endswith(COMPILED) else "")


def kinds_of(records: Sequence[Record]) -> list[str]:
    """Every kind but plain `generate`, in the order of the file."""
    return list(dict.fromkeys(kind_of(row["method"]) for row in of_kind(records, "decoding") if row["method"] != HF))


def best_of_cells(records: Sequence[Record]) -> dict[Cell, dict[str, Record]]:
    """For each (dtype, context, batch, mode) the fastest record of every kind, plain `generate` included.

    Fastest is what has the largest ratio to the plain loop, which is taken within a repeat.
    """
    cells: dict[Cell, dict[str, Record]] = {}
    for row in of_kind(records, "decoding"):
        best = cells.setdefault((row["dtype"], row["context"], row["batch"], row["mode"]), {})
        kind = kind_of(row["method"])
        if kind not in best or row["ratio_to_plain"]["median"] > best[kind]["ratio_to_plain"]["median"]:
            best[kind] = row
    return cells
