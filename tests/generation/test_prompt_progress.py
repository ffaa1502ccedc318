"""The bar of a prompt that takes long to read: where it is shown, what it counts, and that it changes nothing."""

import io
import sys

import pytest
import torch
from transformers.utils import logging

from hf_longspec import NgramDraftModel
from hf_longspec.generation.special_cases import prompt_progress
from tests.tiny_targets import tiny_target

ROWS = torch.arange(3, 43).repeat(2, 1)


class Terminal(io.StringIO):
    """Standard error of a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def shown(monkeypatch):
    """Returns what a call with a draft writes to standard error."""

    def of(stream, delay=0, **options):
        monkeypatch.setattr(prompt_progress, "DELAY", delay)
        monkeypatch.setitem(prompt_progress.OPTIONS, "mininterval", 0)
        options |= {"attention_mask": torch.ones_like(ROWS), "max_new_tokens": 4}
        model = tiny_target("llama")
        draft, expected = NgramDraftModel.from_target(model), model.generate(ROWS, **options)
        monkeypatch.setattr(sys, "stderr", stream)  # pytest replaces it between fixtures and tests
        assert torch.equal(model.generate(ROWS, assistant_model=draft, **options), expected)
        assert draft.last_speculation.reason is None
        assert not any(module._forward_hooks for module in model.modules())
        return stream.getvalue()

    return of


def test_the_tokens_of_a_prompt_are_counted(shown):
    """All but the last one, which the first verification runs."""
    text = shown(Terminal(), prefill_chunk_size=13)
    assert "Reading the prompt:   0%" in text and "13 of 40 tokens" in text and "39 of 40 tokens" in text
    assert text.endswith("\r") and not text.rsplit("\r", 2)[1].strip()  # it is removed in the end


def test_a_short_wait_shows_nothing(shown):
    assert not shown(Terminal(), delay=3600)


def test_the_switch_of_transformers_turns_it_off(shown):
    logging.disable_progress_bar()
    try:
        assert not shown(Terminal())
    finally:
        logging.enable_progress_bar()


def test_a_file_gets_no_bar(shown):
    assert not shown(io.StringIO())
