"""The script that publishes the tiny target, on a random model of its shape and on short texts."""

import argparse
import json
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_longspec.testing import tiny_prompts, tiny_target
from tests.tiny_tokenizers import save_byte_target

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
CONTEXT = 768  # one bucket of 512, one cut short

TRAINING = {
    "minutes": [45.0, 30.0, 10.0],
    "stage_lengths": [512, 8192, 16384],
    "tokens_per_step": 4096,
    "corpora": {"/home/someone/novels/train": 20_000_000, "stdlib": 2_400_000},
    "weights": [2.0, 1.0],
    "seed": 0,
    "history": [
        {"elapsed": 60.0, "steps": 30, "tokens": 122_880, "length": 512, "loss": 7.5},
        {"elapsed": 2700.0, "steps": 900, "tokens": 3_686_400, "length": 512, "loss": 4.5},
        {"elapsed": 5100.0, "steps": 1000, "tokens": 5_324_800, "length": 16384, "loss": 4.25},
    ],
}


@pytest.fixture(scope="module")
def script():
    """The example, imported as it imports its siblings: from its own folder."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        import publish_tiny_target

        yield publish_tiny_target
    finally:
        sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The files of a training run: bfloat16 weights, tokenizer, training.json."""
    folder = tmp_path_factory.mktemp("model")
    save_byte_target(folder, dtype=torch.bfloat16, max_position_embeddings=CONTEXT)
    (folder / "training.json").write_text(json.dumps(TRAINING))
    return folder


@pytest.fixture(scope="module")
def novels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("novels")
    for number, name in enumerate(("one", "two")):
        words = [f"word{(number + 3) * index % 97}" for index in range(400)]
        (folder / f"{name}.txt").write_text(" ".join(words), encoding="utf-8")
    (folder / "short.txt").write_text("too short", encoding="utf-8")
    return folder


def publish(script, model, novels, output):
    arguments = argparse.Namespace(model=model, eval=novels, output=output, windows=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "parse_arguments", lambda: arguments)
        patch.setattr(script, "HELD_OUT", ("mailbox", "statistics"))
        script.main()
    return output


@pytest.fixture(scope="module")
def published(script, trained, novels, tmp_path_factory):
    return publish(script, trained, novels, tmp_path_factory.mktemp("published"))


def test_the_folder_is_a_hub_repository(published, trained):
    expected = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in published.iterdir()} == expected | {"README.md", "evaluation.json"}
    assert AutoModelForCausalLM.from_pretrained(published).dtype == torch.bfloat16
    assert (
        AutoTokenizer.from_pretrained(published)("abc")["input_ids"]
        == AutoTokenizer.from_pretrained(trained)("abc")["input_ids"]
    )


def test_losses_are_those_of_one_forward(script, monkeypatch):
    """Chunks with a cache against the loss that the model itself computes."""
    monkeypatch.setattr(script, "CHUNK", 7)
    model = tiny_target("llama")
    ids, _ = tiny_prompts(128, [50])
    losses = script.losses_of(model, ids)
    assert len(losses) == 49
    with torch.no_grad():
        assert losses.mean().item() == pytest.approx(model(input_ids=ids, labels=ids).loss.item(), rel=1e-5)


def test_buckets_are_means_over_what_precedes(script):
    losses = torch.arange(1.0, 16384).repeat(2, 1)  # the loss of a token is the number of tokens before it
    losses[1] += 2
    found = script.buckets(losses, 16384)
    assert [(bucket["from"], bucket["to"]) for bucket in found] == [
        (0, 512), (512, 2048), (2048, 4096), (4096, 8192), (8192, 16384),
    ]  # fmt: skip
    assert [bucket["loss"] for bucket in found] == [257.0, 1280.5, 3072.5, 6144.5, 12288.5]
    assert found[0]["half_width"] == pytest.approx(1.96 * 2**0.5 / 2**0.5, abs=1e-3)


def test_evaluation_and_card_say_the_same(published):
    evaluation = json.loads((published / "evaluation.json").read_text())
    card = (published / "README.md").read_text(encoding="utf-8")
    sources = evaluation["sources"]
    assert sources["novels"]["documents"] == ["one", "two"]
    assert sources["standard-library modules"]["documents"] == ["mailbox", "statistics"]
    assert sources["novels"]["windows"] == sources["standard-library modules"]["windows"] == 4
    for source in sources.values():
        assert [(bucket["from"], bucket["to"]) for bucket in source["buckets"]] == [(0, 512), (512, CONTEXT)]
        for bucket in source["buckets"]:
            assert 0 < bucket["loss"] < 20
            assert f"{bucket['loss']:.3f} ± {bucket['half_width']:.3f}" in card
    assert "4 of 2 novels and 4 of 2 standard-library modules" in card


def test_the_card_shows_no_private_paths(published):
    card = (published / "README.md").read_text(encoding="utf-8")
    _, front, body = card.split("---\n", 2)
    assert yaml.safe_load(front)["library_name"] == "transformers"
    assert "| 512 | 45 | 900 | 3.7M | 6.000 |" in body
    assert "/home" not in body and "{" not in body


def test_the_same_input_gives_the_same_folder(script, trained, novels, published, tmp_path):
    again = publish(script, trained, novels, tmp_path)
    for path in published.iterdir():
        assert path.read_bytes() == (again / path.name).read_bytes(), path.name


def test_float32_weights_are_refused(script, trained, tmp_path):
    for name in (*script.FILES, "training.json"):
        (tmp_path / name).write_bytes((trained / name).read_bytes())
    tiny_target("llama").save_pretrained(tmp_path)
    with pytest.raises(SystemExit, match="holds weights in F32, expected BF16"):
        script.check_files(tmp_path)


def test_files_that_do_not_fit(script, trained, tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match=r"has no config\.json.* training\.json"):
        script.check_files(tmp_path)
    monkeypatch.setattr(script, "MAX_BYTES", 1000)
    with pytest.raises(SystemExit, match="expected less than 1,000"):
        script.check_files(trained)


def test_texts_shorter_than_the_context_are_refused(script, trained, tmp_path):
    (tmp_path / "short.txt").write_text("too short", encoding="utf-8")
    with pytest.raises(SystemExit, match="has 768 tokens"):
        publish(script, trained, tmp_path, tmp_path / "output")
    assert not (tmp_path / "output").exists()
