"""Training and publishing the tiny draft: the two scripts in turn, on a random target and a random stream."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel

from hf_longspec.testing import tiny_target
from tests.acceptance_lines import measured, write_lines

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture
def run(monkeypatch):
    """`run(script, *arguments)`: its main with these arguments."""
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def call(script, *arguments):
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        importlib.import_module(script).main()

    return call


@pytest.fixture
def trained(run, tmp_path):
    tiny_target("llama", max_position_embeddings=256).save_pretrained(tmp_path / "target")
    (tmp_path / "streams").mkdir()
    stream = np.random.default_rng(0).integers(3, 128, 2000).astype(np.uint16)
    np.save(tmp_path / "streams" / "text.npy", stream)

    def train(*options):
        places = ("--target", tmp_path / "target", "--streams", tmp_path / "streams", "--output", tmp_path / "run")
        run("train_tiny_longspec", *places, "--steps", 3, "--length", 32, "--batch", 2, *options)
        return tmp_path / "run"

    return train


def test_from_training_to_the_card(run, trained, tmp_path):
    folder = trained()
    results = tmp_path / "longspec.jsonl"
    write_lines(results, measured("tiny-longspec", 2.5, tree_widths=[4, 4]), measured("another", 1.5))
    run("publish_tiny_longspec", "--run", folder, "--results", results, "--output", tmp_path / "card")
    text = (tmp_path / "card" / "README.md").read_text()
    assert "2.50 ± 0.10" in text and "1.50" not in text and "Not measured" not in text
    assert "3 steps of 2 rows" in text and "--steps 3 --length 32 --batch 2" in text
    assert str(tmp_path) not in text
    draft = AutoModel.from_pretrained(tmp_path / "card")
    assert draft.dtype == torch.bfloat16 and draft.config.target_name_or_path == "tiny-target"
    assert 0 < draft.config.trained_max_length <= 256
    assert draft.setting("tree_widths") == [1, 1, 1] and "a chain of 3 tokens" in text


def test_without_results_the_card_says_so(run, trained, tmp_path):
    folder = trained()
    run("publish_tiny_longspec", "--run", folder, "--results", tmp_path / "none", "--output", tmp_path / "card")
    assert "Not measured." in (tmp_path / "card" / "README.md").read_text()


def test_a_card_tells_what_came_before(run, trained, tmp_path):
    first, card, texts, last = trained(), tmp_path / "card", tmp_path / "texts", tmp_path / "longer"
    run("publish_tiny_longspec", "--run", first, "--results", tmp_path / "none", "--output", card)
    target, streams = tmp_path / "target", tmp_path / "streams"
    some = ("--rows", 2, "--batch", 2, "--length", 32, "--prompt", 5)
    run("write_target_texts", "--target", target, "--streams", streams, "--output", texts, *some)
    places = ("--streams", texts, "--target", target, "--output", last, "--draft", card)
    run("train_tiny_longspec", *places, "--length", 16, "--batch", 1, "--steps", 2, "--warmup", 1)
    stages = ("--before", card, "--before", texts, "--run", last)
    run("publish_tiny_longspec", *stages, "--results", tmp_path / "none", "--output", tmp_path / "new")
    text = (tmp_path / "new" / "README.md").read_text()
    told = [
        "3 steps of 2 rows",
        "Then 2 steps of 1 rows",
        "on `runs/texts`",
        "--steps 3",
        "write_target_texts.py",
        "--draft runs/card",
    ]
    places = [text.index(part) for part in told]
    assert places == sorted(places) and str(tmp_path) not in text


@pytest.mark.parametrize(
    ("ablation", "field", "value"),
    [("noise", "noise_range", [1, 1]), ("cross-attention", "cross_attention", False), ("offsets", "window", 512)],
)
def test_ablations_take_away_one_thing(trained, ablation, field, value):
    folder = trained("--without", ablation)
    draft = AutoModel.from_pretrained(folder / "final")
    assert getattr(draft.config, field) == value
    assert (draft.config.trained_max_length <= 32) == (ablation == "offsets")
    assert (draft.config.noise_range == [1, 5]) == (ablation != "noise")
    assert f"--without {ablation}" in (folder / "command.txt").read_text()


def test_going_on_with_a_draft_starts_from_its_weights(trained, run, tmp_path):
    first = trained() / "final"
    places = ("--streams", tmp_path / "streams", "--target", tmp_path / "target", "--output", tmp_path / "longer")
    run("train_tiny_longspec", *places, "--draft", first, "--length", 64, "--batch", 1, "--steps", 2, "--warmup", 1)
    before, after = (AutoModel.from_pretrained(folder) for folder in (first, tmp_path / "longer" / "final"))
    moved = [(a - b).abs().max() for a, b in zip(before.parameters(), after.parameters(), strict=True)]
    assert 0 < max(moved) < 0.01  # a step of Adam is at most the learning rate, 0.002; bfloat16 rounds
    assert "--draft runs/run/final" in (tmp_path / "longer" / "command.txt").read_text()


def test_without_streams(run, tmp_path):
    (tmp_path / "none").mkdir()
    with pytest.raises(SystemExit, match=r"has no \*\.npy: run examples/train_tiny_target.py"):
        run("train_tiny_longspec", "--streams", tmp_path / "none", "--output", tmp_path / "run")
