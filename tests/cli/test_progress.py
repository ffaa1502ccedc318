"""Long commands: what they show while they work, and that other programs slow them down."""

import re

import pytest
import torch
from transformers.utils import logging

from hf_longspec.cli import progress
from tests.cli.conftest import run_command
from tests.tiny_targets import tiny_target


def test_the_prompt_is_counted_in_tokens():
    model = tiny_target("llama")
    bar = progress.PromptProgress(model, 48, "Generating", 8, rows=2)
    assert not logging.is_progress_bar_enabled()  # that of the call would be a second one
    with torch.no_grad():
        model(torch.ones(1, 24, dtype=torch.long))
    assert str(bar).startswith("Generating, reading the prompt:  50%") and "24 of 48 tokens" in str(bar)
    bar.arrived(1)
    assert logging.is_progress_bar_enabled()
    model(torch.ones(1, 24, dtype=torch.long))
    assert str(bar).startswith("Generating:  25%") and "2 of 8 tokens" in str(bar)
    bar.close()


@pytest.mark.parametrize(
    ("name", "more", "shown"),
    [
        ("generate", ["--samples", 3, "--temperature", 1], r"Generating: .* of 36 tokens"),
        ("audit", [], r".+: .* of 12 tokens"),
    ],
)
def test_without_a_terminal_progress_comes_now_and_then(tiny, monkeypatch, name, more, shown):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.001)
    arguments = ["--prompt", "def main(self):", "--target", tiny.target, "--draft", "ngram", "--max-new-tokens", 12]
    result = run_command(name, *arguments, *more)
    assert result.exit_code == 0, result.output
    assert re.search(rf"^{shown} \[[\d:]+<[\d:]+, +[\d.]+ tokens/s\]", result.stderr, re.MULTILINE), result.stderr
    assert "tokens/s]" not in result.stdout


def test_a_busy_machine_is_noticed_once_and_used_with_one_thread(monkeypatch, capsys):
    states = iter([None, "50% of one core's time", "load 9.0 on 2 cores", "load 9.0 on 2 cores"])
    monkeypatch.setattr(progress, "busy_machine", lambda *seconds: next(states))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    with progress.noticing_others():
        assert not capsys.readouterr().err
    assert capsys.readouterr().err.startswith("The machine was busy (50% of one core's time): ")
    with progress.noticing_others(one_thread=True):
        assert "busy (load 9.0 on 2 cores): " in (err := capsys.readouterr().err) and "One thread is used." in err
        assert threads == [1]
    assert not capsys.readouterr().err
