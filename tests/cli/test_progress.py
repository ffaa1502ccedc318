"""Long commands: a bar with tokens per second and the time left, or a line now and then; texts as they come."""

import io
import re

import pytest
import torch
from rich.console import Console
from transformers import AutoTokenizer

from hf_longspec.cli import models
from hf_longspec.cli.generate import TextsStreamer
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


def test_the_bar_of_a_terminal_has_the_speed_and_the_time_left():
    screen = io.StringIO()
    progress = models.Progress(4000, "Reading", Console(file=screen, force_terminal=True, width=120), tokens=True)
    progress.step(1000)
    with clocked(progress, 20):
        pass
    assert "1000/4000" in screen.getvalue() and re.search(r"(49|50)\.\d tokens/s", screen.getvalue())


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
        ("generate", ["--json"], r"Generating: [\d,]+ of 12 tokens"),
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


def test_texts_of_several_rows_come_line_by_line_and_are_those_of_the_tokenizer(tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny.target)
    words = ["one\ntwo\nthree", "a", "caf\u00e9 \N{SNOWMAN}\n", "", "x" * 20]
    end = max(token for token in tokenizer.get_vocab().values()) + 7
    rows = [[*tokenizer(word, add_special_tokens=False)["input_ids"], end] if word else [end] for word in words]
    rows[-1].pop()  # the length ends it
    longest, file, seen = max(map(len, rows)), io.StringIO(), []
    streamer = TextsStreamer(tokenizer, len(rows), [None, end], file)
    streamer.put(torch.zeros(len(rows), 5, dtype=torch.long))
    for place in range(longest):
        streamer.put(torch.tensor([row[place] if place < len(row) else 0 for row in rows]))
        seen.append(file.getvalue())
    streamer.end()
    streamer.end()
    texts = [tokenizer.decode(row[: -1 if row[-1] == end else None]) for row in rows]
    assert file.getvalue() == "\n\n".join(texts) + "\n" and texts == words
    first = next(text for text in seen if text)
    assert first == "one\n" and seen.index(first) < longest - 5
    assert all(text.endswith("\n") for text in seen if text)
