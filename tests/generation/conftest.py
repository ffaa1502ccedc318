"""Plain runs of tiny targets, and drafts that run them again. A test that changes a target makes its own."""

from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from hf_longspec import PlainDraftModel, SpecAttnDraftModel
from hf_longspec.generation.compiled import compiled_steps as compiled
from tests.robustness.enumeration import build
from tests.tiny_targets import TINY_TARGETS, RandomTreeDraftModel, tiny_prompts, tiny_target
from tests.watching import before


@dataclass
class PlainRun:
    """The text of the bare model for a ragged batch of prompts, greedy by default."""

    model: Any
    inputs: dict[str, Any]
    sequences: torch.Tensor

    @property
    def prompt_length(self) -> int:
        return self.inputs["input_ids"].shape[1]

    @property
    def generated(self) -> list[list[int]]:
        return self.sequences[:, self.prompt_length :].tolist()

    def draft(self, kind: str, **settings: Any) -> Any:
        """A draft by the name of its kind: `tree` and `chain` are random, with the run's own text as hints."""
        if kind == "plain":
            return PlainDraftModel.from_target(self.model)
        if kind == "specattn":
            small = {"num_assistant_tokens": 3, "sparse_ratio": 0.5, "sparse_min_tokens": 6}
            return SpecAttnDraftModel.from_target(self.model, **(small | settings))
        draft = RandomTreeDraftModel.from_target(self.model)
        draft.hints, draft.chain = self.generated, kind == "chain"
        for name, value in settings.items():
            setattr(draft, name, value)
        return draft

    def again(self, draft: Any, **options: Any) -> Any:
        """The same call with a draft."""
        return self.model.generate(**(self.inputs | options), assistant_model=draft)


# Targets of the fixture `target`, whose texts without a draft may be kept.
SHARED: WeakSet[Any] = WeakSet()


@cache
def _target(name: str, **overrides: Any) -> Any:
    model = tiny_target(name, **overrides)
    SHARED.add(model)
    return model


@pytest.fixture(scope="session")
def target():
    """`target(name, **overrides)`: a tiny target, made once."""
    return _target


@pytest.fixture(scope="module")
def made(target):
    """`made(name)`: a target of any type, made once for a file."""
    return cache(lambda name: target(name) if name in TINY_TARGETS else build(name))


@pytest.fixture(scope="session")
def plain_run():
    """`plain_run(name_or_model, lengths, **options)`: prompts and the bare model's text, greedy ones made once."""
    known: dict[str, torch.Tensor] = {}

    def run(model: Any, lengths: tuple[int, ...], **options: Any) -> PlainRun:
        key = repr((model, lengths, sorted(options.items())))
        is_kept = isinstance(model, str) and " at 0x" not in key
        is_kept = is_kept and not (options.get("do_sample") or options.get("return_dict_in_generate"))
        model = _target(model) if isinstance(model, str) else model
        input_ids, attention_mask = tiny_prompts(model.config.vocab_size, lengths)
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "do_sample": False} | options
        if not is_kept:
            return PlainRun(model, inputs, model.generate(**inputs))
        if key not in known:
            known[key] = model.generate(**inputs)
        return PlainRun(model, inputs, known[key].clone())

    return run


@pytest.fixture
def widths(monkeypatch):
    """`widths(model)`: a list that gets the number of tokens of a row in each forward of the model."""

    def watch(model):
        found = []
        see = lambda one, **kwargs: found.append(kwargs["input_ids"].shape[1]) if one is model else None  # noqa: E731
        before(monkeypatch, type(model), "forward", see)  # a hook that keeps state would be found
        return found

    return watch


@pytest.fixture
def graphs(monkeypatch):
    """Counts the graphs. They run op by op: what is tested is how they are traced, not torch's code generation."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(compiled, "BACKEND", counter)
    monkeypatch.setattr(compiled, "_compiled", WeakKeyDictionary())  # targets are shared by tests
    yield counter
    torch._dynamo.reset()
