"""Long commands: a bar with tokens per second and the time left, or a line now and then; texts as they come."""

import re

import pytest
import torch

from hf_longspec.cli import models
from tests.cli.conftest import run_command
from tests.tiny_targets import tiny_target


def clocked(progress, seconds):
    """The progress with a task that has taken so long."""
    progress._bar.tasks[0].start_time -= seconds
    return progress


def test_a_line_has_the_steps_the_speed_and_the_time_left():
    reading = models.Progress(100_000, "Reading", tokens=True)
    reading.step(24_000)
    assert clocked(reading, 250).line() == "Reading: 24,000 of 100,000 tokens, 96.0 tokens/s, 13 min 12 s left"
    reading.next("Calls", 8)
    reading.step(2)
    assert clocked(reading, 10).line() == "Calls: 2 of 8, 30 s left"
    assert models.Progress(0, "Loading").line() == "Loading: 0"


def test_the_prompt_is_counted_in_tokens():
    model = tiny_target("llama")
    progress = models.PromptProgress(model, 48, "Reading")
    with torch.no_grad():
        model(torch.ones(1, 24, dtype=torch.long))
    assert progress.line().startswith("Reading: 24 of 48 tokens, ")
    progress.next("Generating", 8, tokens=True)
    model(torch.ones(1, 24, dtype=torch.long))
    assert progress.line() == "Generating: 0 of 8 tokens"


@pytest.mark.parametrize(
    ("name", "more", "shown"),
    [
        ("generate", ["--samples", 3, "--temperature", 1], r"Generating: [\d,]+ of 36 tokens"),
        ("generate", [], r"Generating: [\d,]+ of 12 tokens"),
        ("audit", [], r".+: [\d,]+ of 12 tokens"),
    ],
)
def test_without_a_terminal_a_line_comes_now_and_then(tiny, monkeypatch, name, more, shown):
    monkeypatch.setattr(models, "LINE_SECONDS", 0.001)
    arguments = ["--prompt", "def main(self):", "--target", tiny.target, "--draft", "ngram", "--max-new-tokens", 12]
    result = run_command(name, *arguments, *more)
    assert result.exit_code == 0, result.output
    assert re.search(rf"^{shown}, [\d.,]+ tokens/s, [\w ]+ left$", result.stderr, re.MULTILINE), result.stderr
    assert " left" not in result.stdout


def test_a_busy_machine_is_noticed_once_and_used_with_one_thread(monkeypatch, capsys):
    states = iter([None, "50% of one core's time", "load 9.0 on 2 cores", "load 9.0 on 2 cores"])
    monkeypatch.setattr(models, "busy_machine", lambda *seconds: next(states))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    with models.noticing_others():
        assert not capsys.readouterr().err
    assert capsys.readouterr().err.startswith("The machine was busy (50% of one core's time): ")
    with models.noticing_others(one_thread=True):
        assert "busy (load 9.0 on 2 cores): " in (err := capsys.readouterr().err) and "One thread is used." in err
        assert threads[-1] == 1
    assert threads[-1] == 2 and not capsys.readouterr().err
