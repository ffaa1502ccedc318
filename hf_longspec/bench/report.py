"""From the calls of `hf-longspec bench` to rows and to a Markdown report: medians, ratios within turns, verdicts."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise, zip_longest
from typing import Any

from ..auditing import EXACT, NEAR_TIE, NOT_LOSSLESS
from .calls import HF, PLAIN
from .markdown import environment_line, estimate, pivot, range_of, table
from .matrix import NO_TIME, title_of
from .results import Record, grouped, of_kind
from .summaries import FEWEST, mean_interval, significant, summarize

# Verdicts on a text, the worst first.
REFERENCE, IDENTICAL, DIFFERS, NOT_COMPARED = "reference", "identical", "differs", "not compared"
VERDICTS = (DIFFERS, NOT_LOSSLESS, NEAR_TIE, NOT_COMPARED, EXACT, IDENTICAL, REFERENCE)
FAILED = (DIFFERS, NOT_LOSSLESS)
CELL = ("dtype", "context", "batch", "decoding")

NOTE = (
    "Every call reads its prompt anew; the prompt is the time to the first token (TTFT), and tokens/s counts from "
    "the first token to the last, all rows together. Methods take turns, and within a turn all continue the same "
    "prompts from the same seed. Medians, in brackets the lowest and the highest turn; ratios (x) are taken within "
    "a turn. `hf generate` is plain `model.generate` (DynamicCache); plain loop is this package without a draft. "
    "tau: tokens emitted per verification and row, the target's own included, in brackets the 95 % interval of the "
    "mean over turns, from three turns on; the last verification of a call is cut at the token limit. Accepted at a "
    "depth: of the verifications that accepted one less, not cut; those without a proposal there count as not "
    "accepted. Share of floor: reading weights and cache once from memory per step, at the measured bandwidth, over "
    "the time of a step. Text: `reference` is what the others are compared with, `identical` the same tokens, "
    "`exact` and `near-tie` the audit's verdict on another text. Sampled texts of this package are compared with "
    "the plain loop of the same seed. A wrong text has no speed."
)

# Methods of the papers that this benchmark runs, and the options that run them.
RUN_BY = {
    "SpecAttn (Vegas)": "`--draft specattn`",
    "MagicDec with Quest": "`--draft quest`",
    "MagicDec with StreamingLLM": "`--draft specattn --sweep selection=window`; in a cache of its own, "
    "`--draft FOLDER` of an assistant with a window",
    "the criterion of SpecExtend, in every layer": "`--draft specattn --sweep selection=last_accepted`",
    "LongSpec, TokenSwift, EAGLE-3": "`--draft FOLDER`, a trained or converted draft",
    "draft models, PARD": "`--draft FOLDER`, a small model; transformers' own way: `--assistant MODEL`",
    "prompt lookup (PLD)": "always; n-grams of this package: `--draft ngram`",
    "Token Recycling": "`--draft recycling`",
}
# Methods that the papers compare with and this benchmark does not run, and why not.
NOT_RUN = {
    "EAGLE, EAGLE-2": "their drafts are trained for single targets in formats that are not read here",
    "Medusa": "its heads, with an activation and a vocabulary head each, are not read",
    "TriForce": "a small model drafts there for the target on a sparse cache, which drafts for the target; here a "
    "drafter has no drafter of its own, and only n-grams join its tree",
    "the engines of MagicDec and SpecExtend": "their selections run here, but not their code",
    "vLLM, SGLang": "other engines, whose own model code leaves nothing to compare in one process",
}


def rows_of(records: Sequence[Record]) -> list[Record]:
    """One row per cell and method, ready for JSON, in the order in which they were first measured; baselines first.

    A row has the values of the cell, medians over the turns with their range, tau with its interval, the verdict on its
    texts (`text`, the worst of all calls), and no speed if one of them was wrong.
    """
    import pandas as pd

    runs = pd.DataFrame(of_kind(records, "run"))
    if runs.empty:
        return []
    runs["cell"] = [_key(record) for record in of_kind(records, "run")]
    runs["speed"] = runs.tokens / runs.decode_seconds.where(runs.decode_seconds > 0)
    runs["tau"] = runs.tokens / runs.steps.where(runs.steps > 0)
    floors = {(r["dtype"], r["context"], r["batch"]): r["seconds"] for r in of_kind(records, "floor")}
    audits = {(_key(r), r["method"]): r for r in of_kind(records, "audit")}
    rows = []
    for key, calls in runs.groupby("cell", sort=False):
        cell: Record = json.loads(str(key))
        first: dict[str, str] = {}
        speeds, taus = (calls.pivot(index="turn", columns="method", values=name) for name in ("speed", "tau"))
        texts = {(call.method, call.turn): call.text for call in calls.itertuples()}
        for name in sorted(calls.method.unique(), key=lambda name: {HF: 0, PLAIN: 1}.get(name, 2)):
            own, audit = calls[calls.method == name], audits.get((str(key), name))
            row = {**cell, "method": name, **_over_turns(own)}
            verdicts = {_verdict(call, cell, texts, audit) for call in own.itertuples()}
            if audit is not None and audit["verdict"] in FAILED:
                verdicts.add(audit["verdict"])
            row |= {"text": min(verdicts, key=VERDICTS.index), "audit": None if audit is None else audit["report"]}
            if row["point"]:  # compared with the first point of its draft
                base = first.setdefault(draft_of(row), name)
                gaps = (taus[name] - taus[base]).dropna()
                row["tau_difference"] = mean_interval(list(gaps)) if base != name and len(gaps) else None
            if row["text"] not in FAILED and (found := _summary(speeds[name])) is not None:
                row["tokens_per_second"] = found
                for key_of, base in (("ratio_to_hf", HF), ("ratio_to_plain", PLAIN)):
                    row[key_of] = _summary(speeds[name] / speeds[base]) if base in speeds else None
                floor = floors.get((cell["dtype"], cell["context"], cell["batch"]))
                if floor is not None:
                    # tau tokens per floor at most: for loops without a draft the share of the floor itself
                    share = floor * own.speed.median() / cell["batch"] / row["tau"]
                    row["share_of_floor"] = significant(share)
            rows.append(row)
    return rows


def _over_turns(runs: Any) -> Record:
    """The values of a row that its calls alone decide."""
    taus, peaks = runs.tau.dropna(), runs.peak_bytes.dropna()
    by_turn = list(zip_longest(*map(by_depth, runs.accepted)))
    return {
        "point": runs.point.iloc[0],
        "prompt_tokens": significant(runs.prompt_tokens.mean()),
        "repeats": len(runs),
        "ttft_seconds": summarize(list(runs.ttft_seconds)),
        "tau": significant(runs.tokens.sum() / max(1, runs.steps.sum())),
        "tau_interval": _interval(taus, least=1.0),
        "acceptance_histogram": _added(runs.histogram),
        "acceptance_by_depth": [significant(share) for share in by_depth(_added(runs.accepted))],
        "acceptance_intervals": [_interval([s for s in at if s is not None], least=0.0, most=1.0) for at in by_turn],
        "peak_bytes": int(peaks.max()) if len(peaks) else None,
        "draft_state_bytes": int(runs.draft_state_bytes.max()),
    }


def _summary(values: Any) -> dict[str, float] | None:
    found = list(values.dropna())
    return summarize(found) if found else None


def _interval(values: Sequence[float], **bounds: float) -> dict[str, float] | None:
    return mean_interval(list(values), **bounds) if len(values) >= FEWEST else None


def _verdict(run: Any, cell: Mapping[str, Any], texts: Mapping[Any, Any], audit: Record | None) -> str:
    """The verdict on the text of one call; an audit stands for all texts that are not `generate`'s."""
    expected = texts.get((run.compared_with, run.turn))
    if run.compared_with == run.method:
        return REFERENCE
    if expected is None:
        return NOT_COMPARED
    if run.text == expected:
        return IDENTICAL
    if cell["dtype"] == "float32":
        return DIFFERS
    return NOT_COMPARED if audit is None else str(audit["verdict"])


def draft_of(row: Record) -> str:
    """The draft of a row without its settings."""
    return str(row["method"]).partition(", ")[0]


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


def matrix_report(records: Sequence[Record], brief: bool = False, not_run: bool = True) -> str:
    """Everything that was measured so far, as Markdown.

    Args:
        brief (`bool`, *optional*): Leave out columns, so that the tables fit a terminal.
        not_run (`bool`, *optional*): List the methods of the papers, those that are run and those that are not.
    """
    rows, found = rows_of(records), of_kind(records, "environment")[0]
    settings = {key: value for key, value in found["settings"].items() if key in ("target", "data", "tokens", "seed")}
    parts = [
        "# Benchmark",
        f"{found.get('device')}, hf_longspec {found.get('hf_longspec')}, {environment_line(records)}",
        f"Settings: `{json.dumps(settings)}`.",
        NOTE,
        f"Peak memory: {found.get('peak_memory')}.",
    ]
    cells = grouped(rows, title_of)
    for title, members in cells.items():
        parts += [f"## {title}", table(members, {name: COLUMNS[name] for name in (BRIEF if brief else COLUMNS)})]
    for title, members in cells.items():
        if swept := [row for row in members if row["point"]]:
            swept = [row for points in grouped(swept, draft_of).values() for row in points]
            parts += [f"## Settings: {title}", table(swept, SWEPT)]
    parts += by_category(records)
    if failed := [row for row in rows if row["text"] in FAILED]:
        lines = [f"- {row['method']}, {title_of(row)}: {row['audit'] or row['text']}" for row in failed]
        parts += ["## Wrong texts", "\n".join(lines)]
    if not_run:
        parts += ["## Run by", "\n".join(f"- {name}: {how}." for name, how in RUN_BY.items())]
        parts += ["## Not run", "\n".join(f"- {name}: {why}." for name, why in NOT_RUN.items())]
    return "\n\n".join([*parts, *_left_out(records)]) + "\n"


def _tau(row: Record) -> str:
    interval = row["tau_interval"]
    return f"{row['tau']:.2f}" + ("" if interval is None else f" [{interval['low']:.2f}, {interval['high']:.2f}]")


def _difference(row: Record) -> str:
    gap = row["tau_difference"]
    return "" if gap is None else estimate(gap, "+.2f")


# Headings of the tables, with the cell below them.
COLUMNS: dict[str, Callable[[Record], str]] = {
    "method": lambda row: str(row["method"]),
    "turns": lambda row: str(row["repeats"]),
    "TTFT, s": lambda row: range_of(row["ttft_seconds"], 3),
    "tokens/s": lambda row: range_of(row.get("tokens_per_second"), 1),
    "x `generate`": lambda row: range_of(row.get("ratio_to_hf")),
    "x plain loop": lambda row: range_of(row.get("ratio_to_plain")),
    "tau": _tau,
    "accepted at depth 1, 2, ...": lambda row: " ".join(f"{share:.2f}" for share in row["acceptance_by_depth"]),
    "peak memory, MiB": lambda row: "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:.0f}",
    "draft state, KiB": lambda row: f"{row['draft_state_bytes'] / 2**10:.0f}" if row["draft_state_bytes"] else "",
    "share of floor": lambda row: f"{row['share_of_floor']:.0%}" if "share_of_floor" in row else "",
    "text": lambda row: str(row["text"]),
}
BRIEF = ("method", "TTFT, s", "tokens/s", "x `generate`", "x plain loop", "tau", "peak memory, MiB", "text")
SWEPT = {
    **{name: COLUMNS[name] for name in ("method", "tau")},
    "difference of tau to the first": _difference,
    **{name: COLUMNS[name] for name in ("tokens/s", "x plain loop")},
}


def by_category(records: Sequence[Record]) -> list[str]:
    """Return a table of tau by category for every cell, if the prompts have more than one."""
    parts = []
    for title, runs in grouped(of_kind(records, "run"), title_of).items():
        totals: dict[tuple[str, str], Record] = {}
        for run in runs:
            per_row = run["tokens"] / max(1, len(run["row_steps"]))
            for category, steps in zip(run.get("categories", ()), run["row_steps"], strict=False):
                new = {"method": run["method"], "category": category, "tokens": 0, "steps": 0}
                own = totals.setdefault((run["method"], category), new)
                own["tokens"] += per_row
                own["steps"] += steps
        rows = [row for row in totals.values() if row["method"] not in (HF, PLAIN)]
        if len({row["category"] for row in rows}) > 1:
            shown = pivot(
                rows, {"method": "method"}, "category", "{}", lambda row: f"{row['tokens'] / max(1, row['steps']):.2f}"
            )
            parts += [f"## tau by category: {title}", shown]
    return parts


def _left_out(records: Sequence[Record]) -> list[str]:
    """List the missing calls with their reasons, except for those that a later part of the run measured."""
    repeats = of_kind(records, "environment")[0]["settings"].get("repeats") or 0
    lines: dict[str, dict[str, None]] = {}
    for record in of_kind(records, "skipped"):
        runs = of_kind(records, "run", **{name: record[name] for name in (*CELL, "method")})
        if record["reason"] != NO_TIME or len(runs) < repeats:
            lines.setdefault(record["reason"], {})[f"{record['method']} ({title_of(record)})"] = None
    found = [f"- {reason}: {'; '.join(what)}" for reason, what in lines.items()]
    return ["## Left out", "\n".join(found)] if found else []
