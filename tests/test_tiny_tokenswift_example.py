"""Training and publishing the tiny heads: the scripts on a random target and a random stream, and their clock."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel

from hf_longspec.bench.machine import git_commit
from hf_longspec.testing import tiny_target

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("train_tiny_tokenswift")


@pytest.fixture
def train(script, tmp_path, monkeypatch):
    """`train("--minutes", 1)`: the folder of a run."""
    tiny_target("llama", max_position_embeddings=256).save_pretrained(tmp_path / "target")
    (tmp_path / "streams").mkdir()
    stream = np.random.default_rng(0).integers(3, 128, 2000).astype(np.uint16)
    np.save(tmp_path / "streams" / "text.npy", stream)

    def call(*options):
        places = ("--target", tmp_path / "target", "--streams", tmp_path / "streams", "--output", tmp_path / "run")
        arguments = [*places, "--length", 32, "--batch", 2, *options]
        monkeypatch.setattr(sys, "argv", ["train_tiny_tokenswift", *map(str, arguments)])
        script.main()
        return tmp_path / "run"

    return call


def steps_of(folder):
    return json.loads((folder / "trainer_state.json").read_text())["global_step"]


def test_a_run_ends_in_time_and_goes_on_with_more_of_it(train, tmp_path):
    folder = train("--minutes", 0.005, "--independent", "--heads", 2)
    first = steps_of(folder)
    draft = AutoModel.from_pretrained(folder / "final")
    assert draft.dtype == torch.bfloat16 and draft.config.target_name_or_path == "target"
    assert draft.config.num_heads == 2 and not draft.config.chained
    assert "--minutes 0.005" in (text := (folder / "command.txt").read_text()) and "--independent" in text
    assert str(tmp_path) not in text
    assert (folder / "commit.txt").read_text() == (git_commit(EXAMPLES) or "")
    train("--minutes", 0.015, "--independent", "--heads", 2)
    assert 0 < first < steps_of(folder)


def test_sequential_heads(train):
    folder = train("--minutes", 0.003, "--sequential", "--heads", 2)
    assert AutoModel.from_pretrained(folder / "final").config.sequential
    assert "--sequential" in (folder / "command.txt").read_text()


def test_the_learning_rate_follows_the_time_spent_and_a_pause_is_not_spent(script, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(script.time, "monotonic", lambda: now)

    def schedule():
        return script.TimedCosine(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.2), 100.0)

    def rate(clock):
        clock.optimizer.step()
        clock.step()
        return clock.get_last_lr()[0]

    first = schedule()
    assert rate(first) == pytest.approx(0.2 * 2 / script.WARMUP_STEPS)
    first.last_epoch = script.WARMUP_STEPS
    now += 50
    assert rate(first) == pytest.approx(0.1)
    state = first.state_dict()
    now += 10_000
    resumed = schedule()
    resumed.load_state_dict(state)
    now += 25
    assert rate(resumed) == pytest.approx(0.1 - 0.1 * 2**-0.5)
    now += 500
    assert rate(resumed) == 0.0


def test_without_streams(train, tmp_path):
    (tmp_path / "streams" / "text.npy").unlink()
    with pytest.raises(SystemExit, match=r"has no \*\.npy: run examples/train_tiny_target.py"):
        train()


def test_heads_go_on_on_other_streams_and_the_card_tells_both(train, tmp_path, monkeypatch):
    """Their weights are those of the first run, changed; the second stage has its own command and streams."""
    folder = train("--minutes", 0.005, "--heads", 2)
    (tmp_path / "own").mkdir()
    np.save(tmp_path / "own" / "sampled.npy", np.random.default_rng(1).integers(3, 128, 900).astype(np.uint16))
    more = ("--draft", folder / "final", "--streams", tmp_path / "own", "--output", tmp_path / "more")
    train("--minutes", 0.005, "--learning-rate", 1e-4, *more)
    first, second = (
        AutoModel.from_pretrained(run / "final", dtype=torch.float32) for run in (folder, tmp_path / "more")
    )
    assert second.config.num_heads == 2
    for name, weight in first.state_dict().items():
        # bfloat16 of what was saved, and some steps of 1e-4
        torch.testing.assert_close(second.state_dict()[name], weight, atol=0.02, rtol=0.02)
    assert any(not torch.equal(second.state_dict()[name], weight) for name, weight in first.state_dict().items())
    card = tmp_path / "card"
    arguments = ("--run", tmp_path / "more", "--before", folder, "--results", tmp_path / "none", "--output", card)
    monkeypatch.setattr(sys, "argv", ["publish_tiny_tokenswift", *map(str, arguments)])
    importlib.import_module("publish_tiny_tokenswift").main()
    text = (card / "README.md").read_text()
    assert text.count("python examples/train_tiny_tokenswift.py") == 2
    assert "--streams runs/streams --streams runs/own" in text and "--draft runs/run/final" in text
    assert "on `runs/streams` and `runs/own`" in text and str(tmp_path) not in text


def test_from_training_to_the_card(train, tmp_path, monkeypatch):
    folder, card = train("--minutes", 0.005), tmp_path / "card"
    arguments = ("--run", folder, "--results", tmp_path / "none", "--output", card)
    monkeypatch.setattr(sys, "argv", ["publish_tiny_tokenswift", *map(str, arguments)])
    publish = importlib.import_module("publish_tiny_tokenswift")
    publish.main()
    text = (card / "README.md").read_text()
    assert "Not measured." in text and "3 chained heads" in text and "--minutes 0.005" in text
    assert text.count("| 3 | 0.") == 1 and str(tmp_path) not in text
    draft = AutoModel.from_pretrained(card)
    assert {name: draft.setting(name) for name in publish.CPU_SETTINGS} == publish.CPU_SETTINGS
    assert draft.config.target_name_or_path == "tiny-target"
