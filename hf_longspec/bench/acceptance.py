"""tau, the tokens emitted per verification, over many held-out prompts and drafter settings."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from transformers import PreTrainedModel

from .decoding import Decoder, HfMethod, Run
from .prefill import PrefilledPrompts
from .progress import Progress
from .results import ResultFile
from .summaries import mean_interval, significant


@dataclass(frozen=True)
class Setting:
    """How a draft drafts, and how the target chooses its tokens.

    Args:
        mode (`str`): `sample` at temperature 1, or `greedy`.
        options (`tuple`): Keys of `draft.generation_config` with their values, on top of the draft's defaults.
    """

    mode: str
    options: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, mode: str = "sample", **options: Any) -> "Setting":
        """From keywords."""
        return cls(mode, tuple(options.items()))


# Name of a draft, setting, length of the prompts.
Planned = tuple[str | None, Setting, int]


class RowSteps:
    """Counts the verifications of every row of a batch while a draft is used; the loop's statistics sum over rows."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    @contextmanager
    def of(self, draft: Any) -> Iterator["RowSteps"]:
        """Count while the context is open: `draft` makes drafters that note which rows still grow when they propose."""
        make = draft.drafter

        def counting_drafter(binding: Any) -> Any:
            drafter = make(binding)
            propose, sequences = drafter.propose, binding.rule.sequences
            self.counts = [0] * sequences.batch_size

            def counting_propose(root: torch.Tensor) -> Any:
                self.counts = [n + (not done) for n, done in zip(self.counts, sequences.done, strict=True)]
                return propose(root)

            drafter.propose = counting_propose
            return drafter

        draft.drafter = counting_drafter
        try:
            yield self
        finally:
            del draft.drafter


class AcceptanceBenchmark:
    """Measures settings of one or several drafts on the same prompts with the same random numbers.

    Args:
        model (`PreTrainedModel`): The target, in float32.
        drafts (`Mapping[str, DraftModel]`): By the name that the results call them by, or `None` for an only draft
            that needs no name. Their settings are changed from run to run. An [`HfMethod`] has none.
        prompts ([`PrefilledPrompts`]): One row per prompt.
        tokens (`int`): Tokens per prompt.
        batch (`int`): Prompts per call; tau is counted per prompt and does not depend on it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        drafts: Mapping[str | None, Any],
        prompts: PrefilledPrompts,
        tokens: int,
        batch: int,
    ):
        self.drafts = drafts
        self.prompts = prompts
        self.batch = batch
        self.decoder = Decoder(model, prompts, tokens)
        self._first: dict[tuple[str, str, int], list[float]] = {}
        self._greedy_text: dict[int, torch.Tensor] = {}

    def run(self, plan: Sequence[Planned], results: ResultFile, progress: Progress) -> None:
        """Everything planned, in the order given, as far as the time goes."""
        longest = 0.0
        for name, setting, length in plan:
            options = ({} if name is None else {"draft": name}) | dict(setting.options)
            what = {"mode": setting.mode, "options": options, "length": length}
            if not results.guard.fits(longest):
                results.skip("no time left", **what)
                continue
            started = time.perf_counter()
            record = self.measure(name, setting, length)
            seconds = time.perf_counter() - started
            longest = max(longest, seconds)
            results.write("acceptance", **what, **record, seconds=round(seconds, 1))
            shown = label(setting) if name is None else f"{name}, {label(setting)}"
            progress.say(f"{shown} at {length} tokens: tau {record['tau']['mean']:.3f} ({seconds:.0f} s)")
            progress.step()

    def measure(self, name: str | None, setting: Setting, length: int) -> dict[str, Any]:
        """tau of one setting at one length: mean over prompts with interval, and difference to what came first."""
        taus, texts, method = [], [], self.drafts[name]
        histogram: list[int] = []
        batch = min(self.batch, getattr(method, "max_batch", None) or self.batch)
        with changed(method, dict(setting.options)) if setting.options else nullcontext():
            for start in range(0, len(self.prompts.tokens), batch):
                rows = slice(start, min(start + batch, len(self.prompts.tokens)))
                run, steps = self._run(method, rows, length, setting.mode)
                taus += [run.tokens // len(run.text) / count for count in steps]
                texts.append(run.text)
                counts = [] if isinstance(method, HfMethod) else method.last_speculation.acceptance_histogram
                histogram = [a + b for a, b in zip_longest(histogram, counts, fillvalue=0)]
        record: dict[str, Any] = {
            "tau": mean_interval(taus).to_dict(),
            "per_prompt": [significant(tau) for tau in taus],
            "histogram": histogram,
        }
        # drafts are compared setting by setting, the settings of one draft with its first
        first = self._first.setdefault((setting.mode, "" if name is None else str(setting.options), length), taus)
        if first is not taus:
            difference = [tau - other for tau, other in zip(taus, first, strict=True)]
            record["difference"] = mean_interval(difference).to_dict()
        if setting.mode == "greedy":
            text = torch.cat(texts)
            record["same_text"] = bool(torch.equal(text, self._greedy_text.setdefault(length, text)))
        return record

    def _run(self, method: Any, rows: slice, length: int, mode: str) -> tuple[Run, list[int]]:
        """One call and the verifications of each of its rows; transformers' methods verify all rows equally often."""
        if isinstance(method, HfMethod):
            run = self.decoder.run(method, rows, length, mode, seed=rows.start)
            return run, [run.steps // len(run.text)] * len(run.text)
        with RowSteps().of(method) as steps:
            return self.decoder.run(method, rows, length, mode, seed=rows.start), steps.counts


@contextmanager
def changed(draft: Any, options: dict[str, Any]) -> Iterator[None]:
    """Give a draft other settings for a while.

    Raises:
        ValueError: If the draft does not have one of them.
    """
    if unknown := sorted(set(options) - set(draft.settings)):
        raise ValueError(f"{type(draft).__name__} has no settings {unknown}; it has {sorted(draft.settings)}.")
    before = {name: draft.setting(name) for name in options}
    try:
        _set(draft, options)
        yield
    finally:
        _set(draft, before)


def _set(draft: Any, options: dict[str, Any]) -> None:
    for name, value in options.items():  # update() of a GenerationConfig silently skips names that it does not have
        setattr(draft.generation_config, name, value)


def label(setting: Setting) -> str:
    """A setting in words.

    >>> label(Setting.of("greedy", selection="window", num_assistant_tokens=6))
    'greedy, window, num_assistant_tokens=6'
    """
    shown = [str(value) if name == "selection" else f"{name}={value}" for name, value in setting.options]
    return ", ".join([setting.mode, *shown])
