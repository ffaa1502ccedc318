"""The picture of `gpu.py`: milliseconds per token of `generate`, of the loop without a draft, and of drafts by tau.

python -m benchmarks.gpu_chart benchmarks/results/gpu.jsonl docs/images/gpu.svg
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.figure_report import STYLES, WIDTH, make_panels, save, style
from benchmarks.gpu_goals import FUSED
from benchmarks.records import of_kind, read_records
from hf_longspec.cli.files import Record
from hf_longspec.cli.measuring import HF, PLAIN

HEIGHT = 3.6
# The target has random weights, whose tau says nothing: iterations are divided by tau that drafts may reach. The most
# that SpecAttn can reach here is 7, the nodes of its chain.
ASSUMED = {"LongSpec": (2, 3, 4), "SpecAttn": (4, 6)}
GREY, BLACK = "#8c8c8c", "black"
MODEL = "Llama-3.1-8B"  # whose sizes `gpu.py` has


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


def finding(records: Sequence[Record], contexts: Sequence[int]) -> str:
    """The title: how much faster the loop without a draft is than `generate`, after each context."""
    ratios = [stock[1] / loop[1] for stock, loop, *_ in (bars(records, context) for context in contexts)]
    times = " and ".join(f"{ratio:.1f}" for ratio in ratios)
    return f"{MODEL} sizes on one {_card(records)}: without a draft {times} times as fast as generate"


def _card(records: Sequence[Record]) -> str:
    """Name of the card, without its memory: `NVIDIA H100`."""
    names = (row["gpu"] for row in of_kind(records, "gpu_ceilings") if "gpu" in row)
    return " ".join(next(names, of_kind(records, "environment")[0]["cpu"]).split()[:2])


def draw(records: Sequence[Record], path: Path) -> None:
    """Write the picture, a panel per context."""
    from matplotlib.patches import Patch

    contexts = sorted({row["context"] for row in of_kind(records, "iteration", batch=1, draft=HF)})
    with style(path):
        figure, axes = make_panels(1, len(contexts), (WIDTH, HEIGHT))
        for place, (axis, context) in enumerate(zip(axes[0], contexts, strict=True)):
            _panel(axis, bars(records, context), f"After {context:,} tokens", with_labels=not place)
        figure.suptitle(finding(records, contexts))
        (facts, *_) = of_kind(records, "environment")
        shape = facts["settings"]["shape"]
        figure.legend(
            handles=[
                Patch(color=GREY, label="measured"),
                Patch(edgecolor=GREY, fill=False, hatch="////", label="computed: measured time of an iteration / tau"),
            ],
            loc="outside lower center",
            ncols=2,
            title=f"{MODEL} sizes ({shape['layers']} layers, width {shape['hidden']:,}), random weights, "
            f"{facts['settings']['dtype']}, batch 1, {_card(records)}",
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
    axis.set(title=title, xlabel="milliseconds per token")


if __name__ == "__main__":
    results, picture = map(Path, sys.argv[1:])
    draw(read_records(results), picture)
