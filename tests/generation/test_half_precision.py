"""The hint that float32 is faster: for which calls it is given, and how often."""

import logging

import pytest
import torch
from transformers.utils import logging as transformers_logging

from hf_longspec import NgramDraftModel
from hf_longspec.generation import call
from hf_longspec.generation.special_cases import half_precision
from tests.tiny_targets import tiny_target

HINT = "in which this CPU needs"


@pytest.fixture
def hints(monkeypatch, caplog):
    """Returns the hints that calls of a model give where products in its type take some times as long."""
    monkeypatch.setattr(call, "LARGE", 1000)
    monkeypatch.setattr(transformers_logging.get_logger("transformers"), "propagate", True)
    half_precision.logger.warning_once.__func__.cache_clear()

    def of(dtype, ratio, calls=1):
        monkeypatch.setattr(half_precision, "slowdown", lambda dtype: ratio)
        model, caplog.handler.records[:] = tiny_target("llama").to(dtype), []
        draft = NgramDraftModel.from_target(model)
        with caplog.at_level(logging.WARNING):
            for _ in range(calls):
                model.generate(torch.tensor([[5, 6, 7]]), assistant_model=draft, max_new_tokens=2)
        assert draft.last_speculation.reason is None
        return [record.getMessage() for record in caplog.records if HINT in record.getMessage()]

    return of


def test_slow_half_precision_is_said_once(hints):
    (hint,) = hints(torch.bfloat16, 5.04, calls=2)
    assert "bfloat16" in hint and "5.0 times" in hint and "dtype='float32'" in hint


@pytest.mark.parametrize(("dtype", "ratio"), [(torch.float16, 1.2), (torch.float32, 5.0)])
def test_what_is_fast_gets_no_hint(hints, dtype, ratio):
    assert not hints(dtype, ratio)


def test_small_models_get_no_hint(hints, monkeypatch):
    monkeypatch.setattr(call, "LARGE", 2**40)
    assert not hints(torch.bfloat16, 5.0)


def test_products_are_timed_once_in_one_thread(monkeypatch):
    log, seconds = [], {torch.bfloat16: 0.4, torch.float32: 0.1}
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(torch, "set_num_threads", log.append)
    monkeypatch.setattr(half_precision, "_seconds", lambda dtype: log.append(dtype) or seconds[dtype])
    half_precision.slowdown.cache_clear()
    try:
        assert [half_precision.slowdown(torch.bfloat16) for _ in range(2)] == [4.0, 4.0]
    finally:
        half_precision.slowdown.cache_clear()
    assert log == [1, torch.bfloat16, torch.float32, 3]
    monkeypatch.undo()
    assert half_precision._seconds(torch.bfloat16) > 0
