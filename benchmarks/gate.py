"""The gate on held-out text: the plain loop, and drafts with the gate and without it.

With the gate a draft should be about as fast as the faster one of two: the plain loop, and the same draft without the
gate. The useless draft has random weights; the others are a trained chain, a trained wide tree, and n-grams.
benchmarks/README.md says why all of them advance through the same text in turns, and how the two estimates are made.

    python -m benchmarks.gate
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd
import torch
from transformers import PreTrainedModel

import hf_longspec
from benchmarks import harness
from benchmarks.decoder import PrefilledPrompts
from benchmarks.harness import Run
from benchmarks.pages import GATED, UNGATED
from benchmarks.report import mean_interval
from hf_longspec.cli.files import Record
from hf_longspec.cli.measuring import PLAIN, rotated, significant
from hf_longspec.generation.cache import CACHE_NAME, SpeculativeCache
from hf_longspec.generation.call import Call
from hf_longspec.generation.decoding import Session
from hf_longspec.generation.target import TargetView

# Tokens of a turn: enough that a cold cache at its beginning costs little, and few enough for a fraction of a second.
TURN = 32
# Kinds of steps; a catch-up is a plain step that a drafter observes after a pause.
PLAIN_STEP, CATCH_UP, SPECULATION = "plain", "catch-up", "speculation"

Clocks = tuple[Callable[[], float], Callable[[], float]]
CLOCKS: Clocks = (time.perf_counter, time.process_time)


class SteppedRun:
    """One greedy decoding after the first `context` tokens of a prompt, advanced from outside; one token is out."""

    @torch.no_grad()
    def __init__(
        self,
        model: PreTrainedModel,
        draft: Any,
        prompts: PrefilledPrompts,
        row: int,
        context: int,
        seed: int,
        tokens: int,
    ):
        rows = slice(row, row + 1)
        cache = SpeculativeCache(model.config, 1, context + tokens + 1)
        prompts.fill(cache, rows, context - draft.num_tree_nodes(TargetView(model)))
        prompt = prompts.tokens[rows, :context]
        options: dict[str, Any] = {"do_sample": False, "max_new_tokens": tokens + 1, CACHE_NAME: cache}

        def opened(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs) -> Session:
            processing = logits_processor, stopping_criteria, generation_config
            call = Call(model, draft, input_ids, *processing, None, model_kwargs)
            assert call.why_not() is None
            return Session(call)

        torch.manual_seed(seed)
        # generate() prepares processors and criteria, and returns what it is given
        self.session: Session = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), custom_generate=opened, **options
        )
        self.steps: list[Record] = []  # turn, kind, and seconds by the wall clock and of processor time
        tails = self.session.prefill()
        with self.session.target.attention():
            self.session.seed(tails)

    @property
    def text(self) -> list[int]:
        return self.session.sequences.generated[0].tolist()

    def advance(self, turn: int, tokens: int, clocks: Clocks = CLOCKS) -> None:
        while not self.session.sequences.finished and len(self.session.sequences.generated[0]) <= tokens:
            speculated = self.session.stats.num_spec_steps
            before = [clock() for clock in clocks]
            self.session.iterate()
            wall, cpu = (clock() - start for clock, start in zip(clocks, before, strict=True))
            step = {"turn": turn, "kind": self._kind(speculated), "seconds": wall, "cpu_seconds": cpu}
            self.steps.append(step)

    def _kind(self, speculated: int) -> str:
        """Kind of the last step; `speculated` steps have speculated before it."""
        if self.session.stats.num_spec_steps > speculated:
            return SPECULATION if self.session.drafter.num_nodes > 1 else PLAIN_STEP
        return PLAIN_STEP if self.session.drafter.reuse_graph else CATCH_UP


@torch.no_grad()
def interleave(runs: Mapping[str, SteppedRun], tokens: int, clocks: Clocks = CLOCKS) -> None:
    """Advance runs of one target to `tokens` tokens in turns of `TURN`, every other round in reverse order."""
    with next(iter(runs.values())).session.target.attention():
        for turn, reached in enumerate(range(TURN, tokens + TURN, TURN)):
            names = list(runs) if turn % 2 == 0 else list(runs)[::-1]
            for name in names:
                runs[name].advance(turn, min(reached, tokens), clocks)


WARM_UP_TOKENS = 24


@dataclass
class GateBenchmark:
    """Measure contexts one after another, one prompt at a time."""

    model: PreTrainedModel
    ways: Mapping[str, tuple[Any, bool]]  # drafts by name, and whether they have a gate; `PLAIN` is one of them
    prompts: PrefilledPrompts  # where decoding starts; one per repeat
    tokens: int  # tokens per run, the first one apart
    repeats: int  # texts per context

    def measure(self, context: int, results: Run) -> None:
        """One record per way to decode.

        A step's cost is its time over the median of the plain loop's steps in the same turn: the unit follows the
        machine. Medians of the costs leave out disturbances of single steps, so the accounted time, the number of steps
        of each kind times their median cost, is that of the choice of steps.
        """
        self._repeat(0, context, WARM_UP_TOKENS)
        repeats = [self._repeat(repeat, context, self.tokens) for repeat in range(self.repeats)]
        steps = pd.DataFrame(
            {"text": text, "method": name, **step}
            for text, runs in enumerate(repeats)
            for name, run in runs.items()
            for step in run.steps
        )
        turn = ["text", "turn"]
        steps = steps.join(steps[steps.method == PLAIN].groupby(turn).seconds.median().rename("unit"), on=turn)
        steps["cost"] = steps.seconds / steps.unit
        wall, cpu = (steps.pivot_table(clock, "text", "method", "sum") for clock in ("seconds", "cpu_seconds"))
        for name in self.ways:
            own, last = steps[steps.method == name], repeats[-1][name].session.stats
            kinds = own.groupby("kind", sort=False).cost.agg(steps="size", cost="median")
            accounted = (kinds.steps * kinds.cost).sum() / (steps.method == PLAIN).sum()
            kinds.steps /= len(repeats)
            ungated = name.removesuffix(GATED) + UNGATED
            rivals = [PLAIN, ungated] if name.endswith(GATED) and ungated in wall else [PLAIN]
            base = wall[rivals].sum().idxmin()  # the choice of a perfect gate, as measured
            results.write(
                "gate",
                context=context,
                method=name,
                tokens_per_second=significant(self.tokens * len(repeats) / wall[name].sum()),
                time_over_plain=mean_interval(list(wall[name] / wall[PLAIN])),
                cpu_over_plain=mean_interval(list(cpu[name] / cpu[PLAIN])),
                accounted_over_plain=significant(accounted),
                kinds={kind: {key: significant(value) for key, value in of.items()} for kind, of in kinds.iterrows()},
                faster=base,
                time_over_faster=mean_interval(list(wall[name] / wall[base])),
                tau=significant(last.mean_acceptance_length),
                same_texts=sum(runs[name].text == runs[PLAIN].text for runs in repeats),
                texts=len(repeats),
                decisions=[asdict(decision) for decision in last.gate_decisions],
            )

    def _repeat(self, repeat: int, context: int, tokens: int) -> dict[str, SteppedRun]:
        runs = {}
        for name in rotated(list(self.ways), repeat):  # another way to decode goes first in the next repeat
            draft, gated = self.ways[name]
            draft.generation_config.gate = gated
            row = repeat % len(self.prompts.tokens)
            runs[name] = SteppedRun(self.model, draft, self.prompts, row, context, repeat, tokens)
        interleave(runs, tokens)
        return runs


CHAIN, WIDE = [1, 1], [4, 4, 4, 3]
DRAFT = harness.HUB_CARDS / "tiny-longspec"
PROMPTS, TOKENS = 6, 1000  # tokens per run


def main(arguments: list[str] | None = None) -> None:
    parser = harness.parser(__doc__, "gate", minutes=20, repeats=6, prompts=True)
    parser.add_argument("--contexts", type=harness.integers, default="1024,4096,15872", help="default: %(default)s")
    args = parser.parse_args(arguments)
    model = harness.load_target(args.target, torch.float32)
    tokens, origin = harness.load_prompts(args.target, args.data, max(args.contexts), PROMPTS)
    settings = {"tokens": TOKENS, "repeats": args.repeats, "chain": CHAIN, "wide": WIDE, **origin}
    with harness.start(args, "gate", settings) as results:
        prompts = harness.prefilled(model, tokens, results)
        benchmark = GateBenchmark(model, make_ways(model), prompts, TOKENS, args.repeats)
        for context in results.in_time(sorted(args.contexts), lambda context: {"context": context}):
            benchmark.measure(context, results)


def make_ways(model: PreTrainedModel) -> dict[str, tuple[Any, bool]]:
    """The drafts with their gates; those that are known to be slow have no way without it."""

    def trained(widths: list[int]) -> Any:
        draft = hf_longspec.LongSpecDraftModel.from_pretrained(DRAFT, dtype=model.dtype)
        draft.generation_config.tree_widths = widths
        return draft

    torch.manual_seed(0)  # of the random weights
    chain, wide, ngrams = trained(CHAIN), trained(WIDE), hf_longspec.NgramDraftModel.from_target(model)
    return {
        PLAIN: (hf_longspec.PlainDraftModel.from_target(model), False),
        "random draft" + GATED: (hf_longspec.LongSpecDraftModel.from_target(model), True),
        "trained draft" + GATED: (chain, True),
        "trained draft" + UNGATED: (chain, False),
        "n-grams" + GATED: (ngrams, True),
        "n-grams" + UNGATED: (ngrams, False),
        "trained draft, wide" + GATED: (wide, True),
        "trained draft, wide" + UNGATED: (wide, False),
    }


if __name__ == "__main__":
    main()
