"""The picture of `gpu.py`: milliseconds per token of `generate`, of the loop without a draft, and of drafts by tau.

python -m benchmarks.gpu_chart benchmarks/results/gpu.jsonl docs/images/gpu.svg
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.figure_report import POINTS, STYLES, WIDTH, make_panels, save
from benchmarks.gpu_goals import FUSED
from benchmarks.records import of_kind, read_records
from hf_longspec.cli.files import Record
from hf_longspec.cli.measuring import HF, PLAIN

HEIGHT = 3.1
# The target has random weights, whose tau says nothing: iterations are divided by tau that drafts may reach. The most
# that SpecAttn can reach here is 7, the nodes of its chain.
ASSUMED = {"LongSpec": (2, 3, 4), "SpecAttn": (4, 6)}
GREY, BLACK = "#8c8c8c", "black"


def bars(records: Sequence[Record], context: int) -> list[tuple[str, float, str, bool]]:
    """Return the label, milliseconds per token and colour of each bar, and whether it was measured."""
    rows = {
        (row["draft"].partition(",")[0], row["mode"]): row["ms"]["median"]
        for row in of_kind(records, "iteration", batch=1, context=context)
    }
    return [
        ("generate of transformers", rows[HF, "sdpa"], GREY, True),
        ("no draft", rows[PLAIN, FUSED], BLACK, True),
        *(
            (f"{draft}, if tau is {tau}", rows[draft, FUSED] / tau, STYLES[draft][0], False)
            for draft, taus in ASSUMED.items()
            for tau in taus
        ),
    ]


def draw(records: Sequence[Record], path: Path) -> None:
    """Write the picture, a panel per context."""
    import matplotlib

    contexts = sorted({row["context"] for row in of_kind(records, "iteration", batch=1, draft=HF)})
    with matplotlib.rc_context({"font.size": POINTS, "svg.hashsalt": path.stem}):
        figure, axes = make_panels(1, len(contexts), (WIDTH, HEIGHT))
        for place, (axis, context) in enumerate(zip(axes[0], contexts, strict=True)):
            _panel(axis, bars(records, context), f"After {context:,} tokens", with_labels=not place)
        figure.supxlabel(
            "milliseconds per token; hatched: measured time of an iteration divided by tau", fontsize=POINTS
        )
        save(figure, path)


def _panel(axis: Any, shown: Sequence[tuple[str, float, str, bool]], title: str, with_labels: bool) -> None:
    for place, (_, ms, colour, is_measured) in enumerate(shown):
        fill: dict[str, Any] = (
            {"color": colour} if is_measured else {"edgecolor": colour, "fill": False, "hatch": "////"}
        )
        axis.barh(place, ms, height=0.68, **fill)
        axis.annotate(f"{ms:.1f}", (ms, place), (4, 0), textcoords="offset points", va="center")
    axis.set_yticks(range(len(shown)), [label if with_labels else "" for label, *_ in shown])
    axis.invert_yaxis()
    axis.set_xlim(0, 1.15 * max(ms for _, ms, *_ in shown))
    axis.set(title=title)
    axis.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    results, picture = map(Path, sys.argv[1:])
    draw(read_records(results), picture)
