"""A text of 100,000 tokens: our loop without a draft, TokenSwift, plain `generate` at the marks.

All texts begin after the same prompt with the same seed. benchmarks/README.md describes the method.

    python -m benchmarks.long_generation --draft hub_cards/tiny-tokenswift --tokens 20000
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import AutoModel, PreTrainedModel

import hf_longspec
from benchmarks.decoder import MODES, Decoding
from benchmarks.harness import HUB_CARDS, Run, integers, load_prompts, load_target, parser, start
from benchmarks.random_inputs import dynamic_cache
from hf_longspec.cli.measuring import HF, PLAIN, HfMethod, Measurement, run_call, significant
from hf_longspec.generation.cache import SpeculativeCache
from hf_longspec.generation.sequences import SpeculationStats
from hf_longspec.generation.target import TargetView

NEAR = 1000  # tokens before a mark over which the speed at the mark is taken
WARM_UP = 24  # tokens of a call that compiles what a row will run, before its clock starts
ROOM = 2048  # slots after the last mark, for baselines that go on there
LEVELS = 4  # rows of logits that a draft has, for alpha and beta (Eqs. 4 and 6 of the paper)
# Tokens of the prompt, and of each baseline at every mark; the paper's way to sample.
PROMPT, BASELINE_TOKENS = 2048, 512
MIN_P, PENALTY, PENALTY_WINDOW = 0.1, 1.2, 1024


@dataclass(frozen=True, eq=False)
class LongRow:
    """One run."""

    method: str
    draft: Any
    tokens: int  # new ones
    decoding: Decoding

    def how(self) -> dict[str, Any]:
        mode = "greedy" if self.decoding.greedy else "sample"
        return {"mode": mode, "penalised": self.decoding.penalty is not None}


@dataclass
class Marks:
    """Note the time and the statistics so far at some numbers of tokens; see `on_arrival` of [`TokenClock`]."""

    marks: Sequence[int]  # numbers of tokens, ascending
    counts: Callable[[], SpeculationStats]  # the statistics of the running call
    now: Callable[[], float] = time.perf_counter  # clock in seconds
    times: dict[int, float] = field(default_factory=dict, init=False)
    stats: dict[int, SpeculationStats] = field(default_factory=dict, init=False)

    def __call__(self, tokens: int) -> None:
        mark = next((mark for mark in self.marks if mark not in self.times), tokens + 1)
        if tokens >= mark:
            self.times[mark], self.stats[mark] = self.now(), replace(self.counts())

    def speed(self, first: int, last: int) -> float:
        return significant((last - first) / (self.times[last] - self.times[first]))


@dataclass
class LongBenchmark:
    """Run methods one after another after one prompt, and plain `generate` for a while at every mark."""

    model: PreTrainedModel  # the target, without an end-of-text token
    prompt: torch.Tensor  # `(1, P)`, the prompt of all texts
    marks: Sequence[int]  # numbers of generated tokens at which to measure

    def measure(self, row: LongRow, baselines: Mapping[str, Any], tokens: int, results: Run) -> None:
        for method in (row.draft, *baselines.values()):
            if not isinstance(method, HfMethod) and method.setting("compile") == "compile":
                self._call(method, row, self.prompt, WARM_UP, self._cache(method, row))
        text, cache = self.run(row, results)
        for mark in reversed([mark for mark in self.marks if mark <= row.tokens]):  # each writes after its mark
            length = self.prompt.shape[1] + mark
            for name, method in baselines.items():
                cache.set_lengths([length - 1])
                past = dynamic_cache(cache, length - 1) if isinstance(method, HfMethod) else cache
                speed = significant(self._call(method, row, text[:, :length], tokens, past).tokens_per_second)
                results.write("baseline", method=name, **row.how(), mark=mark, tokens=tokens, tokens_per_second=speed)

    def run(self, row: LongRow, results: Run) -> tuple[torch.Tensor, SpeculativeCache]:
        """Decode one row, write a record per mark; returns the text, prompt included, and the cache."""
        marks = [mark for mark in self.marks if mark <= row.tokens]
        arrivals = Marks(
            sorted({1, *marks, *(max(1, mark - NEAR) for mark in marks)}), lambda: row.draft.last_speculation
        )
        cache = self._cache(row.draft, row)
        call = self._call(row.draft, row, self.prompt, row.tokens, cache, on_arrival=arrivals)
        for mark in marks:
            stats = arrivals.stats[mark]
            logits = max(1, LEVELS * stats.num_spec_steps)
            record = {"mark": mark, "tokens_per_second": arrivals.speed(1, mark)}
            record |= {"tokens_per_second_near": arrivals.speed(max(1, mark - NEAR), mark)}
            shares = {"tau": stats.mean_acceptance_length, "alpha": stats.num_accepted_draft_tokens / logits}
            shares |= {"beta": stats.num_accepted_ngram_tokens / logits}
            record |= {name: significant(share) for name, share in shares.items()}
            results.write("long", method=row.method, **row.how(), **record)
        return torch.cat([self.prompt, call.text], dim=1), cache

    def _call(
        self, method: Any, row: LongRow, prompt: torch.Tensor, tokens: int, cache: Any, **how: Any
    ) -> Measurement:
        if not isinstance(method, HfMethod):
            method.generation_config.gate = False  # speculation itself is measured
        how |= {"decoding": row.decoding.options(), "tokens": tokens, "seed": 0, "cache": cache}
        return run_call(self.model, method, (prompt, torch.ones_like(prompt)), **how)

    def _cache(self, draft: Any, row: LongRow) -> SpeculativeCache:
        """An empty cache with room for the row and the baselines after it."""
        room = self.prompt.shape[1] + row.tokens + ROOM
        return SpeculativeCache(self.model.config, 1, room, tree_slots=draft.num_tree_nodes(TargetView(self.model)))


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    model = load_target(args.target, torch.bfloat16)
    tokens, origin = load_prompts(args.target, args.data, PROMPT, 1)
    rows = make_rows(model, args)
    settings = {"tokens": args.tokens, "compile": args.compile, "dtype": "bfloat16", "near": BASELINE_TOKENS}
    settings |= {"min_p": MIN_P, "penalty": PENALTY, "penalty_window": PENALTY_WINDOW, **origin}
    baselines = {HF: HfMethod(), PLAIN: hf_longspec.PlainDraftModel.from_target(model)}
    marks = sorted({mark for mark in args.marks if mark < args.tokens} | {args.tokens})
    if args.compile:
        for method in (baselines[PLAIN], *(row.draft for row in rows)):
            method.generation_config.compile = "compile"
    benchmark = LongBenchmark(model, tokens, marks)
    with start(args, "long", settings) as results:
        for row in results.in_time(rows, lambda row: {"method": row.method, **row.how()}):
            results.say(f"{row.method}, {row.decoding.to_dict()}: {row.tokens} tokens")
            methods = baselines if row is rows[0] or row.method == PLAIN else {}
            benchmark.measure(row, methods, BASELINE_TOKENS, results)


def make_rows(model: PreTrainedModel, args: argparse.Namespace) -> list[LongRow]:
    """TokenSwift and the plain loop: sampled with the penalty, greedily with it, and sampled without it."""
    draft = AutoModel.from_pretrained(args.draft, dtype=model.dtype)
    methods = {"TokenSwift": draft, PLAIN: hf_longspec.PlainDraftModel.from_target(model)}
    penalty = {"penalty": PENALTY, "window": PENALTY_WINDOW}
    sampled = replace(MODES["sample"], min_p=MIN_P)
    ways = (replace(sampled, **penalty), replace(MODES["greedy"], **penalty), sampled)
    rows = [LongRow(name, method, args.tokens, way) for way in ways for name, method in methods.items()]
    return [row for row in rows if row.how()["mode"] in args.modes and row.method in (args.only or methods)]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    options = parser(__doc__, "long", minutes=40, prompts=True)
    add = options.add_argument
    add("--draft", default=str(HUB_CARDS / "tiny-tokenswift"), help="folder or Hub id")
    add("--only", action="append", help="'TokenSwift' or 'plain loop' (default: both)")
    add("--modes", nargs="+", choices=list(MODES), default=list(MODES), help="default: both")
    add("--compile", action="store_true", help="compile the steps of all our methods, before the clock starts")
    add("--tokens", type=int, default=20_000, help="per row (default: %(default)s)")
    add("--marks", type=integers, default="20000,40000,60000,80000,100000", help="default: %(default)s")
    return options.parse_args(arguments)


if __name__ == "__main__":
    main()
