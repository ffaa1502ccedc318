"""Decoding speed on held-out text: transformers' own ways, our loop without a draft, SpecAttn, LongSpec.

Every prompt is prefilled once; each run continues a copy of its cache. Speed is counted from the first token to the
last, for all methods by the same clock. Headline rows sample at temperature 1; greedy text of small models repeats
itself, which flatters every drafter. A method that does not emit the greedy float32 text of plain `generate` is not
timed.

    python -m benchmarks.engine --target hub_cards/tiny-target --draft hub_cards/tiny-longspec

With `--assistant`, an ordinary small model of the same vocabulary drafts in transformers' assisted generation.
"""

import argparse
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_longspec
from benchmarks.harness import (
    Run,
    add_prompts,
    add_repeats,
    integers,
    load_prompts,
    load_target,
    names,
    parser,
    prefilled,
    ratios,
    start,
    trees,
)
from benchmarks.pages import COMPILED
from hf_longspec.bench.calls import HF, MODES, PLAIN, Call, HfMethod, endless
from hf_longspec.bench.machine import read_gb_per_second, step_bytes
from hf_longspec.bench.matrix import Cell
from hf_longspec.bench.prefill import Decoder, PrefilledPrompts
from hf_longspec.bench.summaries import in_turns, significant, summarize

WARM_UP_TOKENS = 8
# A loop without a draft takes equally long for every token: a part of the tokens is enough.
SHORTER = 3


@dataclass(kw_only=True)
class EngineBenchmark:
    """Measure cells one after another.

    Args:
        models (`Mapping[str, PreTrainedModel]`): The target by name of its dtype; "float32" is required.
        make_drafts (`Callable`): Gives drafts by name for a target; one of them is `PLAIN`, which drafts nothing, and
            one `PLAIN + COMPILED` if others are compiled.
        prompts ([`PrefilledPrompts`]): In float32.
        tokens (`int`): Tokens per row and run; a third of them where every step gives one token.
        repeats (`int`): Turns.
        bandwidth (`float`): Memory bandwidth in 10^9 bytes per second, for the share of the floor.
    """

    models: Mapping[str, PreTrainedModel]
    make_drafts: Callable[[PreTrainedModel], Mapping[str, Any]]
    prompts: PrefilledPrompts
    tokens: int
    repeats: int
    bandwidth: float

    def __post_init__(self) -> None:
        self.decoders = {
            name: Decoder(model, self.prompts.to(getattr(torch, name)), self.tokens)
            for name, model in self.models.items()
        }
        self.methods = {name: {HF: HfMethod(), **self.make_drafts(model)} for name, model in self.models.items()}
        self._checked: dict[tuple[int, int], str | None] = {}

    def measure(self, cell: Cell, results: Run) -> None:
        """Check, then time, then write one record per mode and method, or the reason for leaving the cell out."""
        what = {"context": cell.context, "batch": cell.batch, "dtype": cell.dtype}
        if not results.has_time(**what):
            return
        windows = row_windows(len(self.prompts.tokens), cell.batch, self.repeats)
        results.say(f"{cell.place}: comparing the float32 greedy text of all methods")
        if (differing := self.differing_text(cell, windows[0])) is not None:
            results.skip(f"not timed: {differing}", **what)
            return
        self.compile_steps(cell, windows, results)
        expected = self.expected_seconds(cell, windows[0])
        if not results.has_time(expected, **what):
            return
        results.say(f"{cell.place}: timing, about {expected:.0f} s")
        runs = {mode: self.timed_runs(cell, windows, mode) for mode in MODES}
        if cell.dtype == "float32" and (differing := _first_difference(runs["greedy"])) is not None:
            results.skip(f"times dropped: {differing}", **what)
            return
        for mode, by_name in runs.items():
            for name, record in self.summaries(cell, by_name).items():
                results.write("decoding", **what, mode=mode, method=name, **record)

    def differing_text(self, cell: Cell, rows: slice) -> str | None:
        """Where the float32 greedy text of a method differs from that of plain `generate`, or None."""
        key = cell.context, cell.batch
        if key not in self._checked:
            decoder, methods = self.decoders["float32"], self._methods("float32", cell.batch)
            runs = {name: [decoder.run(draft, rows, cell.context, "greedy", 0)] for name, draft in methods.items()}
            self._checked[key] = _first_difference(runs)
        return self._checked[key]

    def compile_steps(self, cell: Cell, windows: Sequence[slice], results: Run) -> None:
        """Run what will be timed once, where it compiles: after every prompt, as rows grow apart differently."""
        for name, method in self._methods(cell.dtype, cell.batch).items():
            if name.endswith(COMPILED):
                results.say(f"{cell.place}: compiling {name.removesuffix(COMPILED)}")
                for mode, rows in ((mode, rows) for mode in MODES for rows in windows[:2]):
                    self.decoders[cell.dtype].run(method, rows, cell.context, mode, 0, self._tokens(name))

    def expected_seconds(self, cell: Cell, rows: slice) -> float:
        """Estimate for one cell, from a short run of every method, which also warms up."""
        decoder, total = self.decoders[cell.dtype], 0.0
        for name, draft in self._methods(cell.dtype, cell.batch).items():
            run = decoder.run(draft, rows, cell.context, "sample", 0, tokens=WARM_UP_TOKENS)
            total += run.decode_seconds / run.tokens * cell.batch * self._tokens(name)
        return total * self.repeats * len(MODES)

    def timed_runs(self, cell: Cell, windows: Sequence[slice], mode: str) -> dict[str, list[Call]]:
        """The runs of every method, in turns; in one turn all methods continue the same prompts from one seed."""
        decoder, methods = self.decoders[cell.dtype], self._methods(cell.dtype, cell.batch)
        runs: dict[str, list[Call]] = {name: [] for name in methods}
        for repeat, name in in_turns(list(methods), self.repeats):
            run = decoder.run(methods[name], windows[repeat], cell.context, mode, repeat, self._tokens(name))
            runs[name].append(run)
        return runs

    def _methods(self, dtype: str, batch: int) -> dict[str, Any]:
        """The methods that decode `batch` rows."""
        most = {name: getattr(method, "max_batch", None) for name, method in self.methods[dtype].items()}
        return {name: self.methods[dtype][name] for name, limit in most.items() if limit is None or batch <= limit}

    def _tokens(self, name: str) -> int:
        return max(2, self.tokens // SHORTER) if name in (HF, PLAIN, PLAIN + COMPILED) else self.tokens

    def summaries(self, cell: Cell, runs: Mapping[str, Sequence[Call]]) -> dict[str, dict[str, Any]]:
        """Speed, ratios to both baselines, tau and the share of the bandwidth floor of every method."""
        speeds = {name: [run.tokens_per_second for run in turns] for name, turns in runs.items()}
        floor = step_bytes(self.models[cell.dtype], cell.context, cell.batch) / (self.bandwidth * 1e9)
        found = {}
        for name, turns in runs.items():
            speed = summarize(speeds[name])
            tau = sum(run.tokens for run in turns) / sum(run.steps for run in turns)
            found[name] = {
                "tokens_per_second": speed,
                "ratio_to_hf": ratios(speeds[name], speeds[HF]),
                "ratio_to_plain": ratios(speeds[name], speeds[_baseline(name)]),
                "tau": significant(tau),
                "shares": _mean_shares(turns),
                "draft_state_bytes": max(run.draft_state_bytes for run in turns),
                # tau tokens per floor at most: for the two loops without a draft the share of the floor itself
                "share_of_floor": significant(floor * speed["median"] / cell.batch / tau),
            }
            if (eager := name.removesuffix(COMPILED)) != name and eager in speeds:
                found[name]["ratio_to_eager"] = ratios(speeds[name], speeds[eager])
        return found


def _baseline(name: str) -> str:
    """The baseline of a method: the loop without a draft, compiled if the method is."""
    return PLAIN + COMPILED if name.endswith(COMPILED) and name != PLAIN + COMPILED else PLAIN


def _mean_shares(turns: Sequence[Call]) -> dict[str, float]:
    return {name: significant(sum(run.shares[name] for run in turns) / len(turns)) for name in turns[0].shares}


def _first_difference(runs: Mapping[str, Sequence[Call]]) -> str | None:
    for name, turns in runs.items():
        for turn, (run, truth) in enumerate(zip(turns, runs[HF], strict=True)):
            common = min(run.text.shape[1], truth.text.shape[1])
            differs = run.text[:, :common] != truth.text[:, :common]
            if bool(differs.any()):
                row, place = differs.nonzero()[0].tolist()
                return f"{name} emits another float32 greedy text than {HF} (turn {turn}, row {row}, token {place})"
    return None


def row_windows(num_prompts: int, batch: int, repeats: int) -> list[slice]:
    """Choose the prompts that make up the batch of each repeat: all of them in turn.

    >>> row_windows(4, 3, repeats=3)
    [slice(0, 3, None), slice(1, 4, None), slice(0, 3, None)]
    """
    starts = [(repeat * batch) % (num_prompts - batch + 1) for repeat in range(repeats)]
    return [slice(start, start + batch) for start in starts]


def order_of_cells(contexts: Sequence[int], batches: Sequence[int], dtypes: Sequence[str]) -> list[Cell]:
    """Most telling first: batch by batch, long contexts before short ones."""
    return [
        Cell(dtype, context, batch)
        for batch in batches
        for context in sorted(contexts, reverse=True)
        for dtype in dtypes
    ]


COMPILED_HELP = (
    "drafts to measure with compiled steps too, and the plain loop with them: 'SpecAttn, gamma 4; LongSpec, 1+1'"
)
TREES_HELP = "nodes per level of LongSpec's trees (default: 1+1+1,4+4+4+3,4+16+16+16+16)"


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    tokens, origin = load_prompts(args.target, args.data, max(args.contexts), max(args.batches))
    settings = {"target": Path(args.target).name, "tokens": args.tokens, "repeats": args.repeats, **origin}
    with start(args, "engine", settings) as results:
        bandwidth = read_gb_per_second()
        results.write("ceilings", read_gb_per_second=round(bandwidth, 1))
        models = {name: load_target(args.target, getattr(torch, name)) for name in {"float32", *args.dtypes}}
        prompts = prefilled(models["float32"], tokens, results)
        benchmark = EngineBenchmark(
            models=models,
            make_drafts=lambda model: make_methods(model, args),
            prompts=prompts,
            tokens=args.tokens,
            repeats=args.repeats,
            bandwidth=bandwidth,
        )
        for cell in order_of_cells(args.contexts, args.batches, args.dtypes):
            benchmark.measure(cell, results)


def make_methods(model: PreTrainedModel, args: argparse.Namespace) -> dict[str, Any]:
    """transformers' drafters, our baseline, SpecAttn with every number of drafted tokens, LongSpec with every tree."""
    lookup = {"prompt_lookup_num_tokens": args.lookup_tokens}
    methods: dict[str, Any] = {"hf prompt lookup": HfMethod(lookup, max_batch=1)}
    if args.assistant:
        assistant = endless(AutoModelForCausalLM.from_pretrained(args.assistant, dtype=model.dtype).eval())
        methods["hf assisted"] = HfMethod({"assistant_model": assistant}, max_batch=1)
    methods[PLAIN] = hf_longspec.PlainDraftModel.from_target(model)
    for gamma in args.gammas:
        draft = hf_longspec.SpecAttnDraftModel.from_target(model, num_assistant_tokens=gamma)
        methods[f"SpecAttn, gamma {gamma}"] = draft
    for widths in args.trees if args.draft else ():
        draft = hf_longspec.LongSpecDraftModel.from_pretrained(args.draft, dtype=model.dtype)
        draft.generation_config.tree_widths = widths
        methods[f"LongSpec, {'+'.join(map(str, widths))}"] = draft
    return methods | compiled(methods, args.compiled)


def compiled(methods: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """The same drafts with compiled steps, the baseline first."""
    twins = {}
    for name in (PLAIN, *names) if names else ():
        if name not in methods:
            raise ValueError(f"--compiled {name!r}: expected some of {', '.join(methods)}, separated by semicolons.")
        twin = copy.copy(methods[name])
        twin.generation_config = copy.deepcopy(twin.generation_config)
        twin.generation_config.compile = "compile"
        twins[name + COMPILED] = twin
    return twins


def methods_named(text: str) -> list[str]:
    """Names of methods.

    >>> methods_named("SpecAttn, gamma 4; LongSpec, 1+1+1")
    ['SpecAttn, gamma 4', 'LongSpec, 1+1+1']
    """
    return [name.strip() for name in text.split(";")]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    made = parser(__doc__, "engine", minutes=15)
    add_repeats(made)
    add_prompts(made)
    made.add_argument("--contexts", type=integers, default=[2048, 8192, 16128], help="default: 2048,8192,16128")
    made.add_argument("--batches", type=integers, default=[1, 4], help="default: 1,4")
    made.add_argument("--dtypes", type=names, default=["float32", "bfloat16"], help="default: float32,bfloat16")
    made.add_argument("--gammas", type=integers, default=[4, 6], help="drafted tokens of SpecAttn (default: 4,6)")
    made.add_argument("--draft", help="folder or Hub id of a LongSpec draft (default: none)")
    made.add_argument("--trees", type=trees, default=[[1, 1, 1], [4, 4, 4, 3], [4, 16, 16, 16, 16]], help=TREES_HELP)
    made.add_argument("--assistant", help="folder or Hub id of an ordinary small model with the target's vocabulary")
    made.add_argument("--compiled", type=methods_named, default=[], help=COMPILED_HELP)
    made.add_argument("--lookup-tokens", type=int, default=4, help="of transformers' prompt lookup (default: 4)")
    made.add_argument("--tokens", type=int, default=48, help="per row and run (default: %(default)s)")
    return made.parse_args(arguments)


if __name__ == "__main__":
    main()
