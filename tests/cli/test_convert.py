"""The command that converts the authors' checkpoints, through the typer application."""

import torch
from transformers import AutoModel

from hf_longspec import LongSpecDraftModel
from hf_longspec.cli import convert
from hf_longspec.testing import tiny_target


def test_a_trainer_file_becomes_a_draft(command, tmp_path):
    target = tiny_target("llama")
    target.config.save_pretrained(tmp_path / "target")
    tensors = LongSpecDraftModel.from_target(target, qkv_bias=True).block.state_dict()
    torch.save(tensors, tmp_path / "draft_model_weights.pth")
    arguments = ["convert", tmp_path, "--target", tmp_path / "target", "--output", tmp_path / "out"]
    result = command(*arguments)
    assert result.exit_code == 0 and "0.0M parameters" in result.output
    draft = AutoModel.from_pretrained(tmp_path / "out")
    assert torch.equal(draft.block.mlp.up_proj.weight, tensors["mlp.up_proj.weight"])
    again = command(*arguments)
    assert again.exit_code == 2 and "is not empty: pass a new folder as --output" in again.output


def test_errors_take_one_line(command, tmp_path, monkeypatch):
    result = command("convert", tmp_path, "--output", tmp_path / "out")
    assert result.exit_code == 2
    assert "error: no target is known for" in result.output and "Traceback" not in result.output
    (tmp_path / "file").touch()
    monkeypatch.setattr(convert.converting, "convert", None)  # the folder is checked before
    result = command("convert", tmp_path, "--output", tmp_path / "file" / "out")
    assert result.exit_code == 2 and f"{tmp_path}/file is a file. Pass another folder." in result.output
