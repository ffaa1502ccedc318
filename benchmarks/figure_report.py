"""The report and the pictures of `benchmarks/figure.py`: tau, cost and speed-up per system, goals, the papers' claims.

python -m benchmarks.figure_report benchmarks/results/figure.jsonl docs/images/drafts.svg
"""

import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

from benchmarks import read_yaml
from benchmarks.acceptance_card import FEWEST, estimate
from benchmarks.records import of_kind, read_records
from benchmarks.report import mean_interval, pivot, table
from hf_longspec.cli.files import Record
from hf_longspec.cli.measuring import HF, PLAIN

SUITE = read_yaml("suites/figure.yaml")
MODES = {"greedy": "Greedy", "sample": "Sampling at temperature 1"}
SPEEDS = {"cost": "cost", "to_plain": "x plain loop", "to_generate": "x `generate`"}
TITLES = ("Time of an iteration in plain steps", "Speed-up over the plain loop", "Speed-up over `generate`")
PHASES = ("draft", "verify", "rest")
# Each ratio within a turn: numerator, denominator, and the system of the denominator.
RATIOS = {
    "cost": ("step", "step", PLAIN),
    "to_plain": ("speed", "speed", PLAIN),
    "to_generate": ("speed", "speed", HF),
    **{phase: (phase, "step", PLAIN) for phase in PHASES},
}
CELL = ["dtype", "mode", "batch", "context"]

METHODS: dict[str, list[str]] = SUITE["methods"]
# All settings of drafts; further systems are variants for comparisons and methods of transformers.
SHIPPED = list(chain.from_iterable(METHODS.values()))


def calls_of(records: Sequence[Record]) -> Any:
    """Return a frame with one line per call: its place, its taus, and the seconds of an iteration and of its phases."""
    import pandas as pd

    calls = pd.DataFrame([{"dtype": "float32", "shares": {}} | call for call in of_kind(records, "call")])
    if calls.empty:
        return calls
    calls["tau"] = [taus[0] for taus in calls.taus]
    calls["step"] = calls.seconds * calls.batch / calls.steps
    calls["speed"] = calls.tokens / calls.seconds
    for phase in PHASES:
        calls[phase] = calls.step * [shares.get(phase, math.nan) for shares in calls.shares]
    return calls


def rows(records: Sequence[Record]) -> list[Record]:
    """Return one row per cell and system: tau, cost and its phases, and the speed-ups, with their intervals.

    The loop without a draft comes first in its cell. The system `generate` has no row.
    """
    calls, entries = calls_of(records), []
    if calls.empty:
        return []
    wide = {
        name: calls.pivot(index=[*CELL, "turn"], columns="system", values=name)
        for name in ("step", "speed", "text", *PHASES)
    }
    ratios = {
        name: wide[above].div(wide[below].get(base, math.nan), axis=0) for name, (above, below, base) in RATIOS.items()
    }
    for (*at, system), group in calls.groupby([*CELL, "system"], sort=False):
        row: Record = dict(zip(CELL, at, strict=True)) | {"system": system}
        if system == HF:
            continue
        row["tau"] = mean_interval(list(group.taus.explode()))
        row["ms"] = mean_interval(list(group.step * 1e3))
        texts = wide["text"].loc[tuple(at)]
        row["wrong"] = (
            row["mode"] == "greedy"
            and row["dtype"] == "float32"
            and HF in texts
            and bool((texts[system] != texts[HF])[texts[[system, HF]].notna().all(axis=1)].any())
        )
        for name, ratio in {} if row["wrong"] else ratios.items():
            if values := list(ratio.loc[tuple(at), system].dropna()):
                row[name] = mean_interval(values)
        entries.append(row)
    return sorted(entries, key=lambda row: row["system"] != PLAIN)


def ratio_interval(logs: Sequence[float]) -> dict[str, float]:
    """Geometric mean of ratios, given by their logarithms, with Student's 95 % interval, which is not symmetric."""
    return {name: value if name == "count" else math.exp(value) for name, value in mean_interval(logs).items()}


def holm(values: Sequence[float]) -> list[float]:
    """Return p-values of several tests, corrected for their number: the chance of any error stays below the level.

    >>> holm([0.01, 0.5, 0.02])
    [0.03, 0.5, 0.04]
    """
    order = sorted(range(len(values)), key=lambda index: values[index])
    raised = accumulate((min(1.0, (len(values) - rank) * values[index]) for rank, index in enumerate(order)), max)
    corrected = dict(zip(order, raised, strict=True))
    return [corrected[index] for index in range(len(values))]


def name_of(row: Record) -> str:
    return "no draft" if row["system"] == PLAIN else str(row["system"])


def _shown(row: Record, key: str) -> str:
    if row["wrong"] and key != "tau":
        return "another text"
    return estimate(row[key]) if key in row else ""


def fastest(entries: Iterable[Record], systems: Sequence[str]) -> Record | None:
    """Return the row of the fastest draft among these systems."""
    candidates = [row for row in entries if row["system"] in systems and "to_plain" in row]
    return max(candidates, key=lambda row: row["to_plain"]["mean"], default=None)


def at_longest(entries: Sequence[Record], mode: str) -> list[Record]:
    """Return the rows of one mode after the longest context, of single prompts in float32."""
    single = [row for row in entries if row["mode"] == mode and row["batch"] == 1 and row["dtype"] == "float32"]
    return [row for row in single if row["context"] == max(row["context"] for row in single)]


def headline(entries: Sequence[Record], dtype: str = "float32", heading: str = "####") -> str:
    """Return tau by context and the speeds after the longest one, one table per mode."""
    entries = [row for row in entries if row["batch"] == 1 and row["dtype"] == dtype]
    contexts = sorted({row["context"] for row in entries})
    parts = []
    for mode, title in MODES.items():
        lines: dict[str, Record] = {}
        for row in entries:
            if row["mode"] == mode:
                cells = {f"tau at {row['context']:,}": _shown(row, "tau")}
                if row["context"] == contexts[-1]:
                    cells |= {f"{label} at {contexts[-1]:,}": _shown(row, key) for key, label in SPEEDS.items()}
                lines[row["system"]] = lines.get(row["system"], {"draft": name_of(row)}) | cells
        if lines:
            names = ["draft", *(f"tau at {context:,}" for context in contexts)]
            names += [f"{label} at {contexts[-1]:,}" for label in SPEEDS.values()]
            parts.append(f"{heading} {title}\n\n{table(list(lines.values()), {name: name for name in names})}")
    return "\n\n".join(parts)


def taus_of(records: Sequence[Record]) -> Any:
    """Return log tau of single prompts in float32: lines by mode and turn, columns by system and context."""
    import numpy as np

    calls = calls_of(records)
    if calls.empty:
        return calls
    single = calls[(calls.batch == 1) & (calls.dtype == "float32")]
    taus = single.pivot(index=["mode", "turn"], columns=["system", "context"], values="tau").sort_index(axis=1)
    return np.log(taus)


@dataclass(frozen=True)
class Claim:
    """A claim of a paper: the ratio of two taus on the same prompts, all lengths together, is larger than `least`."""

    text: str
    paper: str  # what the paper reports
    system: str
    other: str | None = None  # what it is compared with; by default itself, the longest text with the shortest
    least: float = 1.0

    def log_ratios(self, taus: Any, mode: str) -> list[float]:
        """Return one log-ratio per prompt that was measured at all lengths.

        Two systems are compared by the mean over lengths. One system is compared with itself by the slope of a line
        through its log tau over the logarithm of the length, times the range of the latter.
        """
        import numpy as np

        if mode not in taus.index or not {self.system, self.other or self.system} <= set(taus.columns.levels[0]):
            return []
        system = taus.loc[mode][self.system]
        if self.other is not None:
            return list((system - taus.loc[mode][self.other]).dropna(axis=1, how="all").dropna().mean(axis=1))
        system, lengths = system.dropna(), np.log(system.columns.to_numpy(dtype=float))
        return list(np.polyfit(lengths, system.T, 1)[0] * np.ptp(lengths)) if len(lengths) > 1 and len(system) else []


CLAIMS = [Claim(**claim) for claim in SUITE["claims"]]
CLAIMS_NOTE = (
    "Differences of tau are ratios for the same prompt, as geometric means over all lengths. A change with the context "
    "is that of a line fitted through all lengths. Variants of LongSpec's draft are compared with the whole recipe "
    "on as many tokens. Each row is one t-test. p is corrected for the number of tests by Holm's method; the "
    "significance level is 0.05. Intervals are not corrected."
)


def claims(records: Sequence[Record]) -> str:
    """Return a table of the claims that could be compared, one line per mode; nothing if none could."""
    from scipy.stats import ttest_1samp

    taus, verdicts = taus_of(records), []
    samples = [(claim, mode, claim.log_ratios(taus, mode)) for claim in CLAIMS for mode in MODES if len(taus)]
    samples = [(claim, mode, logs) for claim, mode, logs in samples if len(logs) >= FEWEST]
    tests = [float(ttest_1samp(logs, math.log(claim.least)).pvalue) for claim, _, logs in samples]
    # equal values, as of a draft with itself, have no p: they tell nothing
    for (claim, mode, logs), p in zip(samples, holm([1.0 if math.isnan(p) else p for p in tests]), strict=True):
        ratio = ratio_interval(logs)
        verdict = "not significant" if p >= 0.05 else "agrees" if ratio["mean"] > claim.least else "does not agree"
        verdicts.append({"claim": claim, "mode": mode, "ratio": ratio, "p": p, "verdict": verdict})
    columns = {
        "claim": lambda row: row["claim"].text,
        "paper": lambda row: row["claim"].paper,
        "mode": "mode",
        "difference of tau": lambda row: estimate(row["ratio"], "+.1%", minus=1.0),
        "p, corrected": lambda row: "< 0.001" if row["p"] < 1e-3 else f"{row['p']:.3f}",
        "verdict": "verdict",
    }
    return f"{table(verdicts, columns)}\n\n{CLAIMS_NOTE}" if verdicts else ""


GOALS = SUITE["goals"]


def goals(records: Sequence[Record], entries: Sequence[Record]) -> str:
    """Return a table of goals and measurements; nothing without measurements.

    Args:
        entries (`Sequence[Record]`): From [`rows`].
    """
    taus, lines = taus_of(records), []

    def add(goal: str, mode: str, least: float, value: Record, system: str = "") -> None:
        text = estimate(value) + (f" ({system})" if system else "")
        met = "yes" if value["mean"] >= least else "no"
        lines.append({"goal": goal, "mode": mode, "at least": f"{least:g}", "measured": text, "met": met})

    for method, leasts in GOALS["speed"].items():
        for mode, least in zip(MODES, leasts, strict=True):
            if best := fastest(at_longest(entries, mode), METHODS.get(method, SHIPPED)):
                goal = f"{method or 'the fastest draft'}: x plain loop at {best['context']:,}"
                add(goal, mode, least, best["to_plain"], best["system"])
    for mode in MODES:
        longspec = taus.loc[mode].get("LongSpec") if len(taus) and mode in taus.index else None
        if longspec is None or len(longspec.columns) < 2:
            continue
        first, last = longspec.columns[0], longspec.columns[-1]
        change = (longspec[last] - longspec[first]).dropna()
        add(f"LongSpec: tau at {last:,} over tau at {first:,}", mode, GOALS["tau"], ratio_interval(list(change)))
        whole, without = taus.loc[mode].get("LongSpec, a third"), taus.loc[mode].get("LongSpec, no cross-attention")
        if whole is None or without is None:
            continue
        gains = (whole - without).loc[:, lambda gains: gains.columns >= GOALS["long"]]
        goal = "LongSpec: tau with cross-attention over tau without"
        for context in gains.columns:
            add(f"{goal} at {context:,}", mode, 1.0, ratio_interval(list(gains[context].dropna())))
        if len(gains.columns) > 1:
            together = gains.dropna().mean(axis=1)
            add(f"{goal} from {GOALS['long']:,} on, all lengths together", mode, 1.0, ratio_interval(list(together)))
    return table(lines) if lines else ""


def fill(records: Sequence[Record], text: str) -> str:
    """Write the speeds on the processor into a table that names the class of a draft in each line.

    They are those of the fastest system of the class after the longest context, greedy unless the heading of a column
    says "sampled", over `generate` or over no draft.
    """
    entries = rows(records)

    def cell(kind: str, heading: str) -> str | None:
        key = next((key for end, key in FILLED.items() if heading.startswith("CPU") and heading.endswith(end)), None)
        if key is None:
            return None
        at = at_longest(entries, "sample" if "sampled" in heading else "greedy")
        systems = [PLAIN] if kind == "Plain" else METHODS[CLASSES.get(kind, kind)]
        best = fastest(at, systems)
        return _shown(best, key) if best else ""

    return fill_table(text, cell)


FILLED = {"x `generate`": "to_generate", "x no draft": "to_plain"}


def fill_table(text: str, cell: Callable[[str, str], str | None]) -> str:
    """Write `cell(kind, heading)` into each line of a table that names a `kind` of DraftModel; `None` keeps a cell."""
    lines = text.strip().split("\n")
    headings = [part.strip() for part in lines[0].split("|")]
    for place, line in enumerate(lines):
        if match := re.search(r"`(\w+)DraftModel`", line):
            values = [cell(match[1], heading) for heading in headings]
            cells = zip(line.split("|"), values, strict=True)
            lines[place] = "|".join(old if new is None else f" {new} " for old, new in cells)
    return "\n".join(lines)


# Methods by the class of their drafts, where they have other names.
CLASSES = {"Eagle3": "EAGLE-3", "Ngram": "n-grams", "Assistant": "small model", "TokenRecycling": "Token Recycling"}


PART_NOTE = (
    "tau: tokens per verification, greedy. Cost: the time of an iteration divided by that of a step without a draft. A "
    "draft is faster than no draft if its tau is above its cost. x no draft: speed relative to this package without a "
    "draft; sampled: at temperature 1."
)


def part(records: Sequence[Record], name: str) -> str:
    """Return tau, cost and speed of no draft and of the systems whose names begin with `name`, in one table.

    tau is greedy, after the shortest and the longest context; cost and speed are those after the longest.
    """
    entries = [row for row in rows(records) if row["system"] == PLAIN or row["system"].startswith(name)]
    entries = [row for row in entries if row["batch"] == 1 and row["dtype"] == "float32"]
    first, last = (limit(row["context"] for row in entries) for limit in (min, max))
    columns = [("tau", "tau", first), ("tau", "tau", last), ("cost", "cost", last), ("to_plain", "x no draft", last)]
    lines: dict[str, Record] = {}
    for row in entries:
        line = lines.setdefault(row["system"], {"draft": name_of(row)})
        for key, label, context in columns:
            if row["context"] == context and (row["mode"] == "greedy" or key == "to_plain"):
                sampled = ", sampled" if row["mode"] == "sample" else ""
                line[f"{label} at {context:,}{sampled}"] = _shown(row, key)
    names = ["draft", *(f"{label} at {context:,}" for _, label, context in columns)]
    names.append(f"{names[-1]}, sampled")
    return f"{table(list(lines.values()), {name: name for name in names})}\n\n{PART_NOTE}"


def summary(records: Sequence[Record]) -> str:
    """Return what documents quote: tau by context, the goals and the claims."""
    entries = rows(records)
    return "\n\n".join([headline(entries), *_judged(records, entries, "####")])


def _judged(records: Sequence[Record], entries: Sequence[Record], heading: str) -> list[str]:
    sections = {"Goals": goals(records, entries), "Claims of the papers": claims(records)}
    return [f"{heading} {title}\n\n{text}" for title, text in sections.items() if text]


def tables(records: Sequence[Record]) -> list[str]:
    """Return the report: tau, cost and speed by context, phases of an iteration, batches, goals and claims."""
    entries = rows(records)
    single = [row for row in entries if row["batch"] == 1 and row["dtype"] == "float32"]
    parts = [headline(single)] if single else []
    parts += _judged(records, entries, "##")
    for key, title in zip(SPEEDS, TITLES, strict=True):
        parts += _by_context(single, title, lambda row, key=key: _shown(row, key))
    timed = [row for row in single if all(phase in row for phase in PHASES)]
    title = "Draft, verification and rest of an iteration, in plain steps"
    parts += _by_context(timed, title, lambda row: " + ".join(f"{row[phase]['mean']:.2f}" for phase in PHASES))
    parts += _by_context(single, "Milliseconds of an iteration", lambda row: estimate(row["ms"]))
    if reduced := headline(entries, "bfloat16", "###"):
        parts.append(f"## bfloat16\n\n{reduced}")
    columns: dict[str, Any] = {"mode": "mode", "batch": "batch", "context": "context", "draft": name_of}
    for key, label in {"tau": "tau", **SPEEDS}.items():
        columns[label] = lambda row, key=key: _shown(row, key)
    if large := [row for row in entries if row["batch"] > 1]:
        place = {system: number for number, system in enumerate(dict.fromkeys(row["system"] for row in entries))}
        large.sort(key=lambda row: (list(MODES).index(row["mode"]), row["batch"], row["context"], place[row["system"]]))
        parts.append(f"## Several rows together\n\n{table(large, columns)}")
    return parts


def _by_context(entries: Sequence[Record], title: str, cell: Any) -> list[str]:
    by_mode = {mode: [row for row in entries if row["mode"] == mode] for mode in MODES}
    return [
        f"## {title}. {MODES[mode]}\n\n{pivot(group, {'draft': name_of}, 'context', '{:,}', cell)}"
        for mode, group in by_mode.items()
        if group
    ]


PICTURES = SUITE["pictures"]
# Colour and dashes of a curve, which matplotlib takes as tuples.
STYLES, OTHERS = (
    {
        name: (colour, (dashes[0], tuple(dashes[1])) if isinstance(dashes, list) else dashes)
        for name, (colour, dashes) in styles
    }
    for styles in (PICTURES["styles"].items(), enumerate(PICTURES["others"]))
)
NO_DRAFT: tuple[str, Any] = ("black", (0, (1, 1.2)))
AXES = {"tau": "tau, tokens per verification", "to_generate": "speed, times that of generate"}
# Inches, at 100 pixels each. All else that pictures have in common is in the style file.
WIDTH, PANEL_HEIGHT = 8.0, 2.9
STYLE = Path(__file__).with_name("pictures.mplstyle")
Panel = tuple[str, str, str, dict[str, tuple[str, Any]]]  # title, mode, quantity, style of each system


def draw(records: Sequence[Record], path: Path) -> None:
    """Write the pictures: the fastest setting of each method, and for each mode, in files of their own, all settings.

    Args:
        path (`Path`): The first picture. The others have the same name with `-settings-greedy` or `-settings-sample`.
    """
    entries = [row for row in rows(records) if row["batch"] == 1 and row["dtype"] == "float32" and not row["wrong"]]
    systems = {row["system"] for row in entries}
    best, modes = {}, [mode for mode in MODES if any(row["mode"] == mode for row in entries)]
    for mode in modes:
        rank = {method: fastest(at_longest(entries, mode), METHODS[method]) for method in STYLES}
        best[mode] = {row["system"]: STYLES[method] for method, row in rank.items() if row}
        panels: list[list[Panel]] = [
            [(title, mode, key, styles_of(subset)) for key in AXES]
            for title, names in PICTURES["settings"].items()
            if (subset := [name for name in chain(*map(_members, names)) if name in systems])
        ]
        place = path.with_stem(f"{path.stem}-settings-{mode}")
        _draw(entries, panels, place, finding(entries, [mode]), caption(records))
    if modes:
        panels = [[(MODES[mode], mode, key, best[mode]) for mode in modes] for key in AXES]
        _draw(entries, panels, path, finding(entries, modes), caption(records))


def finding(entries: Sequence[Record], modes: Sequence[str]) -> str:
    """The title of a picture: the fastest draft after the longest context."""
    lines = []
    for mode in modes:
        best = fastest(at_longest(entries, mode), SHIPPED)
        if best and "to_generate" in best:
            place, speed = f"{MODES[mode]}, after {best['context']:,} tokens", best["to_generate"]["mean"]
            lines.append(f"{place}: the fastest draft, {name_of(best)}, is {speed:.1f} times as fast as generate")
    return "\n".join(lines)


def caption(records: Sequence[Record]) -> str:
    """Model and device of a picture."""
    facts, *_ = of_kind(records, "environment")
    cores = "one core" if facts["threads"] == 1 else f"{facts['threads']} cores"
    target = facts.get("settings", {}).get("target", "target")
    return f"{target}, float32, {cores} of {facts['cpu']}. Bands: 95 % intervals."


def style(path: Path) -> Any:
    """A context in which pictures have the style of all; the ids in an SVG depend on its name alone."""
    import matplotlib

    return matplotlib.rc_context({"svg.hashsalt": path.stem}, fname=STYLE)


def make_panels(lines: int, columns: int, inches: tuple[float, float]) -> tuple[Any, Any]:
    """A figure of this size, and its panels."""
    # no pyplot: it keeps figures, and may look for a display
    from matplotlib.figure import Figure

    figure = Figure(inches)
    return figure, figure.subplots(lines, columns, squeeze=False)


def save(figure: Any, path: Path) -> None:
    """Write a figure; an SVG without the date."""
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def by_context(panel: Any, ticks: Mapping[float, str]) -> None:
    """Give a panel an axis of contexts, each place twice the one before it."""
    panel.set_xscale("log", base=2)
    panel.set_xticks(list(ticks), list(ticks.values()))
    panel.minorticks_off()


def styles_of(systems: Sequence[str]) -> dict[str, tuple[str, Any]]:
    """Return the style of each system: that of its method for the first one of a method."""
    own = {METHODS[method][0]: style for method, style in STYLES.items()}
    others = iter(OTHERS.values())
    return {system: own[system] if system in own else next(others) for system in systems}


def _members(name: str) -> list[str]:
    return METHODS.get(name) or SUITE["groups"].get(name) or [name]


def _draw(entries: Sequence[Record], panels: list[list[Panel]], path: Path, title: str, below: str) -> None:
    if not panels:
        return
    with style(path):
        figure, axes = make_panels(len(panels), len(panels[0]), (WIDTH, PANEL_HEIGHT * len(panels)))
        labels = [
            (axis, _curves(axis, entries, panel))
            for line, row in zip(axes, panels, strict=True)
            for axis, panel in zip(line, row, strict=True)
        ]
        figure.suptitle(title)
        figure.supxlabel(below)
        figure.draw_without_rendering()  # lays the panels out, labels included
        for axis, annotations in labels:
            height = axis.get_window_extent().height / figure.dpi * 72  # points
            bottom, top = axis.get_ylim()
            gap = 1.25 * annotations[0].get_fontsize() / height * (top - bottom)
            for label, place in zip(annotations, _apart([label.xy[1] for label in annotations], gap, top), strict=True):
                label.set_y(place)
        save(figure, path)


def _curves(axis: Any, entries: Sequence[Record], panel: Panel) -> list[Any]:
    """Draw the curves of a panel, and return their labels, which are next to the last points."""
    title, mode, key, styles = panel
    labels, method = [], title.partition(",")[0] + ", "
    group = [row for row in entries if row["mode"] == mode and key in row]
    contexts = sorted({row["context"] for row in group})
    for system, (colour, dashes) in (styles | ({PLAIN: NO_DRAFT} if key != "tau" else {})).items():
        points = sorted((row for row in group if row["system"] == system), key=lambda row: row["context"])
        if not points:
            continue
        places, values = [row["context"] for row in points], [row[key]["mean"] for row in points]
        axis.plot(places, values, color=colour, linestyle=dashes)
        axis.fill_between(
            places, *([row[key][end] for row in points] for end in ("low", "high")), color=colour, alpha=0.07, lw=0
        )
        labels.append(
            axis.annotate(
                name_of(points[0]).removeprefix(method),
                (places[-1], values[-1]),
                (1.06, values[-1]),
                textcoords=axis.get_yaxis_transform(),
                color=colour,
                va="center",
                arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "relpos": (0, 0.5), "shrinkB": 2},
            )
        )
    by_context(axis, {context: f"{round(context / 1024)}K" for context in contexts})
    axis.set_ylim(bottom=1 if key == "tau" else 0)
    axis.set(title=title, ylabel=AXES[key], xlabel="tokens of context")
    axis.grid(axis="y")
    return labels


def _apart(values: Sequence[float], gap: float, top: float) -> list[float]:
    """Return places for labels at these values, at least `gap` apart and not above `top`."""
    order = sorted(range(len(values)), key=lambda index: values[index])
    places = list(values)
    for before, index in pairwise(order):
        places[index] = max(places[index], places[before] + gap)
    for after, index in pairwise([None, *reversed(order)]):
        places[index] = min(places[index], top if after is None else places[after] - gap)
    return places


if __name__ == "__main__":
    results, picture = map(Path, sys.argv[1:])
    draw(read_records(results), picture)
