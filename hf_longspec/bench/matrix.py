"""The measurements of `hf-longspec bench`: every method in every cell of contexts, batch sizes and decodings.

At the end `--sweep key=v1,v2`: the values of settings that are compared, and their combinations.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

import torch
from transformers import PreTrainedModel

from ..auditing import audit
from .calls import HF, PLAIN, Call, Decoding, run_call
from .machine import PeakMemory
from .prompts import DocumentPrompts, Prompt, left_padded
from .report import title_of
from .results import OWN_LENGTH, Record, of_kind
from .runner import Cell, Method, Point, Runner, rotated

WARM_UP_PROMPT, WARM_UP_TOKENS = 256, 8


@dataclass
class Matrix:
    """Measure cells of one dtype one after another, and write every call as soon as it has ended."""

    model: PreTrainedModel
    methods: Sequence[Method]
    prompts: DocumentPrompts
    results: Runner
    tokens: int
    repeats: int

    def __post_init__(self) -> None:
        self.memory = PeakMemory(self.model.device)
        self._pad = self.model.generation_config.pad_token_id or 0

    def measure(self, cell: Cell, progress: Any) -> None:
        """Run all methods in turns until the time is over, except for calls that are in the file already."""
        usable = self._usable(cell)
        progress.step((len(self.methods) - len(usable)) * self.repeats)
        for turn, prompts in enumerate(self.prompts_of(cell) if usable else []):
            texts: dict[str, torch.Tensor] = {}
            last = ""
            for method in rotated(usable, turn):
                progress.say(f"{title_of(cell.key())}: {method.name}, turn {turn + 1} of {self.repeats}{last}")
                if found := self._measure(cell, method, turn, prompts, texts):
                    speed = found["tokens"] / max(found["decode_seconds"], 1e-9)
                    last = f", {speed:.1f} tokens/s in the last call"
                progress.step()
            self._audit(cell, turn, prompts, texts)

    def prompts_of(self, cell: Cell) -> list[list[Prompt]]:
        count = self.repeats * cell.batch
        if cell.context == OWN_LENGTH:
            limit = getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 2**40
            prompts = self.prompts.own(count, limit - self.tokens)
        else:
            prompts = self.prompts.windows(cell.context, count)
        return [prompts[start : start + cell.batch] for start in range(0, count, cell.batch)]

    def _usable(self, cell: Cell) -> list[Method]:
        """The methods that decode the rows of a cell; the others are left out with the reason."""
        usable = []
        for method in self.methods:
            limit = getattr(method.how, "max_batch", None)
            if limit is None or cell.batch <= limit:
                usable.append(method)
            else:
                reason = f"transformers decodes at most {limit} row at a time this way"
                self.results.leave_out(reason, **cell.key(), method=method.name)
        return usable

    def _measure(
        self, cell: Cell, method: Method, turn: int, prompts: list[Prompt], texts: dict[str, torch.Tensor]
    ) -> Record | None:
        """One call, unless the file has it; its text is added to `texts`. `None` if it was left out."""

        def call(rows: list[torch.Tensor], tokens: int, seed: int) -> Call:
            how: dict[str, Any] = {"decoding": cell.decoding, "tokens": tokens, "seed": seed, "memory": self.memory}
            with method.with_settings():
                return run_call(self.model, method.how, left_padded(rows, self._pad), **how)

        def warm_up() -> None:  # the first call is slow; on a GPU that depends on the length
            ends = rows if self.memory.on_cuda else [row[-WARM_UP_PROMPT:] for row in rows]
            call(ends, min(self.tokens, WARM_UP_TOKENS), 0)

        def run() -> Record:
            started = self.results.elapsed
            found = call(rows, self.tokens, turn)
            texts[method.name] = found.text
            return {
                "point": dict(method.point),
                "prompt_tokens": sum(map(len, rows)) // len(rows),
                "categories": [prompt.category for prompt in prompts],
                "seconds": round(self.results.elapsed - started, 3),
                **found.to_dict(),
                "text": hashes(found.text),
                "compared_with": truth_of(cell, method),
            }

        rows = [prompt.ids for prompt in prompts]
        return self.results.measure("run", cell.key() | {"method": method.name, "turn": turn}, run, warm_up)

    def _audit(self, cell: Cell, turn: int, prompts: list[Prompt], texts: Mapping[str, torch.Tensor]) -> None:
        """Audit the first text of each method that is not that of plain `generate`."""
        if not cell.decoding.greedy or cell.decoding.penalty is not None:
            return  # the audit compares with the argmax only
        records = self.results.records
        known = {r["method"] for r in of_kind(records, "audit", **cell.key())}
        expected = {r["method"]: r["text"] for r in of_kind(records, "run", **cell.key(), turn=turn)}.get(HF)
        for name, text in texts.items():
            if name not in known and expected not in (None, hashes(text)):
                ids, mask = left_padded([prompt.ids for prompt in prompts], self._pad)
                report = audit(self.model, torch.cat([ids, text], dim=1), ids.shape[1], mask)
                self.results.write(
                    "audit", **cell.key(), method=name, turn=turn, verdict=report.verdict, report=str(report)
                )


def truth_of(cell: Cell, method: Method) -> str | None:
    """The method whose text this one must reproduce in float32; `None` if it uses other random numbers.

    For greedy decoding this is plain `generate`. When sampling, our methods give the text that the plain loop draws
    from the same seed, unless rejection sampling decides which drafted tokens are accepted.
    """
    if cell.decoding.greedy:
        return HF
    settings = getattr(method.how, "settings", None)
    if settings is None:
        return None
    with method.with_settings():
        drawn = "acceptance" in settings and method.how.setting("acceptance") == "rejection"
    return None if drawn else PLAIN


def hashes(text: torch.Tensor) -> list[str]:
    """One short hash per row: texts are compared without being kept."""
    rows: list[list[int]] = text.tolist()
    return [hashlib.sha256(" ".join(map(str, row)).encode()).hexdigest()[:16] for row in rows]


# Keys that change how the target decodes, or after what; every other key is a setting of a draft.
DECODING_KEYS = {each.name: int if each.name in ("top_k", "window") else float for each in fields(Decoding)}
CONTEXT_KEYS = ("context", "prefill")


def read_value(key: str, text: str, like: Any) -> Any:
    """A value in the type of a setting's default; lists are written with `+`.

    >>> read_value("tree_widths", "4+4+3", [1]), read_value("sparse_ratio", "1", 0.07)
    ([4, 4, 3], 1.0)
    """
    try:
        if isinstance(like, list | tuple):
            return [int(part) for part in text.split("+")]
        if isinstance(like, bool):
            return {"true": True, "false": False}[text.lower()]
        if isinstance(like, int | float):
            return type(like)(text)
    except (ValueError, KeyError) as error:
        kind = "numbers joined by +" if isinstance(like, list | tuple) else f"a {type(like).__name__}"
        raise ValueError(f"--sweep {key}={text}: expected {kind}, such as {_written(like)}.") from error
    return text


def grid(axes: Mapping[str, Sequence[Any]]) -> list[Point]:
    """All combinations, the last key fastest; one empty point if there are no keys.

    >>> grid({"a": [1, 2], "b": ["x"]})
    [(('a', 1), ('b', 'x')), (('a', 2), ('b', 'x'))]
    """
    return [tuple(zip(axes, values, strict=True)) for values in product(*axes.values())]


def draft_points(axes: Mapping[str, Sequence[str]], defaults: Mapping[str, Any]) -> list[Point]:
    """The combinations of those keys that a draft with these settings has."""
    values = {
        key: [read_value(key, text, defaults[key]) for text in texts] for key, texts in axes.items() if key in defaults
    }
    return grid(values)


def written(point: Point) -> str:
    """A point as it is named in tables.

    >>> written((("tree_widths", [4, 4]), ("ngram_candidates", 2)))
    'tree_widths=4+4, ngram_candidates=2'
    """
    return ", ".join(f"{key}={_written(value)}" for key, value in point)


def _written(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "+".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def split_axes(axes: Mapping[str, list[str]], drafts: Mapping[str, Mapping[str, Any]]) -> tuple[dict, dict, list[str]]:
    """Axes of decoding (values read), axes of drafts (not read), values of the context."""
    decoding: dict[str, list[Any]] = {}
    of_drafts: dict[str, list[str]] = {}
    contexts: list[str] = []
    for key, texts in axes.items():
        if key in CONTEXT_KEYS:
            contexts = texts
        elif key in DECODING_KEYS:
            decoding[key] = [read_value(key, text, DECODING_KEYS[key](0)) for text in texts]
        elif any(key in settings for settings in drafts.values()):
            of_drafts[key] = texts
        else:
            had = "; ".join(f"{name} has {', '.join(sorted(settings))}" for name, settings in drafts.items())
            known = ", ".join([*CONTEXT_KEYS, *DECODING_KEYS])
            raise ValueError(f"--sweep {key}: not a setting of any draft ({had}). Pass one of those, or of {known}.")
    return decoding, of_drafts, contexts
