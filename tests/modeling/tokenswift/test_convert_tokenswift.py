"""Conversion of TokenSwift's merged checkpoints: heads keep their tensors, and the target's are not read."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModel

from hf_longspec import TokenSwiftDraftModel
from hf_longspec.modeling.register_draft import convert
from tests.tiny_targets import tiny_target

WIDTH = 64


def published_heads(num_heads=3, width=WIDTH):
    """Return the tensors of published heads by the authors' names."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for head in range(num_heads):
        prefix = f"model.medusa_layers.{head}."
        tensors[prefix + "linear.weight"] = torch.randn(width, width, generator=generator) * 0.1
        for norm in ("input_layernorm", "post_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = 1 + 0.3 * torch.randn(width, generator=generator)
    return tensors


@pytest.fixture(scope="module")
def target():
    return tiny_target("qwen2", rms_norm_eps=1e-3)  # large enough to change the result


@pytest.fixture
def config(target, tmp_path):
    target.config.save_pretrained(tmp_path / "target")
    return str(tmp_path / "target")


@pytest.fixture
def merged(target, tmp_path):
    """Return `merged(heads)`, which writes a folder like the authors' trainer, with an unreadable target shard."""

    def write(heads):
        save_file(heads, tmp_path / "model-2.safetensors")
        (tmp_path / "model-1.safetensors").write_bytes(b"gigabytes")
        files = dict.fromkeys(target.state_dict(), "model-1.safetensors") | dict.fromkeys(heads, "model-2.safetensors")
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
        return str(tmp_path)

    return write


@pytest.mark.parametrize(("num_heads", "dtype"), [(3, torch.bfloat16), (2, torch.float32)])
def test_heads_keep_their_tensors(merged, config, tmp_path, num_heads, dtype):
    heads = {name: value.to(dtype) for name, value in published_heads(num_heads).items()}
    convert(merged(heads), config).save_pretrained(tmp_path / "converted")
    draft = AutoModel.from_pretrained(tmp_path / "converted")
    assert type(draft) is TokenSwiftDraftModel and draft.dtype == dtype
    assert (draft.config.num_heads, draft.config.chained, draft.config.rms_norm_eps) == (num_heads, True, 1e-3)
    found = draft.heads.layers.state_dict()
    assert len(found) == len(heads)
    assert all(torch.equal(value, heads[f"model.medusa_layers.{name}"]) for name, value in found.items())
