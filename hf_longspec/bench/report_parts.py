"""What all reports are made of: tables, the line about the environment, notes, what was left out."""

from collections.abc import Sequence
from typing import Any

from .results import Record

NOTES = {
    "engine": (
        "Tokens per second of all rows together, from the first token to the last, on a cache that was prefilled "
        "before; median of interleaved repeats, lowest and highest in brackets, ratios taken within a repeat. `hf "
        "generate` is plain `model.generate` (DynamicCache, sdpa); plain loop is ours without a draft. Ratios (x) "
        "are to `generate`, unless it says plain (the plain loop, compiled where the method is) or eager (the same "
        "method, not compiled). tau: tokens per verification, the target's own included. Floor: reading weights and "
        "cache once from memory; a model that fits into the processor's cache can be below it."
    ),
    "verification": (
        "Milliseconds for one layer (attention) and for the whole model (forward), medians of interleaved repeats; "
        "ratio: transformers' time over ours, lowest and highest in brackets. Transformers runs its sdpa attention "
        "with a 4-D mask on a DynamicCache; for a single node, as in plain decoding, without a mask. Error: "
        "attention against float64, logits of one forward against the other's."
    ),
    "draft_state": (
        "Bytes that the draft keeps for one row beside the target's cache, bytes of that cache, and the median time to "
        "draft one tree, on a random model of 3 layers."
    ),
    "offsets": (
        "Cross-entropy in nats per token of held-out windows whose positions behind the anchored ones are moved; mean "
        "over windows with its 95 % interval, differences window by window."
    ),
    "long": (
        "One run per row, decoding only. tokens/s: from the first token to the mark, x plain: over that of the plain "
        "loop, as in the paper. Near: over the 1,000 tokens before the mark, compared with the plain loop and with "
        "plain `model.generate` (DynamicCache, sdpa) going on behind it. tau: tokens per verification; alpha and beta: "
        "accepted tokens, and those that n-grams alone proposed, over the rows of logits of a draft (Eqs. 4 and 6 of "
        "the paper, whose beta credits ties with the heads too). Distinct-n: different n-grams over all, mean over "
        "windows of 1,000 tokens / whole text."
    ),
    "ngram": (
        "Drafts from the text itself, one row at a time. tau: tokens emitted per verification, the target's own "
        "included; mean over prompts with its 95 % interval, in brackets the difference to transformers' prompt "
        "lookup with its default settings, prompt by prompt. Sampled texts differ between transformers and us, as "
        "they draw otherwise. Speeds: tokens per second from the first token to the last, median of interleaved "
        "repeats, lowest and highest in brackets; reading the prompt once is outside of it, transformers' search "
        "through the whole text in every step is inside."
    ),
    "gpu": (
        "Milliseconds, median of the repeats with the lowest and highest. The target has random weights behind random "
        "keys and values. Floors are computed from the ceilings measured in the same run. Error: relative, of "
        "attention against float64, of a forward against transformers' logits. c: time of a step without a draft over "
        "that of an iteration; c times the tau of a paper is what that tau would give here, not a measured speed-up. "
        "Timed by: graph (replay of a CUDA graph), events (calls between CUDA events, launches included), wall (host "
        "clock)."
    ),
    "memory": (
        "Peak of a call of `generate` beyond weights, keys and values, and its share of the keys and values: tensors "
        "and scratch buffers as torch's allocator reports them, numpy's buffers and Python's objects as tracemalloc "
        "does. Decoding: three tokens behind a full cache. Prefill: the last chunk of a prompt, `hf generate` with the "
        "same chunks. Bounds: what the method took at the smallest context, plus what may grow with the text; for "
        "SpecAttn what the loop without a draft took, its selected entries and 0.8 % of the cache for scores; for the "
        "prefill what `hf generate` took, plus what may grow with the text."
    ),
    "gate": (
        "All ways to decode advance in turns of a few tokens through the same texts, and every step is timed. Time "
        "over plain loop: of all steps, mean over texts with its 95 % interval; CPU time: the same by the process's "
        "own clock. Accounted: exact counts of steps times the median cost of each kind, measured in plain steps of "
        "the same turn. Over the faster one: time over that of the plain loop or of the draft without a gate, "
        "whichever is faster. Same text: how many texts are those of the plain loop. Steps: of each kind per text; a "
        "catch-up is a plain step that is shown to a drafter behind its rest. Decisions and tau (of steps that "
        "speculate) are those of the last text."
    ),
    "acceptance": (
        "tau: tokens emitted per verification, the target's own included; mean over prompts with its 95 % "
        "interval. In brackets: difference to the first row of the same mode, prompt by prompt, with its 95 % "
        "interval. Settings not named are the defaults."
    ),
}


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table.

    >>> print(markdown_table(["a", "b"], [["1", "2"]]))
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    first, *others = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    return "\n".join([first, "|" + "---|" * len(header), *others])


def of_kind(records: Sequence[Record], kind: str) -> list[Record]:
    """The records of one kind."""
    return [record for record in records if record["kind"] == kind]


def environment_line(records: Sequence[Record]) -> str:
    """Machine, versions, commit, date and command in one paragraph."""
    found = of_kind(records, "environment")[0]
    native = {True: "native bfloat16", False: "no native bfloat16", None: "bfloat16 support unknown"}
    parts = [
        found["cpu"],
        f"{found['cores']} cores, {found['usable_cores']} usable, {found['threads']} used",
        native[found["native_bfloat16"]],
        *(f"{record['read_gb_per_second']} GB/s read" for record in of_kind(records, "ceilings")),
        f"torch {found['torch']}",
        f"transformers {found['transformers']}",
        f"commit {found['commit']}",
        f"load average {found['load_average']} at the start",
        found["date"],
    ]
    state = "" if of_kind(records, "end") else " The run was not finished."
    return f"{', '.join(parts)}: `{found['command']}`.{state}"


def range_of(summary: dict[str, Any], digits: int = 2) -> str:
    """A median with its lowest and highest value."""
    return f"{summary['median']:.{digits}f} ({summary['low']:.{digits}f}-{summary['high']:.{digits}f})"


def left_out(records: Sequence[Record]) -> list[str]:
    """What was not measured, one line per reason."""
    reasons: dict[str, list[str]] = {}
    for record in of_kind(records, "skipped"):
        values = [value for name, value in record.items() if name not in ("kind", "reason", "options")]
        values += [f"{name}={value}" for name, value in record.get("options", {}).items()]
        reasons.setdefault(record["reason"], []).append(" ".join(map(str, values)))
    lines = [f"- {reason}: {'; '.join(what)}" for reason, what in reasons.items()]
    return ["Left out:\n\n" + "\n".join(lines)] if lines else []


def note(records: Sequence[Record]) -> str:
    """How the numbers of a result file are to be read."""
    found = of_kind(records, "environment")[0]
    defaults = found.get("settings", {}).get("defaults", {})
    named = ", ".join(f"{name}={value}" for name, value in defaults.items())
    return NOTES[found["benchmark"]] + (f" Defaults: {named}." if named else "")


def half_width(interval: dict[str, Any], digits: int = 2) -> str:
    """Half of a confidence interval."""
    return f"{(interval['high'] - interval['low']) / 2:.{digits}f}"
