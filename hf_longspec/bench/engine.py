"""Decoding speed of plain `generate`, of our loop without a draft, and with drafts, on one prefilled cache."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from .ceilings import step_bytes
from .decoding import MODES, Decoder, HfMethod, Run
from .prefill import PrefilledPrompts, row_windows
from .progress import Progress
from .results import ResultFile
from .summaries import ratios, significant, summarize
from .timing import in_turns

HF, PLAIN = "hf generate", "plain loop"
# Behind the name of a method: the same with compiled steps.
COMPILED = ", compiled"
WARM_UP_TOKENS = 8
# A loop without a draft takes equally long for every token: a part of the tokens tells as much as all of them.
SHORTER = 3

# What makes drafts for a target, by name. It is handed in, as this room does not know the room of the drafts.
MakeDrafts = Callable[[PreTrainedModel], Mapping[str, Any]]


@dataclass(frozen=True)
class Cell:
    """One row of the matrix: `context` tokens per prompt, `batch` prompts, weights and cache in `dtype`."""

    context: int
    batch: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}, {self.context} tokens, batch {self.batch}"


class EngineBenchmark:
    """Measures cells one after another.

    Args:
        models (`Mapping[str, PreTrainedModel]`): The target by name of its dtype; "float32" is required.
        make_drafts (`Callable`): Gives drafts by name for a target; one of them is `PLAIN`, which drafts nothing, and
            one `PLAIN + COMPILED` if others are compiled.
        prompts ([`PrefilledPrompts`]): In float32.
        tokens (`int`): Tokens per row and run; a third of them where every step gives one token.
        repeats (`int`): Turns.
        bandwidth (`float`): Memory bandwidth in 10^9 bytes per second, for the share of the floor.
    """

    def __init__(
        self,
        models: Mapping[str, PreTrainedModel],
        make_drafts: MakeDrafts,
        prompts: PrefilledPrompts,
        *,
        tokens: int,
        repeats: int,
        bandwidth: float,
    ):
        self.models = models
        self.prompts = prompts
        self.repeats = repeats
        self.bandwidth = bandwidth
        self.decoders = {
            name: Decoder(model, prompts.to(getattr(torch, name)), tokens) for name, model in models.items()
        }
        self.methods: dict[str, dict[str, Any]] = {
            name: {HF: HfMethod(), **make_drafts(model)} for name, model in models.items()
        }
        self._checked: dict[tuple[int, int], str | None] = {}

    def measure(self, cell: Cell, results: ResultFile, progress: Progress) -> None:
        """Check, then time, then write one record per mode and method; or say why not."""
        what = {"context": cell.context, "batch": cell.batch, "dtype": cell.dtype}
        if not results.guard.left:
            results.skip("no time left", **what)
            return
        windows = row_windows(len(self.prompts.tokens), cell.batch, self.repeats)
        progress.say(f"{cell}: comparing the float32 greedy text of all methods")
        differing = self.differing_text(cell, windows[0])
        if differing is not None:
            results.skip(f"not timed: {differing}", **what)
            progress.say(f"{cell}: NOT TIMED, {differing}")
            return
        self.compile_steps(cell, windows, progress)
        expected = self.expected_seconds(cell, windows[0])
        if not results.guard.fits(expected):
            results.skip(f"it would take {expected:.0f} s and {results.guard.left:.0f} s are left", **what)
            progress.say(f"{cell}: left out, it would take {expected:.0f} s")
            return
        progress.say(f"{cell}: timing, about {expected:.0f} s")
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

    def compile_steps(self, cell: Cell, windows: Sequence[slice], progress: Progress) -> None:
        """Run what will be timed once, where it compiles: behind every prompt, as rows grow apart differently."""
        for name, method in self._methods(cell.dtype, cell.batch).items():
            if name.endswith(COMPILED):
                progress.say(f"{cell}: compiling {name.removesuffix(COMPILED)}")
                for mode, rows in ((mode, rows) for mode in MODES for rows in windows[:2]):
                    self.decoders[cell.dtype].run(method, rows, cell.context, mode, 0, self._tokens(name))

    def expected_seconds(self, cell: Cell, rows: slice) -> float:
        """Estimate for one cell, from a short run of every method, which also warms up."""
        decoder, total = self.decoders[cell.dtype], 0.0
        for name, draft in self._methods(cell.dtype, cell.batch).items():
            run = decoder.run(draft, rows, cell.context, "sample", 0, tokens=WARM_UP_TOKENS)
            total += run.seconds / run.tokens * cell.batch * self._tokens(name)
        return total * self.repeats * len(MODES)

    def timed_runs(self, cell: Cell, windows: Sequence[slice], mode: str) -> dict[str, list[Run]]:
        """The runs of every method, in turns; in one turn all methods continue the same prompts from one seed."""
        decoder, methods = self.decoders[cell.dtype], self._methods(cell.dtype, cell.batch)
        runs: dict[str, list[Run]] = {name: [] for name in methods}
        for repeat, name in in_turns(list(methods), self.repeats):
            run = decoder.run(methods[name], windows[repeat], cell.context, mode, repeat, self._tokens(name))
            runs[name].append(run)
        return runs

    def _methods(self, dtype: str, batch: int) -> dict[str, Any]:
        """The methods that decode `batch` rows."""
        most = {name: getattr(method, "max_batch", None) for name, method in self.methods[dtype].items()}
        return {name: self.methods[dtype][name] for name, limit in most.items() if limit is None or batch <= limit}

    def _tokens(self, name: str) -> int:
        tokens = self.decoders["float32"].tokens
        return max(2, tokens // SHORTER) if name in (HF, PLAIN, PLAIN + COMPILED) else tokens

    def summaries(self, cell: Cell, runs: Mapping[str, Sequence[Run]]) -> dict[str, dict[str, Any]]:
        """Speed, ratios to both baselines, tau and the share of the bandwidth floor of every method."""
        speeds = {name: [run.tokens_per_second for run in turns] for name, turns in runs.items()}
        floor = step_bytes(self.models[cell.dtype], cell.context, cell.batch) / (self.bandwidth * 1e9)
        found = {}
        for name, turns in runs.items():
            speed = summarize(speeds[name])
            tau = sum(run.tokens for run in turns) / sum(run.steps for run in turns)
            found[name] = {
                "tokens_per_second": speed.to_dict(),
                "ratio_to_hf": ratios(speeds[name], speeds[HF]).to_dict(),
                "ratio_to_plain": ratios(speeds[name], speeds[_baseline(name)]).to_dict(),
                "tau": significant(tau),
                "shares": _mean_shares(turns),
                "draft_state_bytes": max(run.draft_state_bytes for run in turns),
                # tau tokens per floor at most: for the two loops without a draft the share of the floor itself
                "share_of_floor": significant(floor * speed.median / cell.batch / tau),
            }
            if (eager := name.removesuffix(COMPILED)) != name and eager in speeds:
                found[name]["ratio_to_eager"] = ratios(speeds[name], speeds[eager]).to_dict()
        return found


def _baseline(name: str) -> str:
    """What a method is compared with: the loop without a draft, compiled if the method is."""
    return PLAIN + COMPILED if name.endswith(COMPILED) and name != PLAIN + COMPILED else PLAIN


def _mean_shares(turns: Sequence[Run]) -> dict[str, float]:
    return {name: significant(sum(run.shares[name] for run in turns) / len(turns)) for name in turns[0].shares}


def _first_difference(runs: Mapping[str, Sequence[Run]]) -> str | None:
    for name, turns in runs.items():
        for turn, (run, truth) in enumerate(zip(turns, runs[HF], strict=True)):
            common = min(run.text.shape[1], truth.text.shape[1])
            differs = run.text[:, :common] != truth.text[:, :common]
            if bool(differs.any()):
                row, place = differs.nonzero()[0].tolist()
                return f"{name} emits another float32 greedy text than {HF} (turn {turn}, row {row}, token {place})"
    return None


def order_of_cells(contexts: Sequence[int], batches: Sequence[int], dtypes: Sequence[str]) -> list[Cell]:
    """Most telling first: batch by batch, long contexts before short ones."""
    return [
        Cell(context, batch, dtype)
        for batch in batches
        for context in sorted(contexts, reverse=True)
        for dtype in dtypes
    ]
