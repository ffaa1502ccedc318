"""Every YAML file of recipes/ for two steps, as it stands but for a tiny target, a small dataset, the processor."""

import json

import pytest
import torch
from transformers import AutoModel

from hf_longspec.cli import recipe as recipes
from tests.cli.conftest import run_command
from tests.cli.test_train import RECIPES as FOLDER
from tests.pairwise import few
from tests.tiny_targets import tiny_target
from tests.tiny_tokenizers import byte_tokenizer

pytest.importorskip("datasets")
# Architecture and positions of the target, kind of the rows, and what else is changed: eight rows of 32K tokens for a
# step would take many minutes. 9,000 are two pieces of `target_chunk_size`.
RECIPES = {
    "longspec_pretrain": ("qwen3", 32768, "text", {}),
    "longspec_long": ("qwen3", 32768, "text", {"pack": "9000", "training.gradient_accumulation_steps": "1"}),
    "longspec_sft": ("qwen3", 32768, "messages", {}),
    "eagle3": ("qwen3", 32768, "messages", {}),
    "tokenswift": ("qwen2", 8192, "text", {}),
    "tokenswift_14b": ("qwen2", 8192, "text", {}),
}


def save_rows(folder, kind):
    """Documents of 200 to 250 bytes, 12,000 together, or the same as conversations."""
    lines = []
    for number in range(54):
        text = " ".join(f"word{(number + 3) * index % 17}" for index in range(36))
        messages = [{"role": "user", "content": "say it"}, {"role": "assistant", "content": text}]
        lines.append(json.dumps({"text": text} if kind == "text" else {"messages": messages}))
    file = folder / f"{kind}.jsonl"
    file.write_text("\n".join(lines))
    return file


def save_tiny(folder, architecture, positions):
    byte_tokenizer().save_pretrained(folder)
    tiny_target(architecture, vocab_size=259, max_position_embeddings=positions).save_pretrained(folder)
    template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<eos>{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    return folder


def assert_as_written(recipe, folder, changed):
    """The trainer receives the values of the file."""
    given = torch.load(folder / "training_args.bin", weights_only=False)
    for name, value in recipe.training.items():
        if name not in changed:
            found = getattr(given, name)
            assert getattr(found, "value", found) == value, name


def test_two_steps_of_the_recipe_of_ten_minutes(tiny, tmp_path):
    """With the bundled target and texts of its own, as in docs/training.md."""
    file = FOLDER / "ten_minutes.yaml"
    recipe = recipes.read_recipe(file, {"dataset": {"path": "text"}})
    (tmp_path / "module.py").write_text(tiny.notes.read_text() * 20)
    arguments = ["--target", tiny.target, "--max-steps", "2", "--output-dir", tmp_path / "draft"]
    done = run_command("train", tmp_path / "module.py", "--config", file, *arguments)
    assert done.exit_code == 0, done.output
    assert_as_written(recipe, tmp_path / "draft", {"max_steps", "output_dir"})
    config = AutoModel.from_pretrained(tmp_path / "draft").config.to_dict()
    chosen = {"draft_vocab_size": None}
    assert all(config[name] == value for name, value in (recipe.draft | chosen).items())
    assert torch.load(tmp_path / "draft" / "training_args.bin", weights_only=False).learning_rate == 2e-3
    assert "learning_rate: 0.002" in json.loads((tmp_path / "draft" / "card.json").read_text())["training"]


@pytest.mark.parametrize("family", few(["tokenswift", "eagle3", "longspec"], 1))
def test_two_steps_of_every_recipe(family, tmp_path, monkeypatch):
    """Those of LongSpec follow each other by the folders they name; the others are trained on once more."""
    monkeypatch.chdir(tmp_path)
    drafts = []
    for name, (architecture, positions, kind, sizes) in RECIPES.items():
        if not name.startswith(family):
            continue
        file = FOLDER / f"{name}.yaml"
        recipe = recipes.read_recipe(file, {})
        (tmp_path / name).mkdir()
        target, rows = save_tiny(tmp_path / name, architecture, positions), save_rows(tmp_path, kind)
        data = f"dataset.data_files={{{recipe.dataset['split']}: {rows}}}"
        arguments = ["--set", "dataset.path=json", "--set", data, "--max-steps", "2", "--target", str(target)]
        for setting, value in sizes.items():
            arguments += ["--set", f"{setting}={value}"]
        done = run_command("train", "--config", file, *arguments)
        assert done.exit_code == 0, done.output
        folder = tmp_path / recipe.training["output_dir"]
        assert f"Saved in {recipe.training['output_dir']} after 2 steps." in done.output
        assert f"hf-longspec bench --target {target} --draft {recipe.training['output_dir']}" in done.output
        assert_as_written(recipe, folder, {"max_steps"} | {name.removeprefix("training.") for name in sizes})
        drafts.append(AutoModel.from_pretrained(folder))
        assert drafts[-1].config.model_type == {"eagle3": "longspec_eagle3"}.get(family, family)
        if isinstance(recipe.draft, dict):
            config = drafts[-1].config.to_dict()
            assert all(config[key] == value for key, value in recipe.draft.items() if key != "kind")
    if family != "longspec":
        again = ["--draft", str(folder), "--output-dir", str(tmp_path / "again")]
        assert run_command("train", "--config", file, *arguments, *again).exit_code == 0
        drafts.append(AutoModel.from_pretrained(tmp_path / "again"))
    for name, weight in drafts[-1].named_parameters():
        assert not torch.equal(weight, dict(drafts[-2].named_parameters())[name]), name
