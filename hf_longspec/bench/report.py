"""From the calls of `hf-longspec bench` to rows and to a Markdown report: medians, ratios within turns, verdicts."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Any

from ..auditing import EXACT, NEAR_TIE, NOT_LOSSLESS
from .calls import HF, PLAIN
from .markdown import half_width, markdown_table, range_of
from .matrix import NO_TIME
from .results import Record, of_kind
from .summaries import mean_interval, significant, summarize

# Verdicts on a text, the worst first.
REFERENCE, IDENTICAL, DIFFERS, NOT_COMPARED = "reference", "identical", "differs", "not compared"
VERDICTS = (DIFFERS, NOT_LOSSLESS, NEAR_TIE, NOT_COMPARED, EXACT, IDENTICAL, REFERENCE)
FAILED = (DIFFERS, NOT_LOSSLESS)
CELL = ("dtype", "context", "batch", "decoding")

NOTE = (
    "Every call reads its prompt anew; the prompt is the time to the first token (TTFT), and tokens/s counts from the "
    "first token to the last, all rows together. Methods take turns, and within a turn all continue the same prompts "
    "from the same seed. Medians, in brackets the lowest and the highest turn; ratios (x) are taken within a turn. `hf "
    "generate` is plain `model.generate` (DynamicCache); plain loop is this package without a draft. tau: tokens "
    "emitted per verification and row, the target's own included, with the 95 % interval of the mean over turns; the "
    "last verification of a call is cut at the token limit. Accepted at a depth: of the verifications that accepted "
    "one less, not cut; those without a proposal there count as not accepted. Share of floor: reading weights and "
    "cache once from memory per step, at the measured bandwidth, over the time of a step. Text: `reference` is what "
    "the others are compared with, `identical` the same tokens, `exact` and `near-tie` the audit's verdict on another "
    "text. Sampled texts of this package are compared with the plain loop of the same seed. A wrong text has no speed."
)

# Methods that the papers compare with and this benchmark does not run, and why not.
NOT_RUN = {
    "Token Recycling": "it adapts a table of candidates per target, which is not implemented here",
    "EAGLE, EAGLE-2, EAGLE-3": "their drafts are trained for single targets in formats that are not read here",
    "Medusa": "its heads are not read; unchained TokenSwift heads (`chained=false`) have the same structure",
    "TriForce": "it needs a third, small model beside the target's sparse cache, which is not implemented here",
    "MagicDec": "its engine is not run; `--sweep selection=window,quest` measures both of its selections in this one",
    "SpecExtend": "it is not run; `--sweep selection=last_accepted` measures its criterion in every layer",
    "vLLM, SGLang": "other engines, whose own model code leaves nothing to compare in one process",
}


@dataclass(frozen=True, eq=False)
class Row:
    """One method in one cell.

    Args:
        cell (`dict[str, Any]`): dtype, context, batch, decoding.
        method (`str`): Its name.
        runs (`pandas.DataFrame`): Its calls, by turn; see [`frame_of`].
        others (`pandas.DataFrame`): The calls of all methods of the cell.
        floor_seconds (`float`, *optional*): Least time of a step, reading weights and cache once.
        audit (`Record`, *optional*): Audit of the first text that is not that of plain `generate`.
    """

    cell: dict[str, Any]
    method: str
    runs: Any
    others: Any
    floor_seconds: float | None = None
    audit: Record | None = None

    @property
    def tau(self) -> float:
        """Tokens per verification, over all calls."""
        return float(self.runs.tokens.sum() / max(1, self.runs.steps.sum()))

    @property
    def accepted_by_depth(self) -> list[float]:
        """See [`by_depth`]; not cut at the token limit."""
        return by_depth(_added(self.runs.accepted))

    @property
    def verdict(self) -> str:
        """The worst verdict on the texts of all calls; an audit stands for all texts that are not `generate`'s."""
        found = {self._verdict_of(run) for run in self.runs.itertuples()}
        if self.audit is not None and self.audit["verdict"] in FAILED:
            found.add(self.audit["verdict"])
        return min(found, key=VERDICTS.index)

    def _verdict_of(self, run: Any) -> str:
        if run.compared_with == self.method:
            return REFERENCE
        others = self.others
        expected = others[(others.method == run.compared_with) & (others.turn == run.turn)].text
        if expected.empty:
            return NOT_COMPARED
        if run.text == expected.iloc[0]:
            return IDENTICAL
        if self.cell["dtype"] == "float32":
            return DIFFERS
        return NOT_COMPARED if self.audit is None else self.audit["verdict"]

    @property
    def failed(self) -> bool:
        """Whether its text was wrong; such a row has no speed."""
        return self.verdict in FAILED

    def ratio_to(self, name: str) -> dict[str, float] | None:
        """Speed over that of another method, turn by turn."""
        base = self.others[self.others.method == name]
        ratio = (self.runs.set_index("turn").speed / base.set_index("turn").speed).dropna()
        return summarize(list(ratio)) if len(ratio) else None

    def difference_to(self, first: "Row") -> dict[str, float] | None:
        """Difference of tau to that of another row, turn by turn, with its 95 % interval."""
        gaps = (self.runs.set_index("turn").tau - first.runs.set_index("turn").tau).dropna()
        return mean_interval(list(gaps)) if len(gaps) else None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        runs = self.runs
        taus, peaks, speeds = runs.tau.dropna(), runs.peak_bytes.dropna(), runs.speed.dropna()
        values: dict[str, Any] = {
            **self.cell,
            "method": self.method,
            "point": runs.point.iloc[0],
            "prompt_tokens": significant(runs.prompt_tokens.mean()),
            "text": self.verdict,
            "audit": None if self.audit is None else self.audit["report"],
            "repeats": len(runs),
            "ttft_seconds": summarize(list(runs.ttft_seconds)),
            "tau": significant(self.tau),
            "tau_interval": mean_interval(list(taus)) if len(taus) else None,
            "acceptance_histogram": _added(runs.histogram),
            "acceptance_by_depth": [significant(share) for share in self.accepted_by_depth],
            "peak_bytes": int(peaks.max()) if len(peaks) else None,
            "draft_state_bytes": int(runs.draft_state_bytes.max()),
        }
        if self.failed or not len(speeds):
            return values
        values |= {
            "tokens_per_second": summarize(list(speeds)),
            "ratio_to_hf": self.ratio_to(HF),
            "ratio_to_plain": self.ratio_to(PLAIN),
        }
        if self.floor_seconds is not None:
            # tau tokens per floor at most: for loops without a draft the share of the floor itself
            share = self.floor_seconds * speeds.median() / self.cell["batch"] / self.tau
            values["share_of_floor"] = significant(share)
        return values


def rows_of(records: Sequence[Record]) -> list[Row]:
    """One row per cell and method, in the order in which they were first measured; the baselines first."""
    runs = frame_of(records)
    if runs.empty:
        return []
    floors = {(r["dtype"], r["context"], r["batch"]): r["seconds"] for r in of_kind(records, "floor")}
    audits = {(_key(r), r["method"]): r for r in of_kind(records, "audit")}
    rows = []
    for key, others in runs.groupby("cell", sort=False):
        cell = json.loads(str(key))
        floor = floors.get((cell["dtype"], cell["context"], cell["batch"]))
        for name in sorted(others.method.unique(), key=lambda name: {HF: 0, PLAIN: 1}.get(name, 2)):
            own = others[others.method == name]
            rows.append(Row(cell, name, own, others, floor, audits.get((str(key), name))))
    return rows


def frame_of(records: Sequence[Record]) -> Any:
    """A `pandas.DataFrame` of all calls, with `cell` as text, `speed` and `tau`; NaN without time or verifications."""
    import pandas as pd

    runs = pd.DataFrame(of_kind(records, "run"))
    if runs.empty:
        return runs
    runs["cell"] = [_key(record) for record in of_kind(records, "run")]
    runs["speed"] = runs.tokens / runs.decode_seconds.where(runs.decode_seconds > 0)
    runs["tau"] = runs.tokens / runs.steps.where(runs.steps > 0)
    return runs


def _key(record: Record) -> str:
    return json.dumps({name: record[name] for name in CELL}, sort_keys=True)


def by_depth(histogram: Sequence[int]) -> list[float]:
    """Share of the verifications that accepted a drafted token at depth d, out of those that accepted at d - 1.

    Verifications to which nothing was proposed at that depth count as not accepting.

    >>> by_depth([2, 1, 1])
    [0.5, 0.5]
    """
    reached = [sum(histogram[depth:]) for depth in range(len(histogram))]
    return [after / before for before, after in pairwise(reached) if before]


def _added(histograms: Iterable[Sequence[int]]) -> list[int]:
    return [sum(counts) for counts in zip_longest(*histograms, fillvalue=0)]


def matrix_report(records: Sequence[Record]) -> str:
    """Everything that was measured so far."""
    rows = rows_of(records)
    parts = ["# Benchmark", environment_paragraph(records), NOTE]
    parts += [f"Peak memory: {of_kind(records, 'environment')[0].get('peak_memory')}."]
    cells = grouped(rows, lambda row: title_of(row.cell))
    for title, part in cells.items():
        parts += [f"## {title}", cell_table(part)]
    for title, part in cells.items():
        if any(row.runs.point.iloc[0] for row in part):
            parts += [f"## Settings: {title}", sweep_table(part)]
    failed = [
        f"- {row.method}, {title_of(row.cell)}: {(row.audit or {}).get('report', row.verdict)}"
        for row in rows
        if row.failed
    ]
    parts += ["## Wrong texts", "\n".join(failed)] if failed else []
    for record in of_kind(records, "analysis"):
        parts += [f"## Analysis: {record['method']}, {title_of(record)}", analysis_text(record)]
    parts += ["## Not run", "\n".join(f"- {name}: {why}." for name, why in NOT_RUN.items())]
    return "\n\n".join([*parts, *_left_out(records)]) + "\n"


def environment_paragraph(records: Sequence[Record]) -> str:
    """Machine, versions, commit, date, command."""
    found = of_kind(records, "environment")[0]
    bandwidth = [f"{r['read_gb_per_second']} GB/s read" for r in of_kind(records, "ceilings")[-1:]]
    parts = [
        str(found.get("device")),
        f"{found['cpu']}, {found['usable_cores']} of {found['cores']} cores usable, {found['threads']} threads",
        *bandwidth,
        f"torch {found['torch']}",
        f"transformers {found['transformers']}",
        f"hf_longspec {found.get('hf_longspec')}, commit {found['commit']}",
        f"load average {found['load_average']} at the start",
        found["date"],
    ]
    again = [f"resumed {record['date']}" for record in of_kind(records, "resumed")]
    state = "" if of_kind(records, "end") else " The run was not finished."
    settings = {key: value for key, value in found["settings"].items() if key in ("target", "data", "tokens", "seed")}
    return f"{', '.join([*parts, *again])}: `{found['command']}`.{state}\n\nSettings: `{json.dumps(settings)}`."


def title_of(cell: dict[str, Any]) -> str:
    """A cell in words."""
    length = f"{cell['context']} tokens" if cell["context"] else "prompts of their own length"
    how = ", ".join(f"{name} {value}" for name, value in cell["decoding"].items()) or "greedy"
    return f"{length}, batch {cell['batch']}, {cell['dtype']}, {how}"


def cell_table(rows: Sequence[Row]) -> str:
    """One line per method."""
    header = ["method", "turns", "TTFT, s", "tokens/s", "x `generate`", "x plain loop", "tau"]
    header += ["accepted at depth 1, 2, ...", "peak memory, MiB", "draft state, KiB", "share of floor", "text"]
    return markdown_table(header, [_line(row, row.to_dict()) for row in rows])


def _line(row: Row, values: dict[str, Any]) -> list[str]:
    peak, floor = values["peak_bytes"], values.get("share_of_floor")
    return [
        row.method,
        str(values["repeats"]),
        range_of(values["ttft_seconds"], 3),
        range_of(values.get("tokens_per_second"), 1),
        range_of(values.get("ratio_to_hf")),
        range_of(values.get("ratio_to_plain")),
        with_interval(values["tau"], values["tau_interval"]),
        " ".join(f"{share:.2f}" for share in values["acceptance_by_depth"]),
        "" if peak is None else f"{peak / 2**20:.0f}",
        f"{values['draft_state_bytes'] / 2**10:.0f}" if values["draft_state_bytes"] else "",
        "" if floor is None else f"{floor:.0%}",
        row.verdict,
    ]


def with_interval(value: float, interval: dict[str, float] | None) -> str:
    """A mean with half of its interval; without it if there was one value only."""
    return f"{value:.2f}" if interval is None or interval["count"] < 2 else f"{value:.2f} ± {half_width(interval)}"


def sweep_table(rows: Sequence[Row]) -> str:
    """The points of every draft with their difference to its first, turn by turn."""
    lines = []
    for points in grouped(rows, lambda row: row.method.partition(", ")[0]).values():
        for row in points:
            if not row.runs.point.iloc[0]:
                continue
            gap = None if row is points[0] else row.difference_to(points[0])
            values = row.to_dict()
            shown = "" if gap is None else f"{gap['mean']:+.2f}" + (f" ± {half_width(gap)}" if gap["count"] > 1 else "")
            speeds = range_of(values.get("tokens_per_second"), 1), range_of(values.get("ratio_to_plain"))
            lines.append([row.method, with_interval(values["tau"], values["tau_interval"]), shown, *speeds])
    return markdown_table(["method", "tau", "difference of tau to the first", "tokens/s", "x plain loop"], lines)


def analysis_text(record: Record) -> str:
    """The counts of the probes, in words and tables."""
    header = ["depth", "verifications that reached it", "accepted there", "rate"]
    lines = [
        [str(depth), str(reached), str(accepted), f"{accepted / reached:.3f}" if reached else ""]
        for depth, (reached, accepted) in enumerate(zip(record["reached"], record["accepted"], strict=True), 1)
    ]
    parts = [markdown_table(header, lines)]
    rejected = record["rejected"]
    deciles = (f"{low / 10:.1f}-{(low + 1) / 10:.1f}" for low in range(10))
    lines = [
        [title, str(rejected[name]["count"]), f"{rejected[name]['mean']:.3f}", *map(str, rejected[name]["deciles"])]
        for name, title in (("p", "target's probability p"), ("q", "draft's probability q"), ("rate", "min(1, p / q)"))
        if rejected[name]["count"]
    ]
    if lines:
        parts.append(markdown_table(["of rejected tokens", "count", "mean", *deciles], lines))
    if rejected["p"]["count"] and not rejected["q"]["count"]:
        parts.append("The draft's probabilities q are known for SpecAttn only.")
    titles = {
        "overlap": "Share of the selected entries that the next verification selects again, sinks included, mean over "
        "layers",
        "pair_overlap": "Overlap of the entries that two tokens of one verification would select, by their distance",
    }
    for name, title in titles.items():
        if record.get(name):
            shown = ", ".join(f"{key}: {value:.3f}" for key, value in record[name].items())
            parts.append(f"{title}: {shown}.")
    return "\n\n".join(parts)


def _left_out(records: Sequence[Record]) -> list[str]:
    """List the missing calls with their reasons, except for those that a later part of the run measured."""
    repeats = of_kind(records, "environment")[0]["settings"].get("repeats")
    runs = of_kind(records, "run")
    lines: dict[str, list[str]] = {}
    for record in of_kind(records, "skipped"):
        same = [r for r in runs if all(r[k] == record[k] for k in (*CELL, "method"))]
        if record["reason"] != NO_TIME or len(same) < (repeats or 0):
            lines.setdefault(record["reason"], []).append(f"{record['method']} ({title_of(record)})")
    found = [f"- {reason}: {'; '.join(dict.fromkeys(what))}" for reason, what in lines.items()]
    return ["## Left out", "\n".join(found)] if found else []


def grouped(rows: Sequence[Row], key: Callable[[Row], str]) -> dict[str, list[Row]]:
    """Rows by a text that is made of each."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups
