"""The command that converts the authors' checkpoints, through the typer application."""

import torch
from transformers import AutoModel
from typer.testing import CliRunner

from hf_longspec import LongSpecDraftModel
from hf_longspec.cli.app import app
from hf_longspec.testing import tiny_target


def run(*arguments):
    return CliRunner().invoke(app, ["convert", *map(str, arguments)])


def test_a_trainer_file_becomes_a_draft(tmp_path):
    target = tiny_target("llama")
    target.config.save_pretrained(tmp_path / "target")
    tensors = LongSpecDraftModel.from_target(target, qkv_bias=True).block.state_dict()
    torch.save(tensors, tmp_path / "draft_model_weights.pth")
    result = run(tmp_path, "--target", tmp_path / "target", "--output", tmp_path / "out")
    assert result.exit_code == 0 and "0.0M parameters" in result.output
    draft = AutoModel.from_pretrained(tmp_path / "out")
    assert torch.equal(draft.block.mlp.up_proj.weight, tensors["mlp.up_proj.weight"])
    again = run(tmp_path, "--target", tmp_path / "target", "--output", tmp_path / "out")
    assert again.exit_code == 2 and "is not empty: pass a new folder as --output" in again.output


def test_errors_take_one_line(tmp_path):
    result = run(tmp_path, "--output", tmp_path / "out")
    assert result.exit_code == 2
    assert "error: no target is known for" in result.output and "Traceback" not in result.output
