"""The report and the picture of `benchmarks/figure.py`: tau, cost and speed-up per system, and the papers' claims.

python -m benchmarks.figure_report benchmarks/results/figure.jsonl docs/images/drafts.svg
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from hf_longspec.bench.calls import HF, PLAIN
from hf_longspec.bench.markdown import pivot, plus_minus, table
from hf_longspec.bench.results import Record, of_kind, read_records
from hf_longspec.bench.summaries import FEWEST, mean_interval

NOTE = (
    "tau: tokens per verification, the target's own included; mean over prompts with its 95 % interval. Cost: time of "
    "an iteration in steps of the plain loop. Speed-ups: tokens per second from the first token to the last, over "
    "those of the plain loop and of `generate` after the same prompt in the same turn; means over turns with 95 % "
    "intervals. Prompts were read before; a small model without a window reads its prompt after the first token, which "
    "is part of its cost. Chains have 4 drafted tokens; a tree has 4, 4, 4 and 3 nodes per level. A "
    "greedy text that is not that of `generate` is marked, and has no speed."
)
MODES = {"greedy": "Greedy", "sample": "Sampling at temperature 1"}
SPEEDS = (("cost", "cost"), ("to_plain", "x plain loop"), ("to_generate", "x `generate`"))
TITLES = ("Time of an iteration in plain steps", "Speed-up over the plain loop", "Speed-up over `generate`")
Cell = tuple[str, int, int, str]


def cells(records: Sequence[Record]) -> dict[Cell, dict[int, Record]]:
    """Return the calls by (mode, batch, context, system) and by turn."""
    found: dict[Cell, dict[int, Record]] = {}
    for call in of_kind(records, "call"):
        at = call["mode"], call["batch"], call["context"], call["system"]
        found.setdefault(at, {})[call["turn"]] = call
    return found


def rows(records: Sequence[Record]) -> list[Record]:
    """Return one row per cell: tau, cost and the speed-ups with their intervals."""
    calls, found = cells(records), []
    for (mode, batch, context, system), own in calls.items():
        plain, stock = (calls.get((mode, batch, context, base), {}) for base in (PLAIN, HF))
        wrong = mode == "greedy" and any(own[turn]["text"] != stock[turn]["text"] for turn in own.keys() & stock.keys())
        row: Record = {"mode": mode, "batch": batch, "context": context, "system": system, "wrong": wrong}
        row["tau"] = mean_interval([tau for call in own.values() for tau in call["taus"]], least=1.0)
        row["draft_state_bytes"] = max(call["draft_state_bytes"] for call in own.values())
        if not wrong:
            row["cost"] = _paired(own, plain, lambda call: call["seconds"] * call["batch"] / call["steps"])
            row["to_plain"] = _paired(own, plain, lambda call: call["tokens"] / call["seconds"])
            row["to_generate"] = _paired(own, stock, lambda call: call["tokens"] / call["seconds"])
        found.append(row)
    return found


def _paired(
    own: Mapping[int, Record], base: Mapping[int, Record], value: Callable[[Record], float]
) -> dict[str, float] | None:
    turns = sorted(own.keys() & base.keys())
    return mean_interval([value(own[turn]) / value(base[turn]) for turn in turns], least=0.0) if turns else None


@dataclass(frozen=True)
class Claim:
    """A claim of a paper about tau, as the relative difference between two measurements on the same prompts."""

    text: str  # the claim
    paper: str  # the figure of the paper
    system: str  # the system, at the longest context
    other: str  # what it is compared with, at the longest context too; with itself, at the shortest one
    expected: int  # 1 if `system` has the larger tau by the claim, -1 if the smaller, 0 if neither

    # Largest relative difference that counts as none.
    SAME = 0.05

    def verdict(self, calls: Mapping[Cell, Mapping[int, Record]], mode: str) -> Record | None:
        """Return the difference with its interval, and whether it agrees; `None` if one side was not measured."""
        contexts = sorted({at[2] for at in calls if at[0] == mode and at[1] == 1})
        if not contexts:
            return None
        own = calls.get((mode, 1, contexts[-1], self.system), {})
        base = calls.get((mode, 1, contexts[0 if self.other == self.system else -1], self.other), {})
        turns = sorted(own.keys() & base.keys())
        if len(turns) < FEWEST or own is base:
            return None
        found = mean_interval([own[turn]["taus"][0] / base[turn]["taus"][0] - 1 for turn in turns])
        low, high = found["low"], found["high"]
        agrees = {1: low > 0, -1: high < 0, 0: max(abs(low), abs(high)) <= self.SAME}[self.expected]
        refuted = {1: high < 0, -1: low > 0, 0: low > self.SAME or high < -self.SAME}[self.expected]
        return {"gap": found, "verdict": "agrees" if agrees else "does not agree" if refuted else "cannot be told"}


CLAIMS = (
    Claim("LongSpec: tau does not fall with the context", "flat", "LongSpec", "LongSpec", 0),
    Claim(
        "EAGLE-3 that attends to all of a long context accepts less than with a window",
        "falls beyond its training length",
        "EAGLE-3, all",
        "EAGLE-3, window",
        -1,
    ),
    Claim("EAGLE-3 with a window: tau does not fall with the context", "flat", "EAGLE-3, window", "EAGLE-3, window", 0),
    Claim(
        "MagicDec: a small model with a window accepts more than with a context beyond its training",
        "more",
        "small model, window",
        "small model",
        1,
    ),
    Claim(
        "Anchor-Offset Indices: LongSpec accepts more than a draft trained without them",
        "+4 to +5 %",
        "LongSpec",
        "LongSpec, no offsets",
        1,
    ),
    Claim(
        "Flash Noisy Training: LongSpec accepts more than a draft trained without gaps",
        "+14.7 %",
        "LongSpec",
        "LongSpec, no noise",
        1,
    ),
    Claim(
        "Cross-attention to the target's cache: LongSpec accepts more than a draft without it",
        "more",
        "LongSpec",
        "LongSpec, no cross-attention",
        1,
    ),
    Claim("SpecAttn accepts more than Quest", "more", "SpecAttn", "Quest", 1),
    Claim("SpecAttn accepts more than a window (StreamingLLM)", "more", "SpecAttn", "SpecAttn, window", 1),
    Claim(
        "SpecAttn: a selection by logits accepts more than one by attention weights",
        "6.11 against 5.89 tokens",
        "SpecAttn, logits",
        "SpecAttn",
        1,
    ),
    Claim("Two query rows select as well as all of them", "within 1 %", "SpecAttn", "SpecAttn, all rows", 0),
    Claim(
        "SpecAttn accepts more than a selection by the last accepted token (SpecExtend)",
        "more",
        "SpecAttn",
        "SpecAttn, last accepted",
        1,
    ),
)


def claims(records: Sequence[Record]) -> str:
    """Return a table of the claims that could be compared, one line per mode; nothing if none could."""
    calls = cells(records)
    found = [
        {"claim": claim.text, "paper": claim.paper, "mode": mode, **verdict}
        for claim in CLAIMS
        for mode in MODES
        if (verdict := claim.verdict(calls, mode)) is not None
    ]

    def gap(row: Record) -> str:
        return f"{row['gap']['mean']:+.1%}, {row['gap']['low']:+.1%} to {row['gap']['high']:+.1%}"

    if not found:
        return ""
    columns = {"claim": "claim", "paper": "paper", "mode": "mode", "difference of tau, 95 % interval": gap}
    return table(found, columns | {"verdict": "verdict"})


def headline(records: Sequence[Record]) -> str:
    """Return tau of all systems by context, one table per mode."""
    found = [row for row in rows(records) if row["batch"] == 1 and row["system"] not in (HF, PLAIN)]
    contexts = sorted({row["context"] for row in found})
    names = ["draft", *(f"tau at {context:,}" for context in contexts)]
    names += [f"{label} at {contexts[-1]:,}" for _, label in SPEEDS if contexts]
    parts = []
    for mode, title in MODES.items():
        lines: dict[str, Record] = {}
        for row in found:
            if row["mode"] == mode:
                keys = (("tau", "tau"), *(SPEEDS if row["context"] == contexts[-1] else ()))
                cells = {f"{label} at {row['context']:,}": _shown(row, key) for key, label in keys}
                lines[row["system"]] = lines.get(row["system"], {"draft": row["system"]}) | cells
        if lines:
            parts.append(f"#### {title}\n\n{table(list(lines.values()), {name: name for name in names})}")
    return "\n\n".join(parts)


def _shown(row: Record, key: str) -> str:
    if row["wrong"]:
        return "another text"
    return "" if row.get(key) is None else f"{row[key]['mean']:.2f}{plus_minus(row[key])}"


def summary(records: Sequence[Record]) -> str:
    """Return what documents quote: tau by context, and the claims."""
    found = claims(records)
    return "\n\n".join([headline(records), *([f"#### Claims of the papers\n\n{found}"] if found else [])])


def tables(records: Sequence[Record]) -> list[str]:
    """Return the report: tau, cost and speed by context, throughput of batches, and the claims."""
    found = [row for row in rows(records) if row["system"] not in (HF, PLAIN)]
    parts = [headline(records)] if any(row["batch"] == 1 for row in found) else []
    for (key, _), title in zip(SPEEDS, TITLES, strict=True):
        for mode, mode_title in MODES.items():
            single = [row for row in found if row["batch"] == 1 and row["mode"] == mode]
            if single:
                shown = pivot(single, {"draft": "system"}, "context", "{:,}", lambda row, key=key: _shown(row, key))
                parts.append(f"## {title}. {mode_title}\n\n{shown}")
    large = [row for row in found if row["batch"] > 1]
    columns: dict[str, Any] = {"mode": "mode", "batch": "batch", "context": "context", "draft": "system"}
    for key, label in (("tau", "tau"), *SPEEDS[1:]):
        columns[label] = lambda row, key=key: _shown(row, key)
    if large:
        parts.append(f"## Several rows together\n\n{table(large, columns)}")
    if judged := claims(records):
        parts.append(f"## Claims of the papers\n\n{judged}")
    return parts


# Systems that the picture shows, the table shows all. Colour and dashes are those of the family, for readers who see no
# colour.
STYLES = {
    "LongSpec, tree": ("#1b5e9b", "-"),
    "LongSpec": ("#1b5e9b", "-"),
    "EAGLE-3, window": ("#b3541e", "--"),
    "EAGLE-3, all": ("#b3541e", "--"),
    "small model": ("#2e7d4f", "-."),
    "small model, window": ("#2e7d4f", "-."),
    "TokenSwift": ("#7b3fa0", "-"),
    "SpecAttn": ("#a3243b", ":"),
    "Quest": ("#555555", ":"),
    "n-grams": ("#888888", "-"),
    "Token Recycling": ("#888888", "--"),
    "hf assisted": ("#bbbbbb", "-"),
}


def draw(records: Sequence[Record], path: Path) -> None:
    """Write the picture: tau and the speed-up over the plain loop versus the context, one column of panels per mode."""
    from matplotlib.figure import Figure  # no pyplot: it keeps figures, and may look for a display

    found = [row for row in rows(records) if row["batch"] == 1 and row["system"] in STYLES and not row["wrong"]]
    modes = [mode for mode in MODES if any(row["mode"] == mode for row in found)]
    if not modes:
        return
    figure = Figure(figsize=(7.6 * len(modes), 10), layout="constrained")
    panels = figure.subplots(2, len(modes), squeeze=False)
    for column, mode in enumerate(modes):
        for line, (key, label) in enumerate((("tau", "tau, tokens per verification"), ("to_plain", "x plain loop"))):
            panel = panels[line][column]
            of_mode = [row for row in found if row["mode"] == mode and row.get(key)]
            _panel(panel, of_mode, key)
            panel.set_ylabel(label)
            if line == 0:
                panel.set_title(MODES[mode])
            else:
                panel.hlines(1.0, *panel.get_xticks()[[0, -1]], color="black", linewidth=0.8)  # not through the labels
                panel.set_xlabel("tokens of context")
    figure.savefig(path)


def _panel(panel: Any, found: Sequence[Record], key: str) -> None:
    contexts = sorted({row["context"] for row in found})
    ends = []
    for system, (colour, dashes) in STYLES.items():
        own = sorted((row for row in found if row["system"] == system), key=lambda row: row["context"])
        if not own:
            continue
        places = [row["context"] for row in own]
        panel.plot(places, [row[key]["mean"] for row in own], color=colour, linestyle=dashes, linewidth=1.8)
        band = [row[key]["low"] for row in own], [row[key]["high"] for row in own]
        panel.fill_between(places, *band, color=colour, alpha=0.06, linewidth=0)
        ends.append((own[-1][key]["mean"], system, colour))
    panel.set_xscale("log", base=2)
    panel.set_xticks(contexts, [f"{round(context / 1024)}K" for context in contexts])
    panel.minorticks_off()
    panel.set_ylim(bottom=0)
    panel.set_xlim(contexts[0] / 1.1, contexts[-1] * max(2, (contexts[-1] / contexts[0]) ** 0.55))  # room for labels
    panel.grid(axis="y", alpha=0.25)
    for place, (value, system, colour) in zip(_apart([end[0] for end in ends], panel), ends, strict=True):
        start, text = (contexts[-1], value), (contexts[-1] * 1.18, place)
        line = {"arrowstyle": "-", "color": colour, "linewidth": 0.6, "relpos": (0, 0.5)}  # from the left of a label
        panel.annotate(system, start, text, color=colour, fontsize=10, va="center", arrowprops=line)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)


def _apart(values: Sequence[float], panel: Any) -> list[float]:
    """Return places for labels at these values, moved apart so that they do not overlap."""
    gap = panel.get_ylim()[1] * 0.042
    order = sorted(range(len(values)), key=lambda index: values[index])
    places = list(values)
    for before, index in pairwise(order):
        places[index] = max(places[index], places[before] + gap)
    return places


if __name__ == "__main__":
    results, picture = map(Path, sys.argv[1:])
    draw(read_records(results), picture)
