"""The script that publishes the tiny target, on a random model and on short texts."""

import argparse
import json

import pytest
import torch
import yaml

from tests import scripts
from tests.tiny_tokenizers import save_byte_target

CONTEXT = 2048  # two buckets; contexts of 512 bytes and more are short for the bytes after 1,024


def measured(length, **numbers):
    return {"stage": (512, 16384).index(length), "length": length, "distance": length // 2, **numbers}


TRAINING = {
    "bytes": {"source": 68_000_000, "novels": 65_400_000},
    "streams": {"source": 85, "novels": 81},
    "stages": [{"length": 512, "layers": 1}, {"length": 16384, "layers": 2}],
    "seed": 0,
    "threads": 1,
    "parent_layers": 1,
    "history": [
        measured(512, seconds=60, steps=30, tokens=122_880, loss=2.5, recalled=0.5),
        measured(512, seconds=2700, steps=900, tokens=3_686_400, loss=1.5, recalled=0.7),
        measured(16384, seconds=5400, steps=1000, tokens=5_324_800, loss=1.0, recalled=1.0),
    ],
}


@pytest.fixture(scope="module")
def script():
    return scripts.script("publish_tiny_target")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The files of a training run: bfloat16 weights, tokenizer, training.json."""
    folder = tmp_path_factory.mktemp("model")
    save_byte_target(folder, dtype=torch.bfloat16, max_position_embeddings=CONTEXT, initializer_range=0.2)
    (folder / "training.json").write_text(json.dumps(TRAINING))
    return folder


@pytest.fixture(scope="module")
def novels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("novels")
    for number, name in enumerate(("one", "two")):
        words = [f"word{(number + 3) * index % 97}" for index in range(600)]
        (folder / f"{name}.txt").write_text(" ".join(words), encoding="utf-8")
    (folder / "short.txt").write_text("too short", encoding="utf-8")
    return folder


def publish(script, model, novels, output):
    arguments = argparse.Namespace(model=model, eval=novels, output=output, windows=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "parse_arguments", lambda: arguments)
        patch.setattr(script, "HELD_OUT", ("mailbox", "statistics"))
        patch.setattr(script, "HELD_OUT_PACKAGES", ("jinja2",))
        patch.setattr(script, "QUOTATIONS", 3)
        patch.setattr(script, "DISTANCES", (300, 1024))
        script.main()
    return output


@pytest.fixture(scope="module")
def published(script, trained, novels, tmp_path_factory):
    return publish(script, trained, novels, tmp_path_factory.mktemp("published"))


def test_evaluation_and_card_say_the_same(published):
    evaluation = json.loads((published / "evaluation.json").read_text())
    card = (published / "README.md").read_text(encoding="utf-8")
    sources = evaluation["sources"]
    assert sources["novels"]["documents"] == ["one", "two"] and sources["packages"]["documents"] == ["jinja2"]
    assert sources["modules"]["documents"] == ["mailbox", "statistics"]
    assert [source["windows"] for source in sources.values()] == [4, 4, 4]
    for source in sources.values():
        assert [(bucket["from"], bucket["to"]) for bucket in source["buckets"]] == [(0, 512), (512, CONTEXT)]
        for bucket in source["buckets"]:
            assert 0 < bucket["loss"] < 20
            assert f"{bucket['loss']:.3f} ± {bucket['half_width']:.3f}" in card
        gain = source["gain"]
        assert f"| {gain['short']:.3f} | {gain['long']:.3f} | {gain['gain']:.3f} ± {gain['half_width']:.3f} |" in card
        for quoted in source["recall"]:
            assert f"{quoted['nats']:.2f}, {quoted['right']:.0%}" in card
    skipped = evaluation["half_depth"]
    assert f"the loss is\n{skipped['nats']:.3f} ± {skipped['half_width']:.3f} nats per byte higher (5 texts)" in card
    _, front, body = card.split("---\n", 2)
    assert yaml.safe_load(front)["library_name"] == "transformers"
    assert "| 512 | 45 | 900 | 3.7M | 2.00 | 60% at 256 |" in body and "/home" not in body and "{" not in body
    assert "4 of 2 novels, 4 of 2 modules, 4 of 1 packages" in card and "with the last 512 to 1023 bytes" in card
