"""`hf-longspec train`: what a run writes, repeats and goes on with, and what is refused."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_longspec import LongSpecDraftModel
from hf_longspec.cli import options, train
from hf_longspec.cli.held_out import HeldOut
from hf_longspec.training import DraftTrainer
from tests.cli.conftest import run_command
from tests.tiny_tokenizers import save_byte_target
from tests.watching import after

pytestmark = pytest.mark.usefixtures("every_step_speculates")

datasets = pytest.importorskip("datasets")

PROJECT = Path(__file__).resolve().parents[2]
RECIPES = PROJECT / "recipes"
SHRUNK = ["--max-steps", "2", "--set", "training.bf16=false"]
SHRUNK += ["--set", "training.per_device_train_batch_size=2", "--set", "training.gradient_accumulation_steps=1"]
SHRUNK += ["--set", "dtype=float32", "--set", "training.disable_tqdm=true", "--set", "training.save_steps=1"]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_byte_target(tmp_path_factory.mktemp("target"), max_position_embeddings=512)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Texts as JSON lines, tokens as an array."""
    folder = tmp_path_factory.mktemp("data")
    texts = [" ".join(f"word{(number + 3) * index % 17}" for index in range(20)) for number in range(8)]
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    np.save(folder / "tokens.npy", np.arange(600, dtype=np.uint16) % 90 + 5)
    return folder


@pytest.fixture
def run(target, monkeypatch):
    """`run("train", ...)` on the tiny target: exit status and everything printed, errors too."""

    monkeypatch.chdir(PROJECT)

    def call(*arguments, target=target):
        result = run_command(*arguments, "--target", target)
        return result.exit_code, result.output

    return call


def test_what_was_trained_is_noted_for_the_card(run, data, tmp_path, monkeypatch):
    """With what was added to it by hand, and without the folders of the machine; publishing reads it."""
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "card.json").write_text('{"license": "mit", "base_model": "org/t"}')
    monkeypatch.setattr(sys, "argv", ["/usr/bin/hf-longspec", "train", "--config", f"{PROJECT}/recipes/x.yaml"])
    measured = []

    def as_if(draft, model, rows, encoder):
        measured.append((type(draft), len(rows)))
        return HeldOut(1.04, 1.35, 8)

    monkeypatch.setattr(train, "measure", as_if)
    arguments = ["--output-dir", folder, *SHRUNK, "--set", "pack=30"]
    arguments += ["--set", f"dataset={{path: json, data_files: {data}/text.jsonl, split: train}}"]
    status, output = run("train", "--config", RECIPES / "longspec_pretrain.yaml", *arguments)
    assert status == 0, output
    facts = json.loads((folder / "card.json").read_text())
    assert facts["license"] == "mit" and facts["base_model"] == "org/t" and "datasets" not in facts
    assert facts["command"] == "hf-longspec train --config recipes/x.yaml"
    assert facts["training"].startswith("2 steps") and len(facts["commit"].rstrip("+")) == 12
    assert measured == [(LongSpecDraftModel, 2)] and "tau 1.04: 1.04 tokens per step" in output
    result = run_command("publish", folder, "--dry-run")
    assert result.exit_code == 0, result.output
    warning = "With tau 1.04, below 1.35, this draft makes decoding slower."
    assert f"warning: {warning}" in output and f"warning: {warning}" in result.output
    text = (tmp_path / "draft-hub" / "README.md").read_text()
    assert f"**{warning}" in text and facts["held_out"] in text and "Not measured." not in text
    assert facts["command"] in text and facts["commit"] in text and "2 steps" in text


@pytest.fixture
def recipe(data, tmp_path):
    """A recipe of a stream of tokens, which needs no tokenizer."""
    text = f"""
        target: not/set
        draft: {{window: 16}}
        dataset: {{tokens: [{data / "tokens.npy"}]}}
        eval_dataset: {{tokens: {data / "tokens.npy"}}}
        pack: 25
        training: {{output_dir: {tmp_path / "run"}, learning_rate: 1e-3, max_steps: 4, save_steps: 2, use_cpu: true,
                    disable_tqdm: true}}
        """
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    return file


def test_the_most_frequent_tokens_are_counted(run, data, tmp_path):
    tokens = np.load(data / "tokens.npy")[:599]
    tokens[:99] = np.repeat([200, 7, 3], 33)
    np.save(tmp_path / "tokens.npy", tokens)
    recipe = {
        "draft": {"window": 8, "draft_vocab_size": 3},
        "pack": 40,
        "dataset": {"tokens": str(tmp_path / "tokens.npy")},
    }
    recipe |= {"target": "none", "training": {"output_dir": str(tmp_path / "draft")}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    status, printed = run("train", "--config", tmp_path / "recipe.yaml", *SHRUNK)
    assert status == 0, printed
    draft = LongSpecDraftModel.from_pretrained(tmp_path / "draft")
    assert draft.token_ids.tolist() == [3, 7, 200] and draft.config.draft_vocab_size == 3


@pytest.mark.parametrize("kind", ["text", "lines", "folder"])
def test_texts_of_the_command_line_replace_the_dataset_and_are_tokenized_once(
    run, recipe, data, tmp_path, kind, monkeypatch
):
    """As rows of equal length, the end-of-text token after every document; the second run finds them in the cache."""
    (tmp_path / "notes.txt").write_text("Naïve text.\n\nAnd more. " * 20, encoding="utf-8")
    sources = {"text": [tmp_path / "notes.txt", PROJECT / "LICENSE"]}
    sources |= {"lines": [data / "text.jsonl", "--column", "text"], "folder": [tmp_path / "set"]}
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text((data / "text.jsonl").read_text())
    tokenized = []

    def count(rows, dataset, tokenizer, *_):
        ids = [token for row in rows["input_ids"] for token in row]
        tokenized.append((rows.cache_files, ids.count(tokenizer.eos_token_id) - len(dataset)))

    after(monkeypatch, train, "pack", count)
    old = tmp_path / "run" / "checkpoint-7"
    for again in ([], ["--overwrite"]):
        status, output = run("train", *sources[kind], "--config", recipe, "--max-steps", 1, *again)
        assert status == 0, output
        assert not old.exists()  # a run that is continued would begin there
        old.mkdir()
    assert tokenized[0] == tokenized[1] and tokenized[0][0] and tokenized[0][1] == 0


def test_resuming_gives_the_draft_of_a_run_that_was_not_interrupted(run, recipe, tmp_path, monkeypatch):
    arguments = ["train", "--config", recipe]  # a checkpoint every second step
    assert run(*arguments, "--output-dir", tmp_path / "whole")[0] == 0

    def interrupt(_, trainer, *__, **___):
        if trainer.state.global_step == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        after(patch, DraftTrainer, "compute_loss", interrupt)
        status, output = run(*arguments)
        assert status == 130 and "--resume continues from the last checkpoint" in output and "Saved in" not in output
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-2"]
    status, output = run(*arguments, "--resume")
    assert status == 0 and "after 4 steps" in output
    (written,) = re.findall(r"```yaml\n(.*)```", json.loads((tmp_path / "run/card.json").read_text())["training"], re.S)
    written, whole = (yaml.load(text, options.YamlLoader) for text in (written, recipe.read_text()))
    assert written["training"] == {**whole["training"], "output_dir": "run"}
    assert all(written[name] == whole[name] for name in ("pack", "draft"))
    for file in ("model.safetensors", "config.json"):  # the config has the largest position
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "run" / file).read_bytes()


def test_a_run_has_as_many_steps_as_fit_into_its_time(run, recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "seconds_of_step", lambda trainer: 60.0)
    status, output = run("train", "--config", recipe, "--max-minutes", 2.2)
    assert status == 0, output
    assert "About 2 min: 2 steps of 60.00 s, with " in output and "after 2 steps." in output
    assert "max_steps: 2" in json.loads((tmp_path / "run" / "card.json").read_text())["training"]
    assert json.loads((tmp_path / "run/checkpoint-2/trainer_state.json").read_text())["max_steps"] == 2


def test_lora_saves_an_adapter(run, recipe, tmp_path):
    pytest.importorskip("peft")
    status, output = run(
        "train", "--config", recipe, "--set", "lora={r: 2, target_modules: [q_proj]}", "--max-steps", 1
    )
    assert status == 0, output
    assert (tmp_path / "run" / "adapter_model.safetensors").is_file()
    assert not (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--set", "training.learning_rat=1"], "unknown key 'learning_rat' in training: did you mean learning_rate?"),
        (["--set", "draft.windw=3"], "unknown key 'windw' in draft: did you mean window?"),
        (["--set", "lora={rank: 3}"], "unknown key 'rank' in lora"),
        (["--set", "training.output_dir=null"], "training has no output_dir"),
        (["--set", "dataset=null"], "Field 'dataset' expected a dict, got NoneType"),
        (["--set", "dtype=int8"], "'dtype' expected one of ('auto', 'float32', 'bfloat16', 'float16'), got int8"),
        (["--set", "pack.size=3"], "pack is 25 in the recipe, not a mapping"),
        (["--set", "pack=0"], "pack: 0 in the recipe: expected the number of tokens per row, at least 1."),
        (["--set", "pack=601"], "fewer than one row of length=601"),
        (["--set", "eval_dataset={}"], "eval_dataset has neither path nor tokens."),
        (["--set", "dataset={path: json, data_files: DATA}"], "has the splits train: add split"),
        (["--set", "draft.kind=medusa"], "expected one of dflash, eagle3, longspec, mtp, tokenswift."),
        (["--config", "hub_cards/tiny-longspec/model.safetensors"], "model.safetensors is not UTF-8 text."),
        (["--resume"], "has no complete checkpoint to resume from"),
        (["no-such-set"], "cannot load the dataset 'no-such-set'"),
        (["DATA", "--column", "body"], "the dataset has the columns ['text']"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_named_in_one_line(run, recipe, data, monkeypatch, arguments, complaint):
    """Before weights are loaded."""
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(lambda *_, **__: pytest.fail("too late")))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)  # it would try to reach the Hub for 20 seconds
    arguments = [argument.replace("DATA", f"{data}/text.jsonl") for argument in arguments]
    config = [] if "--config" in arguments else ["--config", recipe]
    status, output = run("train", *config, *arguments)
    lines = [line for line in output.splitlines() if line.startswith("error: ")]
    assert status == 2
    assert len(lines) == 1 and complaint in lines[0]


def test_a_diverged_run_has_its_own_exit_status(run, recipe, target, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(target)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "broken")
    status, output = run("train", "--config", recipe, target=tmp_path / "broken")
    assert status == 1
    assert "error: the loss at step 1 is nan" in output
