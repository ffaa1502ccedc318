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
from itertools import product
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_longspec
from benchmarks import harness
from benchmarks.harness import Run, integers, ratios
from benchmarks.pages import COMPILED
from hf_longspec.bench.calls import HF, MODES, PLAIN, Call, HfMethod, endless
from hf_longspec.bench.machine import read_gb_per_second, step_bytes
from hf_longspec.bench.matrix import Cell, Matrix, Method
from hf_longspec.bench.prefill import Decoder, PrefilledPrompts
from hf_longspec.bench.prompts import Prompt
from hf_longspec.bench.report import FAILED, IDENTICAL, REFERENCE, rows_of
from hf_longspec.bench.results import Record, of_kind
from hf_longspec.bench.summaries import significant


class PrefilledMatrix(Matrix):
    """Measure cells of one dtype after prefilled prompts.

    Args:
        prompts ([`PrefilledPrompts`]): In the dtype of the cells.
        options: The other arguments of [`Matrix`].
    """

    def __init__(self, *, prompts: PrefilledPrompts, **options: Any):
        super().__init__(prompts=prompts, **options)
        self.decoder = Decoder(self.model, prompts, self.tokens)

    def windows_of(self, cell: Cell) -> list[slice]:
        """The rows of every turn."""
        return row_windows(len(self.prompts.tokens), cell.batch, self.repeats)

    def prompts_of(self, cell: Cell) -> list[list[Prompt]]:
        """The prompts of every turn, without categories."""
        return [
            [Prompt(row, "") for row in self.prompts.tokens[rows, : cell.context]] for rows in self.windows_of(cell)
        ]

    def call(self, cell: Cell, method: Method, rows: Sequence[torch.Tensor], tokens: int, seed: int) -> Call:
        """One timed call after the prompts of turn `seed`, whose caches are here, in place of `rows`."""
        mode = "greedy" if cell.decoding.greedy else "sample"
        return self.decoder.run(method.how, self.windows_of(cell)[seed], cell.context, mode, seed, tokens)

    def _guarded(self, cell: Cell, method: Method, turn: int, prompts: list[Prompt], warm_up: bool) -> Call | str:
        if warm_up and method.name.endswith(COMPILED):  # after two prompts, as rows grow apart differently
            for seed in range(min(2, self.repeats)):
                self.call(cell, method, [], self.tokens, seed)
        return super()._guarded(cell, method, turn, prompts, warm_up)

    def _audit(self, *_: Any) -> None:
        """Nothing: greedy float32 text stands for other types, whose prefill takes minutes where they are emulated."""


def measure_speed(
    results: Run,
    models: Mapping[str, PreTrainedModel],
    make_methods: Callable[[PreTrainedModel], Mapping[str, Any]],
    prompts: PrefilledPrompts,
    *,
    contexts: Sequence[int],
    batches: Sequence[int],
    dtypes: Sequence[str],
    tokens: int,
    repeats: int,
) -> None:
    """Measure all cells, the most telling first: batch by batch, long contexts before short ones.

    A method whose greedy float32 text is not that of plain `generate`, or was not measured, goes no further.

    Args:
        models (`Mapping[str, PreTrainedModel]`): The target by name of its dtype; "float32" is required.
        make_methods (`Callable`): Gives methods by name for a target; one of them is `PLAIN`, which drafts nothing, and
            one `PLAIN + COMPILED` if others are compiled.
        prompts ([`PrefilledPrompts`]): In float32.
        tokens (`int`): Tokens per row and run.
    """
    bandwidth = read_gb_per_second()
    results.write("ceilings", read_gb_per_second=round(bandwidth, 1))
    rounded = {name: prompts.to(getattr(torch, name)) for name in models}
    methods = {
        name: [Method(HF, HfMethod()), *(Method(*pair) for pair in make_methods(model).items())]
        for name, model in models.items()
    }
    progress = SimpleNamespace(say=results.say, step=lambda count=1: None)
    for batch, context in product(batches, sorted(contexts, reverse=True)):
        right = {method.name for method in methods["float32"]}
        for dtype in dict.fromkeys(["float32", *dtypes]):  # whose texts are compared
            for mode in ("greedy", "sample") if dtype in dtypes else ("greedy",):
                cell, turns = Cell(dtype, context, batch, MODES[mode]), repeats if dtype in dtypes else 1
                if HF not in right:
                    results.skip(f"no float32 text of {HF} to compare with", **cell.key())
                    continue
                chosen = [method for method in methods[dtype] if method.name in right]
                how = {"model": models[dtype], "methods": chosen, "prompts": rounded[dtype], "results": results}
                PrefilledMatrix(**how, tokens=tokens, repeats=turns).measure(cell, progress)
                rows = rows_of(of_kind(results.records, "run", **cell.key()))
                if cell == Cell("float32", context, batch):
                    right = {row["method"] for row in rows if row["text"] in (REFERENCE, IDENTICAL)}
                if dtype in dtypes:
                    floor = step_bytes(models[dtype], context, batch) / (bandwidth * 1e9)
                    write_summaries(results, cell, mode, rows, repeats, floor)


def write_summaries(results: Run, cell: Cell, mode: str, rows: Sequence[Record], repeats: int, floor: float) -> None:
    """One record per method of a cell, from its calls: speed, ratios to the baselines, tau, the share of the floor."""
    what = {"context": cell.context, "batch": cell.batch, "dtype": cell.dtype, "mode": mode}
    runs = of_kind(results.records, "run", **cell.key())
    speeds = {(run["method"], run["turn"]): run["tokens"] / run["decode_seconds"] for run in runs}

    def ratio(name: str, base: str) -> dict[str, float] | None:
        turns = [turn for at, turn in speeds if at == name and (base, turn) in speeds]
        return ratios([speeds[name, t] for t in turns], [speeds[base, t] for t in turns]) if turns else None

    for row in rows:
        name, own = row["method"], [run for run in runs if run["method"] == row["method"]]
        # compiled drafts are compared with the loop whose steps are compiled too
        own_base = name.endswith(COMPILED) and name != PLAIN + COMPILED
        to_hf, to_plain = ratio(name, HF), ratio(name, PLAIN + COMPILED if own_base else PLAIN)
        reason = None
        if row["text"] in FAILED:
            reason = f"it emits another float32 text than {own[0]['compared_with']}"
        elif to_hf is None or to_plain is None or min(len(own), to_hf["count"], to_plain["count"]) < repeats:
            reason = "it, or what it is compared with, had no time for all turns"
        if reason is not None:
            results.skip(f"not timed: {reason}", **what, method=name)
            continue
        found = {
            "tokens_per_second": row["tokens_per_second"],
            "ratio_to_hf": to_hf,
            "ratio_to_plain": to_plain,
            "tau": row["tau"],
            "shares": {part: significant(fmean(run["shares"][part] for run in own)) for part in own[0]["shares"]},
            "draft_state_bytes": row["draft_state_bytes"],
            # tau tokens per floor at most: for the two loops without a draft the share of the floor itself
            "share_of_floor": significant(floor * row["tokens_per_second"]["median"] / cell.batch / row["tau"]),
        }
        if name.endswith(COMPILED) and (eager := ratio(name, name.removesuffix(COMPILED))):
            found["ratio_to_eager"] = eager
        results.write("decoding", **what, method=name, **found)


def row_windows(num_prompts: int, batch: int, repeats: int) -> list[slice]:
    """Choose the prompts that make up the batch of each repeat: all of them in turn.

    >>> row_windows(4, 3, repeats=3)
    [slice(0, 3, None), slice(1, 4, None), slice(0, 3, None)]
    """
    starts = [(repeat * batch) % (num_prompts - batch + 1) for repeat in range(repeats)]
    return [slice(start, start + batch) for start in starts]


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    tokens, origin = harness.load_prompts(args.target, args.data, max(args.contexts), max(args.batches))
    sizes = {"tokens": args.tokens, "repeats": args.repeats}
    with harness.start(args, "engine", {**sizes, **origin}) as results:
        models = {name: harness.load_target(args.target, getattr(torch, name)) for name in {"float32", *args.dtypes}}
        prompts = harness.prefilled(models["float32"], tokens, results)
        sizes |= {"contexts": args.contexts, "batches": args.batches, "dtypes": args.dtypes}
        measure_speed(results, models, lambda model: make_methods(model, args), prompts, **sizes)


def make_methods(model: PreTrainedModel, args: argparse.Namespace) -> dict[str, Any]:
    """transformers' drafters, our baseline, SpecAttn with every number of drafted tokens, LongSpec with every tree."""
    methods: dict[str, Any] = {"hf prompt lookup": HfMethod({"prompt_lookup_num_tokens": 4}, max_batch=1)}
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
    made = harness.parser(__doc__, "engine", minutes=15, repeats=harness.MIN_REPEATS, prompts=True)
    add = made.add_argument
    add("--contexts", type=integers, default="2048,8192,16128", help="default: %(default)s")
    add("--batches", type=integers, default="1,4", help="default: %(default)s")
    add("--dtypes", type=harness.names, default="float32,bfloat16", help="default: %(default)s")
    add("--gammas", type=integers, default="4,6", help="drafted tokens of SpecAttn (default: %(default)s)")
    add("--draft", help="folder or Hub id of a LongSpec draft (default: none)")
    add("--trees", type=harness.trees, default="1+1+1,4+4+4+3,4+16+16+16+16", help="of LongSpec (default: %(default)s)")
    add("--assistant", help="folder or Hub id of an ordinary small model with the target's vocabulary")
    add("--compiled", type=methods_named, default=[], help="compile these too: 'SpecAttn, gamma 4; LongSpec, 1+1'")
    add("--tokens", type=int, default=48, help="per row and run (default: %(default)s)")
    return made.parse_args(arguments)


if __name__ == "__main__":
    main()
