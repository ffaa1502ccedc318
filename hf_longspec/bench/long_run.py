"""One long text per method, with marks on the way: speed, tokens per verification and how much the text repeats."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ..generation.cache import SpeculativeCache
from ..generation.stats import SpeculationStats
from ..generation.target import TargetView
from .decoding import MODES, HfMethod
from .distinct import ORDERS, distinct
from .results import ResultFile
from .summaries import significant
from .timing import TokenClock

# Tokens in front of a mark over which the speed at the mark is taken.
NEAR = 1000
# Tokens of a call that compiles what a row will run, before its clock starts.
WARM_UP = 24
# Slots behind the last mark, for baselines that go on there.
ROOM = 2048


@dataclass(frozen=True, eq=False)
class LongRow:
    """One run.

    Args:
        method (`str`): What it is called.
        draft (`DraftModel`): How it decodes.
        tokens (`int`): How many.
        mode (`str`, *optional*, defaults to `"sample"`): `sample` or `greedy`.
        penalised (`bool`, *optional*, defaults to `True`): Whether the logits processors apply.
    """

    method: str
    draft: Any
    tokens: int
    mode: str = "sample"
    penalised: bool = True


class MarkClock(BaseStreamer):
    """A streamer that notes, at each of some numbers of tokens, the time and the counts so far.

    Args:
        marks (`Sequence[int]`): Numbers of tokens, ascending.
        counts (`Callable[[], SpeculationStats]`): The statistics of the running call.
        now (`Callable[[], float]`, *optional*): Clock in seconds.
    """

    def __init__(
        self,
        marks: Sequence[int],
        counts: Callable[[], SpeculationStats],
        now: Callable[[], float] = time.perf_counter,
    ):
        self.times: dict[int, float] = {}
        self.stats: dict[int, SpeculationStats] = {}
        self._pending = list(marks)
        self._counts = counts
        self._now = now
        self._tokens: int | None = None

    def put(self, value: torch.Tensor) -> None:
        """Count the tokens of one row; what comes first is the prompt."""
        if self._tokens is None:
            self._tokens = 0
            return
        self._tokens += value.numel()
        if self._pending and self._tokens >= self._pending[0]:
            mark = self._pending.pop(0)
            self.times[mark], self.stats[mark] = self._now(), replace(self._counts())

    def end(self) -> None:
        """Nothing to close."""

    def speed(self, first: int, last: int) -> float:
        """Tokens per second from one mark to another."""
        return significant((last - first) / (self.times[last] - self.times[first]))


class LongBenchmark:
    """Runs methods one after another behind one prompt, and plain `generate` for a while at every mark.

    Args:
        model (`PreTrainedModel`): The target, without an end-of-text token.
        prompt (`torch.LongTensor` of shape `(1, P)`): Where all texts begin.
        marks (`Sequence[int]`): Numbers of generated tokens at which to look.
        sampling (`dict[str, Any]`): Arguments of `generate` for rows that sample, beside temperature 1.
        processors (`Sequence[LogitsProcessor]`): For penalised rows.
        levels (`int`): Rows of logits that a TokenSwift draft has, for alpha and beta (Eqs. 4 and 6 of the paper).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompt: torch.Tensor,
        marks: Sequence[int],
        sampling: dict[str, Any],
        processors: Sequence[LogitsProcessor],
        levels: int,
    ):
        self.model = model
        self.prompt = prompt
        self.marks = marks
        self.sampling = sampling
        self.processors = processors
        self.levels = levels
        self._longest = 0.0

    def measure(self, row: LongRow, baselines: Mapping[str, Any], tokens: int, results: ResultFile) -> None:
        """One row, and some tokens of each baseline at its marks; left out if there is no time for it."""
        before = results.guard.elapsed
        if not results.guard.fits(self._longest):
            results.skip("no time left", method=row.method, mode=row.mode, penalised=row.penalised)
            return
        for method in (row.draft, *baselines.values()):
            if not isinstance(method, HfMethod) and method.setting("compile") == "compile":
                self._generate(method, row, WARM_UP)
        text, cache = self.run(row, results)
        for mark in reversed([mark for mark in self.marks if mark <= row.tokens]):  # each writes behind its mark
            for name, method in baselines.items():
                speed = self.speed_at(mark, method, row, text, cache, tokens)
                what = {"mode": row.mode, "penalised": row.penalised, "mark": mark}
                results.write("baseline", method=name, **what, tokens=tokens, tokens_per_second=speed)
        self._longest = max(self._longest, results.guard.elapsed - before)

    def run(self, row: LongRow, results: ResultFile) -> tuple[torch.Tensor, SpeculativeCache]:
        """Decode one row, write a record per mark; returns the text, prompt included, and the cache."""
        marks = [mark for mark in self.marks if mark <= row.tokens]
        clock = MarkClock(
            sorted({1, *marks, *(max(1, mark - NEAR) for mark in marks)}), lambda: row.draft.last_speculation
        )
        output = self._generate(row.draft, row, row.tokens, streamer=clock)
        text = output.sequences[0, self.prompt.shape[1] :].tolist()
        for mark in marks:
            results.write(
                "long",
                method=row.method,
                mode=row.mode,
                penalised=row.penalised,
                mark=mark,
                tokens_per_second=clock.speed(1, mark),
                tokens_per_second_near=clock.speed(max(1, mark - NEAR), mark),
                **self._ratios(clock.stats[mark]),
                distinct=[list(distinct(text[:mark], n).values()) for n in ORDERS],
            )
        return output.sequences, output.past_key_values

    def _generate(self, draft: Any, row: LongRow, tokens: int, **options: Any) -> Any:
        """So many tokens behind the prompt, with the row's rule and a cache of its own."""
        nodes = draft.num_tree_nodes(TargetView(self.model))
        room = self.prompt.shape[1] + row.tokens + ROOM
        draft.generation_config.gate = False  # speculation itself is measured
        torch.manual_seed(0)
        return self.model.generate(
            self.prompt,
            assistant_model=draft,
            past_key_values=SpeculativeCache(self.model.config, 1, room, tree_slots=nodes),
            max_new_tokens=tokens,
            return_dict_in_generate=True,
            **self._options(row.mode, row.penalised),
            **options,
        )

    def speed_at(
        self, mark: int, method: Any, row: LongRow, text: torch.Tensor, cache: SpeculativeCache, tokens: int
    ) -> float:
        """Tokens per second of a method that goes on behind a mark of a row's text, whose keys the cache holds."""
        length, clock = self.prompt.shape[1] + mark, TokenClock()
        options = self._options(row.mode, row.penalised) | {"max_new_tokens": tokens, "streamer": clock}
        if isinstance(method, HfMethod):
            options |= {"past_key_values": dynamic_cache(cache, length - 1), **method.options}
        else:
            cache.set_lengths([length - 1])
            options |= {"past_key_values": cache, "assistant_model": method}
        torch.manual_seed(0)
        self.model.generate(text[:, :length], **options)
        return significant(clock.num_tokens / clock.decode_seconds)

    def _options(self, mode: str, penalised: bool) -> dict[str, Any]:
        options = dict(MODES[mode]) | (self.sampling if mode == "sample" else {})
        if penalised:
            options["logits_processor"] = LogitsProcessorList(self.processors)
        return options

    def _ratios(self, stats: SpeculationStats) -> dict[str, float]:
        rows = max(1, self.levels * stats.num_spec_steps)
        return {
            "tau": significant(stats.mean_acceptance_length),
            "alpha": significant(stats.num_accepted_draft_tokens / rows),
            "beta": significant(stats.num_accepted_ngram_tokens / rows),
        }


def dynamic_cache(cache: SpeculativeCache, length: int) -> DynamicCache:
    """The first `length` tokens of a cache of ours as transformers' own."""
    made = DynamicCache()
    for index, layer in enumerate(cache.layers):
        made.update(layer.keys[:, :, :length].clone(), layer.values[:, :, :length].clone(), index)
    return made
