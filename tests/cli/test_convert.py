"""The command that converts the authors' checkpoints, through the typer application."""

import torch
from transformers import AutoModel

from hf_longspec import LongSpecDraftModel
from tests.tiny_targets import tiny_target


def test_a_trainer_file_becomes_a_draft(command, tmp_path):
    target = tiny_target("llama")
    target.config.save_pretrained(tmp_path / "target")
    tensors = LongSpecDraftModel.from_target(target, qkv_bias=True).block.state_dict()
    torch.save(tensors, tmp_path / "draft_model_weights.pth")
    arguments = ["convert", tmp_path, "--target", tmp_path / "target", "--output", tmp_path / "out"]
    for overwrite in ([], ["--overwrite"]):
        result = command(*arguments, *overwrite)
        assert result.exit_code == 0 and "0.0M parameters" in result.output
    draft = AutoModel.from_pretrained(tmp_path / "out")
    assert torch.equal(draft.block.mlp.up_proj.weight, tensors["mlp.up_proj.weight"])
