"""The floors of one target on one machine as rows, and these as Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .report_parts import markdown_table
from .roofline import Iteration, Roofline
from .roofline_shapes import Machine, TargetShape


@dataclass(frozen=True)
class Drafting:
    """Which drafters are put on the roofline.

    Args:
        trees (`Sequence[Sequence[int]]`): Widths of LongSpec's trees.
        gammas (`Sequence[int]`): Drafted tokens of SpecAttn.
        ratio (`float`): Share of the cache that SpecAttn drafts over.
        branching (`list[int]`): TokenSwift's children per node; entry 0 is the target's own prediction.
        budget (`int`): Entries of TokenSwift's partial cache.
    """

    trees: Sequence[Sequence[int]] = ((4, 16, 16, 16, 16), (4, 4, 4, 4))
    gammas: Sequence[int] = (6, 9)
    ratio: float = 0.07
    branching: Sequence[int] = (1, 3, 3, 3)
    budget: int = 4096

    def iterations(self, roofline: Roofline) -> list[Iteration]:
        """Every drafter at one point."""
        branching = list(self.branching)
        return [
            *(roofline.longspec(list(widths)) for widths in self.trees),
            *(roofline.specattn(gamma, self.ratio) for gamma in self.gammas),
            roofline.tokenswift(branching, budget=self.budget),
            roofline.tokenswift(branching, budget=None),
        ]


def roofline_rows(
    shape: TargetShape,
    machine: Machine,
    points: Sequence[tuple[int, int]],
    nodes: Sequence[int],
    drafting: Drafting,
    **options: Any,
) -> list[dict[str, Any]]:
    """One row per point `(batch, context)`; `options` are those of [`Roofline`].

    Returns:
        `list[dict]`, ready for JSON: times in milliseconds, sizes in bytes.
    """
    rows = []
    for batch, context in points:
        at = Roofline(shape, machine, batch, context, **options)
        rows.append(
            {
                "target": shape.name,
                "machine": machine.name,
                "tb_per_second": machine.tb_per_second,
                "tflops": machine.tflops,
                "batch": batch,
                "context": context,
                "fits": at.fits,
                "weight_bytes_read": shape.weights_read(batch) * at.weight_bytes,
                "kv_bytes_per_token": at.kv_bytes_per_token,
                "ar_ms": at.ar_ms,
                "verify_ms": {str(count): at.verify_ms(count) for count in nodes},
                "masked_verify_ms": {str(count): at.masked_verify_ms(count) for count in nodes},
                "iterations": [iteration.to_dict() for iteration in drafting.iterations(at)],
            }
        )
    return rows


def roofline_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Two tables: a step and a verification, then the drafters."""
    first = rows[0]
    facts = (
        f"Floors, computed and not measured: {first['target']} on {first['machine']} "
        f"({first['tb_per_second']:g} TB/s, {first['tflops']:g} TFLOP/s). A forward of one token reads "
        f"{first['weight_bytes_read'] / 1e9:.2f} GB of weights; keys and values take "
        f"{first['kv_bytes_per_token'] / 1024:g} KiB per token. A verification in brackets repeats the keys and values "
        "of every group, as transformers does under a mask."
    )
    return "\n\n".join([facts, _steps(rows), _drafters(rows)])


def _steps(rows: Sequence[dict[str, Any]]) -> str:
    header = ["batch", "context", "step, ms", *(f"verify {count}, ms" for count in rows[0]["verify_ms"])]
    lines = [
        [
            *_place(row),
            f"{row['ar_ms']:.2f}",
            *(f"{ms:.2f} ({row['masked_verify_ms'][count]:.2f})" for count, ms in row["verify_ms"].items()),
        ]
        for row in rows
    ]
    return markdown_table(header, lines)


def _drafters(rows: Sequence[dict[str, Any]]) -> str:
    header = [
        "batch",
        "context",
        "drafter",
        "draft, ms",
        "verify, ms",
        "iteration, ms",
        "c",
        "break-even tau",
        "at most",
    ]
    lines = [
        [
            *_place(row),
            found["drafter"],
            *(f"{found[name]:.2f}" for name in ("draft_ms", "verify_ms", "iteration_ms")),
            f"{found['c']:.3f}",
            f"{found['break_even_tau']:.2f}",
            f"{found['max_speedup']:.2f}x (tau {found['max_tau']})",
        ]
        for row in rows
        for found in row["iterations"]
    ]
    return markdown_table(header, lines)


def _place(row: dict[str, Any]) -> list[str]:
    return [str(row["batch"]), f"{row['context']}" + ("" if row["fits"] else " (does not fit)")]
