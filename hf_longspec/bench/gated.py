"""What the gate costs and saves: the plain loop, and drafts with the gate and without it, within the same minutes.

The question is a few per cent, and a machine varies by more. So there are two answers: times of decodings that took
turns, and an account of their steps, see `interleaved.py`.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from transformers import PreTrainedModel

from .engine import PLAIN
from .interleaved import SteppedRun, accounted, interleave
from .prefill import PrefilledPrompts
from .report_parts import environment_line, left_out, markdown_table, note, of_kind
from .results import Record, ResultFile
from .summaries import mean_interval, significant

GATED, UNGATED = ", gated", ", ungated"
WARM_UP_TOKENS = 24


class GateBenchmark:
    """Measures contexts one after another, one prompt at a time.

    Args:
        model (`PreTrainedModel`): The target.
        methods (`Mapping[str, DraftModel]`): By name; one of them is `PLAIN`.
        prompts ([`PrefilledPrompts`]): Where decoding starts; one per repeat.
        tokens (`int`): Tokens per run, the first one apart.
        repeats (`int`): Texts per context.
        mode (`str`): `sample` or `greedy`.
        gated_only (`Collection[str]`, *optional*): Methods that are known to be slow without the gate.
        ungated_only (`Collection[str]`, *optional*): Methods that others are compared with.
        choices (`Mapping[str, Sequence[str]]`, *optional*): Of a method whose gate chooses among trees, the
            methods that take one of them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        methods: Mapping[str, Any],
        prompts: PrefilledPrompts,
        *,
        tokens: int,
        repeats: int,
        mode: str,
        gated_only: Collection[str] = (),
        ungated_only: Collection[str] = (),
        choices: Mapping[str, Sequence[str]] | None = None,
    ):
        self.model = model
        self.prompts = prompts
        self.tokens = tokens
        self.repeats = repeats
        self.mode = mode
        self.choices = choices or {}
        self.ways = {PLAIN: (methods[PLAIN], False)}
        for name, draft in methods.items():
            if name != PLAIN and name not in ungated_only:
                self.ways[name + GATED] = draft, True
            if name != PLAIN and name not in gated_only:
                self.ways[name + UNGATED] = draft, False

    def measure(self, context: int, results: ResultFile) -> None:
        """One record per way to decode."""
        self._repeat(0, context, WARM_UP_TOKENS)
        repeats = [self._repeat(repeat, context, self.tokens) for repeat in range(self.repeats)]
        plain = [runs[PLAIN].steps for runs in repeats]
        wall = {name: [_seconds(runs[name].steps) for runs in repeats] for name in self.ways}
        for name in self.ways:
            steps = [runs[name].steps for runs in repeats]
            last = repeats[-1][name].session.stats
            ratio, found = accounted(steps, plain)
            kinds = {kind: {key: significant(value) for key, value in of.items()} for kind, of in found.items()}
            base = self._faster_without_gate(name, wall)
            results.write(
                "gate",
                context=context,
                method=name,
                tokens_per_second=significant(self.tokens * len(repeats) / sum(wall[name])),
                time_over_plain=_over(wall[name], wall[PLAIN]),
                cpu_over_plain=_over([_cpu(run) for run in steps], [_cpu(run) for run in plain]),
                accounted_over_plain=significant(ratio),
                kinds=kinds,
                faster=base,
                time_over_faster=_over(wall[name], wall[base]),
                tau=significant(last.mean_acceptance_length),
                same_texts=sum(runs[name].text == runs[PLAIN].text for runs in repeats),
                texts=len(repeats),
                decisions=[asdict(decision) for decision in last.gate_decisions],
            )

    def _repeat(self, repeat: int, context: int, tokens: int) -> dict[str, SteppedRun]:
        runs = {}
        # whoever goes first in a turn, another one does in the next repeat
        names = list(self.ways)[repeat % len(self.ways) :] + list(self.ways)[: repeat % len(self.ways)]
        for name in names:
            draft, gated = self.ways[name]
            draft.generation_config.gate = gated
            row = repeat % len(self.prompts.tokens)
            runs[name] = SteppedRun(
                self.model, draft, self.prompts, row, context, mode=self.mode, seed=repeat, tokens=tokens
            )
        interleave(runs, tokens)
        return runs

    def _faster_without_gate(self, name: str, wall: Mapping[str, Sequence[float]]) -> str:
        """What a gate that knows everything would always take, as measured: the plain loop, or one of the trees."""
        if not name.endswith(GATED):
            return PLAIN
        method = name.removesuffix(GATED)
        ungated = [one + UNGATED for one in self.choices.get(method, [method])]
        return min((way for way in (PLAIN, *ungated) if way in wall), key=lambda way: sum(wall[way]))


def _seconds(steps: Sequence[Any]) -> float:
    return sum(step.seconds for step in steps)


def _cpu(steps: Sequence[Any]) -> float:
    return sum(step.cpu_seconds for step in steps)


def _over(times: Sequence[float], base: Sequence[float]) -> dict[str, float]:
    """Mean ratio over texts with its interval."""
    return mean_interval([a / b for a, b in zip(times, base, strict=True)]).to_dict()


def gate_report(records: Sequence[Record]) -> str:
    """The table with its environment."""
    rows = [
        [
            str(row["context"]),
            row["method"],
            f"{row['tokens_per_second']:.1f}",
            _percent(row["time_over_plain"]),
            _percent(row["cpu_over_plain"]),
            f"{row['accounted_over_plain'] - 1:+.1%}",
            f"{_percent(row['time_over_faster'])} over {row['faster']}" if row["method"].endswith(GATED) else "",
            f"{row['same_texts']}/{row['texts']}",
            f"{row['tau']:.2f}",
            ", ".join(f"{kind['steps']:.0f} {name} at {kind['cost']:.2f}" for name, kind in row["kinds"].items()),
            ", ".join(f"{decision['choice']} at {decision['length']}" for decision in row["decisions"]),
        ]
        for row in of_kind(records, "gate")
    ]
    header = ["context", "method", "tokens/s", "time over plain loop", "CPU time", "accounted", "over the faster one"]
    header += ["same text", "tau", "steps, cost in plain steps", "decisions"]
    parts = ["# The gate", environment_line(records), note(records), markdown_table(header, rows)]
    return "\n\n".join([*parts, *left_out(records)]) + "\n"


def _percent(interval: dict[str, Any]) -> str:
    """A ratio as a difference in per cent, with half of its interval."""
    return f"{interval['mean'] - 1:+.1%} ± {(interval['high'] - interval['low']) / 2:.1%}"
