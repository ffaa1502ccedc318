"""`hf-longspec bench`: speed and acceptance of drafts after prompts of several lengths, in one table."""

import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import PreTrainedModel

from hf_longspec import __version__

from ..auditing import EXACT, NEAR_TIE
from ..cli import BUILTIN, CommandError, one_line, options
from ..modeling.plain.modeling_plain import PlainDraftModel
from .env import environment
from .files import Record, claim, replace_file
from .measuring import (
    FAILED,
    HF,
    IDENTICAL,
    NOT_COMPARED,
    PLAIN,
    REFERENCE,
    STATIC,
    HfMethod,
    Measurement,
    endless,
    judge,
    rotated,
    run_call,
    sampling,
    significant,
    summarize,
)
from .models import describe_device, load_models, open_draft
from .progress import Progress, noticing_others, say
from .texts import around_a_message, as_message, cut_windows, encode, read_source

# The first call of a method is slow, on a GPU for each length of a prompt.
WARM_UP_PROMPT, WARM_UP_TOKENS = 256, 8
# The --context of texts that are prompts as they are.
WHOLE = "whole"
# Verdicts, the worst first, with their styles: a row has the worst of its turns.
VERDICTS = dict.fromkeys(FAILED, "bold red") | {NEAR_TIE: "yellow", NOT_COMPARED: "dim", EXACT: "green"}
VERDICTS |= {IDENTICAL: "green", REFERENCE: "dim"}
NOTE = (
    "Medians over turns, in brackets the lowest and the highest; ratios are taken within a turn. tokens/s counts from "
    "the first token to the last, all rows together. tau: tokens per step of the target, its own included."
)


def run(args: SimpleNamespace) -> int:
    args.draft = args.draft or ["ngram"]
    if options.AUTO in args.draft:
        raise CommandError(f"--draft {options.AUTO} chooses a draft, and here drafts are compared. Name them.")
    short = [name_of(name) for name in args.draft]
    if twice := sorted({name for name in short if short.count(name) > 1}):
        raise CommandError(f"--draft: two drafts have the name {twice[0]!r} in the results. Rename a folder.")
    is_whole = args.context == WHOLE
    args.context = [] if is_whole else options.lengths("--context", args.context)
    if is_whole and args.batch > 1:
        raise CommandError(f"--context {WHOLE} --batch {args.batch}: prompts have different lengths. Drop --batch.")
    if args.output is not None:
        claim(args.output, [args.data], overwrite=args.overwrite, suffix=".jsonl")
    options.require_sources({args.data} - {BUILTIN})
    documents, count = read_source(args.data, args.column), args.repeats * args.batch
    interrupted = False
    with load_models(args, args.draft) as loaded:
        if is_whole:
            whole = whole_prompts(loaded.tokenizer, documents, count, args.chat)
            args.context = [int(statistics.median(ids.shape[1] for ids in whole))]
            loaded.require_room("the longest prompt", max(ids.shape[1] for ids in whole), args.max_new_tokens)
            prompts = {args.context[0]: whole}
        else:
            loaded.require_room(f"a prompt of --context {max(args.context)}", max(args.context), args.max_new_tokens)
            cut = {size: prompts_of(loaded.tokenizer, documents, size, count, args.chat) for size in args.context}
            prompts = {size: windows.split(args.batch) for size, windows in cut.items()}
        model = endless(loaded.model)
        drafts = {name: open_draft(full, model) for name, full in zip(short, args.draft, strict=True)}
        static = {STATIC: HfMethod({"cache_implementation": "static"})} if args.static else {}
        methods = {HF: HfMethod(), **static, PLAIN: PlainDraftModel.from_target(model), **drafts}
        bench = Bench(args, model, methods)
        try:
            calls = len(prompts) * len(methods) * args.repeats
            with noticing_others(), Progress(calls, "Measuring", "calls") as progress:
                for context, of_turns in prompts.items():
                    bench.measure(context, of_turns, progress)
        except KeyboardInterrupt:
            print("Interrupted. The turns that ended are shown.", file=sys.stderr)
            interrupted = True
    rows = rows_of(bench.records)
    if args.as_json:
        print(json.dumps({"environment": bench.records[0], "rows": rows}))
    else:
        show(rows)
        say(NOTE)
        say(advice(rows))
    return options.INTERRUPTED if interrupted else int(any(row["text"] in FAILED for row in rows))


def name_of(model: str) -> str:
    """Name in results: a Hub id, or the last part of a folder's path."""
    return Path(model).name if Path(model).is_dir() else model


def prompts_of(tokenizer: Any, documents: Sequence[str], context: int, count: int, chat: bool = False) -> torch.Tensor:
    """`count` prompts of `context` tokens out of the documents, `(count, context)`.

    With `chat`, each is the message of a user, and what the chat template writes around it is part of the prompt.
    """
    before, after = around_a_message(tokenizer) if chat else ("", "")
    head, tail = encode(tokenizer, before), encode(tokenizer, after)
    if (room := context - len(head) - len(tail)) < 1:
        raise CommandError(f"--context {context}: the chat template alone has {context - room} tokens. Pass more.")
    windows = cut_windows([encode(tokenizer, document) for document in documents], room, count)
    return torch.cat([head.expand(count, -1), windows, tail.expand(count, -1)], dim=1)


def whole_prompts(tokenizer: Any, documents: Sequence[str], count: int, chat: bool = False) -> list[torch.Tensor]:
    """`count` documents as they are, `(1, length)` each, from the first to the last at equal distances."""
    chosen = [documents[turn * len(documents) // count] for turn in range(count)]
    texts = [as_message(tokenizer, text) for text in chosen] if chat else chosen
    return [encode(tokenizer, text)[None] for text in texts]


class Bench:
    """Measure all methods in turns; the records, also as lines of `--output`, a turn at a time."""

    def __init__(self, args: SimpleNamespace, model: PreTrainedModel, methods: Mapping[str, Any]):
        self.args, self.model, self.methods = args, model, methods
        self.records: list[Record] = []
        if args.output is not None:
            replace_file(args.output, "")
        named = ("context", "batch", "max_new_tokens", "repeats", "temperature", "chat", "column")
        settings = {name: vars(args)[name] for name in named} | {"dtype": str(model.dtype).removeprefix("torch.")}
        facts = {"device": describe_device(model.device), "hf_longspec": __version__, "settings": settings}
        self.write("environment", **environment(), **facts)

    def write(self, kind: str, **values: Any) -> None:
        self.records.append({"kind": kind, **values})
        if self.args.output is not None:
            with self.args.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(self.records[-1]) + "\n")

    def measure(self, context: int, prompts: Sequence[torch.Tensor], progress: Progress) -> None:
        """Run every method in every turn, each after its own `prompts`; a text is judged before it counts."""
        refused: set[str] = set()
        for turn, ids in enumerate(prompts):
            calls: dict[str, Measurement] = {}
            for name in rotated([*self.methods], turn):
                turns = f"turn {turn + 1} of {self.args.repeats}"
                progress.set_description_str(f"{context} tokens: {name}, {turns}", refresh=False)
                if name not in refused:
                    try:
                        is_on_gpu = self.model.device.type == "cuda"
                        if not turn or (is_on_gpu and ids.shape[1] != context):
                            end = ids if is_on_gpu else ids[:, -WARM_UP_PROMPT:]
                            self._call(name, end, min(WARM_UP_TOKENS, self.args.max_new_tokens), turn)
                        calls[name] = self._call(name, ids, self.args.max_new_tokens, turn)
                    except (torch.OutOfMemoryError, ValueError) as error:
                        refused.add(name)
                        reason = "out of memory" if isinstance(error, torch.OutOfMemoryError) else one_line(error)
                        self.write("skipped", context=context, method=name, reason=reason)
                        say(f"Left out after {context} tokens: {name}: {reason}", stderr=True)
                progress.update()
            for name, call in calls.items():
                self.write(**record_of(call, context, name, turn, self._verdict(name, ids, calls)))

    def _call(self, name: str, ids: torch.Tensor, tokens: int, seed: int) -> Measurement:
        decoding = sampling(self.args.temperature)
        prompt = ids, torch.ones_like(ids)
        return run_call(self.model, self.methods[name], prompt, tokens=tokens, seed=seed, decoding=decoding)

    def _verdict(self, name: str, ids: torch.Tensor, calls: Mapping[str, Measurement]) -> str:
        """The verdict on one text of a turn.

        Greedy texts must be those of `generate`. Sampled ones must be those that the loop without a draft draws from
        the same seed, unless a draft or `generate` uses other random numbers.
        """
        greedy, method = not self.args.temperature, self.methods[name]
        is_drawn = isinstance(method, HfMethod) or (
            "acceptance" in method.settings and method.setting("acceptance") == "rejection"
        )
        reference = calls.get(HF if greedy else PLAIN)
        if reference is None or (is_drawn and not greedy):
            return NOT_COMPARED
        if not greedy and self.model.dtype != torch.float32 and not torch.equal(calls[name].text, reference.text):
            return NOT_COMPARED  # the audit compares with the argmax only
        return judge(self.model, ids.to(self.model.device), calls[name], reference)


def record_of(call: Measurement, context: int, method: str, turn: int, text: str) -> Record:
    """One call for JSON; `text` is the verdict on its text."""
    return {
        "kind": "run",
        "context": context,
        "method": method,
        "turn": turn,
        "text": text,
        "tokens": call.tokens,
        "steps": call.steps,
        "seconds": call.decode_seconds,
        "ttft_seconds": call.ttft_seconds,
    }


def rows_of(records: Iterable[Record]) -> list[Record]:
    """One row per context and method, the baselines first: medians over turns with their range, and the worst verdict.

    A method with a wrong text has no speed.
    """
    calls: dict[tuple[int, str], dict[int, Record]] = {}
    for run in records:
        if run["kind"] == "run":
            calls.setdefault((run["context"], run["method"]), {})[run["turn"]] = run
    speeds = {
        place: {turn: run["tokens"] / max(run["seconds"], 1e-9) for turn, run in own.items()}
        for place, own in calls.items()
    }
    rows = []
    for context, method in sorted(calls, key=lambda place: (place[0], {HF: 0, STATIC: 1, PLAIN: 2}.get(place[1], 3))):
        own = calls[context, method].values()
        tau = sum(run["tokens"] for run in own) / max(1, sum(run["steps"] for run in own))
        text = min((run["text"] for run in own), key=[*VERDICTS].index)
        row = {"context": context, "method": method, "turns": len(own), "tau": significant(tau), "text": text}
        if text not in FAILED:
            speed = speeds[context, method]
            row["tokens_per_second"] = summarize([*speed.values()])
            for name, base in (("ratio_to_generate", HF), ("ratio_to_no_draft", PLAIN)):
                bases = speeds.get((context, base), {})
                ratios = [value / bases[turn] for turn, value in speed.items() if turn in bases]
                row[name] = summarize(ratios) if ratios else None
        rows.append(row)
    return rows


def show(rows: Sequence[Record]) -> None:
    """Print one table of all contexts and methods."""
    table = Table()
    for heading in ("context", "draft", "tokens/s", "x generate", "x no draft", "tau", "text"):
        justify: Any = "left" if heading in ("draft", "text") else "right"
        # in a narrow terminal, long names go on in the next line
        table.add_column(heading, justify=justify, no_wrap=heading != "draft", overflow="fold")
    names = {HF: "generate", STATIC: "static generate", PLAIN: "no draft"}
    for row in rows:
        table.add_row(
            str(row["context"]),
            escape(names.get(row["method"]) or row["method"]),
            f"{row['tokens_per_second']['median']:.1f}" if "tokens_per_second" in row else "",
            *(_shown(row.get(f"ratio_to_{base}")) for base in ("generate", "no_draft")),
            f"{row['tau']:.2f}",
            f"[{VERDICTS[row['text']]}]{row['text']}[/]",
        )
    Console(highlight=False).print(table)


def advice(rows: Sequence[Record]) -> str:
    """The draft to use after each length, as a sentence.

    A draft pays if it is faster than the faster baseline in every turn. Two drafts whose ranges overlap are not told
    apart.
    """
    lengths: dict[str, list[str]] = {}
    for context in dict.fromkeys(row["context"] for row in rows):
        choice = _choice([row for row in rows if row["context"] == context])
        lengths.setdefault(choice, []).append(f"{context:,}")
    parts = [f"after {' and '.join(contexts)} tokens {choice}" for choice, contexts in lengths.items()]
    sentence = "; ".join(parts)
    return f"{sentence[:1].upper()}{sentence[1:]}."


def _choice(rows: Sequence[Record]) -> str:
    gains: dict[str, Record] = {}
    for row in rows:
        ratios = [row[name] for name in ("ratio_to_generate", "ratio_to_no_draft") if row.get(name)]
        if ratios and row["method"] not in (HF, STATIC, PLAIN):
            gains[row["method"]] = min(ratios, key=lambda ratio: ratio["median"])
    if not gains:
        return "no draft has a speed"
    best = max(gains, key=lambda name: gains[name]["median"])
    if gains[best]["count"] < 2:
        return "one turn shows no clear difference"
    if gains[best]["high"] <= 1:
        return "no draft pays"
    close = [name for name, gain in gains.items() if gain["high"] >= gains[best]["low"]]
    if gains[best]["low"] <= 1:
        close.append("no draft")
    return f"use {best}" if close == [best] else f"there is no clear difference between {' and '.join(close)}"


def _shown(ratio: Record | None) -> str:
    if ratio is None:
        return ""
    middle, low, high = (f"{ratio[name]:.2f}" for name in ("median", "low", "high"))
    return middle if low == high else f"{middle}\n({low}-{high})"  # in one line the table would exceed 80 characters
