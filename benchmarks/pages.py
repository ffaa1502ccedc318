"""Reports of result files, and the part of each that documents quote, as Markdown: one page per benchmark."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from benchmarks import figure_report, gpu_report
from hf_longspec.bench.calls import HF, PLAIN
from hf_longspec.bench.report import (
    ACCEPTANCE_NOTE,
    COLUMNS,
    Column,
    acceptance_table,
    environment_line,
    estimate,
    pivot,
    range_of,
    rows_of,
    table,
    title_of,
    with_defaults,
)
from hf_longspec.bench.results import Record, of_kind

Columns = Mapping[str, Column]


def fixed(key: str, digits: int, scale: float = 1.0) -> Callable[[Record], str]:
    """A column: a number, or the median of a summary, over `scale`, with so many decimals; empty if it is missing."""

    def shown(row: Record) -> str:
        value = row.get(key)
        value = value["median"] if isinstance(value, dict) else value
        return "" if value is None else f"{value / scale:.{digits}f}"

    return shown


def spread(key: str, digits: int = 2) -> Callable[[Record], str]:
    """A column: a median with its range; empty if it is missing."""
    return lambda row: range_of(row.get(key), digits)


def titled(heading: str, rows: Sequence[Record], columns: Columns) -> list[str]:
    """A table with its heading; nothing without rows."""
    return [heading, table(rows, columns)] if rows else []


VERIFICATION_NOTE = (
    "Milliseconds for one layer (attention) and for the whole model (forward), medians of interleaved repeats. Ratio: "
    "transformers' time divided by ours, with the lowest and highest in brackets. transformers runs sdpa attention "
    "with a 4-D mask on a DynamicCache; a single node, as in plain decoding, needs no mask. Error: attention compared "
    "with float64, logits with those of transformers."
)
VERIFICATION: Columns = {
    **{name: name for name in ("part", "dtype", "nodes")},
    "transformers, ms": fixed("hf_ms", 1),
    "ours, ms": fixed("ours_ms", 1),
    "ratio": spread("ratio"),
    "bandwidth floor, ms": fixed("floor_ms", 1),
    "error": lambda row: f"{row['error']:.0e}",
}

HOST_NOTE = (
    "A step of a random Llama with 32 layers of width 64 after 64 tokens, in microseconds of processor time per layer: "
    "medians of steps in turns. The ratio is taken in each turn, with the lowest and highest in brackets. The launches "
    "of the Triton kernels do nothing, so this is the work of Python and of torch that a GPU waits for in a step that "
    "is not captured."
)
HOST: Columns = {
    "our loop": fixed("loop_us", 0),
    "transformers": fixed("stock_us", 0),
    "our loop / transformers": spread("ratio"),
}

HYBRID_NOTE = (
    "Random models with eight layers of width 512 after 4,096 tokens, medians of interleaved repeats with the lowest "
    "and highest in brackets. Processor time of one thread. Commit and chain are in plain steps of this package's "
    "loop, a verification of one token and its commit: the commit alone of three of five nodes, and the verification "
    "of a chain of five nodes with its commit. Tree: verification and commit of 16 nodes, in chains of five. Plain "
    "step: in forwards of one token by transformers with a DynamicCache."
)
HYBRID: Columns = {
    **{name: name for name in ("type", "recurrence")},
    "plain step, ms": fixed("plain_ms", 1),
    "plain step": spread("stock"),
    "commit": spread("commit"),
    "chain": spread("chain"),
    "tree": spread("tree"),
}

OFFSETS_NOTE = (
    "Cross-entropy in nats per token on held-out windows with shifted positions after the anchors: means over windows "
    "with 95 % intervals. Differences are taken per window."
)
OFFSETS: Columns = {
    "offset": "offset",
    "anchors": "anchors",
    "target's loss": lambda row: estimate(row["loss"], ".3f"),
    "difference to offset 0": lambda row: estimate(row["difference"], "+.4f"),
}

LONG_NOTE = (
    "One run per row, decoding only. tokens/s: from the first token to the mark. x plain: divided by that of the plain "
    "loop, as in the paper. Near: over the 1,000 tokens before the mark, compared with the plain loop and with "
    "plain `model.generate` (DynamicCache, sdpa), which both continue after it. tau: tokens per verification. alpha "
    "and beta: accepted tokens, and those that only n-grams proposed, divided by the rows of logits of a draft (Eqs. 4 "
    "and 6 of the paper, whose beta also counts tokens that the heads proposed too)."
)


def long_headline(records: Sequence[Record]) -> str:
    """One row per method and mark."""
    rows, speed = of_kind(records, "long"), "tokens_per_second"
    plain = {_run_of(row): row[speed] for row in rows if row["method"] == PLAIN}
    near = {(row["method"], _run_of(row)): row[speed] for row in of_kind(records, "baseline")}

    def near_over(name: str) -> Callable[[Record], str]:
        return lambda row: _times(row[f"{speed}_near"], near.get((name, _run_of(row))))

    columns: Columns = {
        "mode": "mode",
        "penalty": lambda row: "yes" if row["penalised"] else "no",
        "method": "method",
        "tokens": "mark",
        "tokens/s": fixed(speed, 1),
        "x plain": lambda row: _times(row[speed], plain.get(_run_of(row))),
        "tokens/s near": fixed(f"{speed}_near", 1),
        "x plain near": near_over(PLAIN),
        "x `generate` near": near_over(HF),
        **{name: fixed(name, 2) for name in ("tau", "alpha", "beta")},
    }
    return table(rows, columns)


def _run_of(row: Record) -> tuple[str, bool, int]:
    return row["mode"], row["penalised"], row["mark"]


def _times(speed: float, base: float | None) -> str:
    return f"{speed / base:.2f}" if base else ""


MEMORY_NOTE = (
    "Peak memory of a call of `generate` in addition to weights, keys and values, and its ratio to the keys and "
    "values. torch's allocator reports tensors and scratch buffers; tracemalloc reports numpy's buffers and Python's "
    "objects. Decoding: three tokens after a full cache. Prefill: the last chunk of a prompt; `hf generate` uses the "
    "same chunks. Bounds: the memory of the method at the smallest context, plus an allowance per token of text; for "
    "SpecAttn the memory of the loop without a draft, its selected entries and 0.8 % of the cache for scores; for "
    "the prefill the memory of `hf generate`, plus the allowance per token of text."
)


def memory_headline(records: Sequence[Record]) -> str:
    """One row per method of either part, one column per context."""
    columns: Columns = {"part": "part", "method": "method"}
    return pivot(of_kind(records, "memory"), columns, "context", "{} tokens", _share)


def _share(row: Record) -> str:
    return f"{_mib('extra_bytes')(row)} MiB, {row['extra_bytes'] / row['kv_bytes']:.2%}"


def _mib(key: str) -> Callable[[Record], str]:
    return fixed(key, 2, 2**20)


def memory_tables(records: Sequence[Record]) -> list[str]:
    """Everything, with the bounds that earlier runs wrote."""
    columns: Columns = {
        "method": "method",
        "context": "context",
        "extra, MiB": _mib("extra_bytes"),
        "of it torch": _mib("torch_bytes"),
        "bound, MiB": _mib("bound_bytes"),
        "within": lambda row: {True: "yes", False: "NO", None: ""}[row.get("within")],
        "keys and values, MiB": _mib("kv_bytes"),
    }
    titles = {"decode": "## Decoding after a full cache", "prefill": "## The last chunk of a prompt"}
    parts = [titled(title, of_kind(records, "memory", part=part), columns) for part, title in titles.items()]
    return [memory_headline(records), *chain(*parts)]


EDITING_NOTE = (
    "tau, greedy, over rounds of an editing task, and its ratio to that of n-grams of one call, file by file. With a "
    "memory, a round also searches what earlier rounds of the same file generated. Means over files, 95 % intervals."
)
EDITING: Columns = {
    "n-grams of": "memory",
    "first round": lambda row: estimate(row["first"]),
    "later rounds": lambda row: estimate(row["later"]),
    "last round": lambda row: estimate(row["last"]),
    "later rounds / one call": lambda row: estimate(row["gain"]),
}

GATED, UNGATED = ", gated", ", ungated"  # suffixes of the names of ways to decode
GATE_NOTE = (
    "All methods advance through the same texts in turns of a few tokens, and every step is timed. Time over plain "
    "loop: of all steps, mean over texts with its 95 % interval. CPU time: the same in CPU time of the process. "
    "Accounted: the number of steps of each kind times their median cost, in plain steps of the same turn. Over the "
    "faster one: compared with the faster of the plain loop and the draft without the gate. Same text: number of texts "
    "that equal those of the plain loop. Steps: of each kind per text; a catch-up is a plain step that a drafter "
    "observes after a pause. Decisions and tau (of steps that speculate) are those of the last text."
)


def _percent(key: str) -> Callable[[Record], str]:
    """A column: a ratio as a difference in per cent, with half of its interval."""
    return lambda row: f"{row[key]['mean'] - 1:+.1%} ± {(row[key]['high'] - row[key]['low']) / 2:.1%}"


GATE: Columns = {
    "context": "context",
    "method": "method",
    "tokens/s": fixed("tokens_per_second", 1),
    "time over plain loop": _percent("time_over_plain"),
    "CPU time": _percent("cpu_over_plain"),
    "accounted": lambda row: f"{row['accounted_over_plain'] - 1:+.1%}",
    "over the faster one": lambda row: (
        f"{_percent('time_over_faster')(row)} over {row['faster']}" if row["method"].endswith(GATED) else ""
    ),
    "same text": lambda row: f"{row['same_texts']}/{row['texts']}",
    "tau": fixed("tau", 2),
    "steps, cost in plain steps": lambda row: ", ".join(
        f"{kind['steps']:.0f} {name} at {kind['cost']:.2f}" for name, kind in row["kinds"].items()
    ),
    "decisions": lambda row: ", ".join(
        f"{decision['choice']} at {decision['length']}" for decision in row["decisions"]
    ),
}

GATE_QUOTED = ("context", "method", "time over plain loop", "over the faster one", "same text")

# Measurements that were left out for one reason and are named.
MOST_NAMED = 6


def left_out(records: Sequence[Record]) -> list[str]:
    """List what was not measured, one line per reason, which names the first few."""
    reasons: dict[str, list[str]] = {}
    for record in of_kind(records, "skipped"):
        values = [value for name, value in record.items() if name not in ("kind", "reason", "options", "decoding")]
        values += [f"{name}={value}" for name, value in record.get("options", {}).items()]
        reasons.setdefault(record["reason"], []).append(" ".join(map(str, values)))
    lines = []
    for reason, what in reasons.items():
        names, more = list(dict.fromkeys(what))[:MOST_NAMED], len(set(what)) - MOST_NAMED
        lines.append(f"- {reason}: {'; '.join(names)}" + (f"; and {more} more" if more > 0 else ""))
    return ["Left out:\n\n" + "\n".join(lines)] if lines else []


@dataclass(frozen=True)
class Page:
    """The way in which the results of one benchmark are shown."""

    title: str  # heading of the part that documents quote, and of the report unless it has its own
    note: str  # how to read the numbers
    headline: Callable[[Sequence[Record]], str]  # the part that documents quote
    parts: Callable[[Sequence[Record]], list[str]] | None = None  # the report; the headline by default
    report_title: str | None = None  # heading of the report
    about: Callable[[Sequence[Record], str], str] | None = None  # what documents quote about one thing
    last: Callable[[Sequence[Record]], str] | None = None  # end of the report, after what was left out; may be empty
    environment: Callable[[Sequence[Record]], str] = environment_line

    def report(self, records: Sequence[Record]) -> str:
        """The report, with its target, its environment and what was left out."""
        head = [f"# {self.report_title or self.title}", self.environment(records), with_defaults(self.note, records)]
        if target := of_kind(records, "environment")[0].get("settings", {}).get("target"):
            head.insert(1, f"Target: {target}.")
        parts = [self.headline(records)] if self.parts is None else self.parts(records)
        last = "" if self.last is None else self.last(records)
        return "\n\n".join([*head, *parts, *left_out(records), *([last] if last else [])]) + "\n"


def _one_table(kind: str, columns: Columns) -> Callable[[Sequence[Record]], str]:
    return lambda records: table(of_kind(records, kind), columns)


BENCH_NOTE = (
    "Measured with `hf-longspec bench`: medians over turns with the lowest and the highest turn in brackets, ratios "
    "within a turn. tau: tokens per verification, including the target's own, with its 95 % interval over turns."
)
BENCH: Columns = {
    "call": title_of,
    **{name: COLUMNS[name] for name in ("method", "tau", "tokens/s", "x plain loop", "x `generate`", "text")},
}


# By the name of the benchmark, in the order in which a document shows them.
PAGES = {
    "figure": Page(
        "Every kind of draft",
        figure_report.NOTE,
        figure_report.summary,
        figure_report.tables,
        about=figure_report.part,
    ),
    "verification": Page(
        "One verification after a long prefix",
        VERIFICATION_NOTE,
        _one_table("verification", VERIFICATION),
        report_title="One verification",
    ),
    "hybrid": Page("Iterations on hybrid targets", HYBRID_NOTE, _one_table("hybrid", HYBRID)),
    "host": Page("Time of the host for a step", HOST_NOTE, _one_table("host", HOST)),
    "offsets": Page("The target under offsets", OFFSETS_NOTE, _one_table("offsets", OFFSETS)),
    "long": Page("Long generation", LONG_NOTE, long_headline),
    "gpu": Page(
        "On a GPU",
        gpu_report.NOTE,
        gpu_report.gpu_report,
        report_title="GPU",
        about=gpu_report.part,
        last=gpu_report.goals,
        environment=gpu_report.gpu_environment,
    ),
    "bench": Page("Methods on one target", BENCH_NOTE, lambda records: table(rows_of(records), BENCH)),
    "memory": Page("Extra memory", MEMORY_NOTE, memory_headline, memory_tables),
    "acceptance": Page(
        "Tokens per verification (tau)", ACCEPTANCE_NOTE, acceptance_table, report_title="Tokens per verification"
    ),
    "editing": Page("Rounds of an editing task", EDITING_NOTE, _one_table("editing", EDITING)),
    "gate": Page(
        "The gate",
        GATE_NOTE,
        _one_table("gate", {name: GATE[name] for name in GATE_QUOTED}),
        lambda records: [table(of_kind(records, "gate"), GATE)],
    ),
}
