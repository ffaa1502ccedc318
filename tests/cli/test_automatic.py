"""What a recipe leaves open is chosen by the sizes of the target."""

from types import SimpleNamespace

import pytest

from hf_longspec.cli import CommandError, automatic
from hf_longspec.cli.automatic import choose
from hf_longspec.cli.recipe import Recipe

SMOLLM2 = SimpleNamespace(hidden_size=576, intermediate_size=1536, vocab_size=49152, max_position_embeddings=8192)


def recipe(draft, pack=None, **training):
    return Recipe(target="t", training=training, dataset={"path": "x"}, draft=draft, pack=pack)


def test_values_are_chosen_in_one_place_and_named_in_a_line(monkeypatch):
    monkeypatch.setattr(automatic, "memory", lambda use_cpu: 16e9)
    given = recipe({"draft_vocab_size": "auto"}, "auto", per_device_train_batch_size=2)
    line = choose(given, SMOLLM2)
    assert line == (
        "Chosen for a target of width 576 with 49,152 tokens: learning_rate 0.0005, pack 1024, draft_vocab_size 8192."
    )
    assert (given.training["learning_rate"], given.pack, given.draft["draft_vocab_size"]) == (5e-4, 1024, 8192)
    assert choose(given, SMOLLM2) is None


def test_rows_are_halved_until_a_step_fits(monkeypatch):
    large = SimpleNamespace(hidden_size=4096, intermediate_size=14336, vocab_size=128256, max_position_embeddings=8192)
    lengths = []
    for size in (32e9, 8e9, 2e9):
        monkeypatch.setattr(automatic, "memory", lambda use_cpu, size=size: size)
        given = recipe({}, "auto", learning_rate=1e-3, per_device_train_batch_size=4)
        choose(given, large)
        lengths.append(given.pack)
    assert lengths == [1024, 256, 128]
    large.max_position_embeddings = 300
    monkeypatch.setattr(automatic, "memory", lambda use_cpu: 32e9)
    choose(given := recipe({}, "auto"), large)
    assert given.pack == 300


def test_given_values_and_other_kinds_stay_as_they_are():
    for draft in ({"kind": "eagle3"}, "runs/draft"):
        given = recipe(draft)
        assert choose(given, SMOLLM2) is None and given.training == {}
    given = recipe({}, 64, learning_rate=1e-4)
    assert choose(given, SMOLLM2) is None and given.pack == 64 and given.training["learning_rate"] == 1e-4
    with pytest.raises(CommandError, match=r"learning_rate: auto is for a new LongSpec draft. Set a number"):
        choose(recipe("runs/draft", learning_rate="auto"), SMOLLM2)
