"""What the gate costs and saves: the plain loop, and drafts with the gate and without it, side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from transformers import PreTrainedModel

from .decoding import Decoder, Run
from .engine import PLAIN
from .prefill import PrefilledPrompts, row_windows
from .report_parts import environment_line, left_out, markdown_table, note, of_kind, range_of
from .results import Record, ResultFile
from .summaries import ratios, significant, summarize
from .timing import in_turns

GATED, UNGATED = ", gated", ", ungated"


class GateBenchmark:
    """Measures contexts one after another, one prompt at a time, sampling.

    Args:
        model (`PreTrainedModel`): The target.
        methods (`Mapping[str, DraftModel]`): By name; one of them is `PLAIN`.
        prompts ([`PrefilledPrompts`]): Where decoding starts; one per turn.
        tokens (`int`): Tokens per run.
        repeats (`int`): Turns.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        methods: Mapping[str, Any],
        prompts: PrefilledPrompts,
        *,
        tokens: int,
        repeats: int,
    ):
        self.decoders = {gated: Decoder(model, prompts, tokens, gated=gated) for gated in (False, True)}
        self.ways = {PLAIN: (methods[PLAIN], False)}
        for name, draft in methods.items():
            if name != PLAIN:
                self.ways |= {name + GATED: (draft, True), name + UNGATED: (draft, False)}
        self.prompts = prompts
        self.repeats = repeats

    def measure(self, context: int, results: ResultFile) -> None:
        """One record per way to decode, after a short run of each."""
        windows = row_windows(len(self.prompts.tokens), 1, self.repeats)
        runs: dict[str, list[Run]] = {name: [] for name in self.ways}
        stats: dict[str, Any] = {}
        for draft, gated in self.ways.values():
            self.decoders[gated].run(draft, windows[0], context, "sample", 0, tokens=8)
        for repeat, name in in_turns(list(self.ways), self.repeats):
            draft, gated = self.ways[name]
            runs[name].append(self.decoders[gated].run(draft, windows[repeat], context, "sample", repeat))
            stats[name] = draft.last_speculation
        plain = [run.tokens_per_second for run in runs[PLAIN]]
        for name, turns in runs.items():
            speeds = [run.tokens_per_second for run in turns]
            last = stats[name]
            results.write(
                "gate",
                context=context,
                method=name,
                tokens_per_second=summarize(speeds).to_dict(),
                ratio_to_plain=ratios(speeds, plain).to_dict(),
                tau=significant(last.mean_acceptance_length),
                plain_share=significant(last.num_plain_steps / max(1, last.num_plain_steps + last.num_emitted_tokens)),
                decisions=[asdict(decision) for decision in last.gate_decisions],
            )


def gate_report(records: Sequence[Record]) -> str:
    """The table with its environment."""
    rows = [
        [
            str(row["context"]),
            row["method"],
            range_of(row["tokens_per_second"], 1),
            range_of(row["ratio_to_plain"]),
            f"{row['tau']:.2f}",
            f"{row['plain_share']:.0%}",
            ", ".join(f"{decision['choice']} at {decision['length']}" for decision in row["decisions"]),
        ]
        for row in of_kind(records, "gate")
    ]
    header = ["context", "method", "tokens/s", "x plain loop", "tau", "plain tokens", "decisions"]
    parts = ["# The gate", environment_line(records), note(records), markdown_table(header, rows)]
    return "\n\n".join([*parts, *left_out(records)]) + "\n"
