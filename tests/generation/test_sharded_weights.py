"""A target whose weights are sharded over processes decodes without the draft, whose steps would not match."""

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hf_longspec import NgramDraftModel
from tests.tiny_targets import tiny_target

HOW = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
IDS = torch.arange(4, 9).repeat(1, 4)


@pytest.fixture
def group():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("is_sharded", [False, True])
def test_fully_shard(group, is_sharded):
    model = tiny_target("llama")
    expected = model.generate(IDS, **HOW)
    draft = NgramDraftModel.from_target(model, gate=False)
    if is_sharded:
        mesh = init_device_mesh("cpu", (1,))
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=mesh)
    assert torch.equal(model.generate(IDS, **HOW, assistant_model=draft), expected)
    reason = draft.last_speculation.reason
    assert ("the weights are sharded over processes" in reason) if is_sharded else reason is None


def test_forwards_that_processes_count_together(group):
    model = tiny_target("llama")
    draft = NgramDraftModel.from_target(model)
    assert torch.equal(model.generate(IDS, **HOW, assistant_model=draft, synced_gpus=True), model.generate(IDS, **HOW))
    assert "synced_gpus=True" in draft.last_speculation.reason
    draft.generation_config.on_unsupported = "error"
    with pytest.raises(ValueError, match="Generate with a copy that each process holds whole"):
        model.generate(IDS, **HOW, assistant_model=draft, synced_gpus=True)
    model.generate(IDS, **HOW, assistant_model=draft, synced_gpus=False)
    assert draft.last_speculation.reason is None
