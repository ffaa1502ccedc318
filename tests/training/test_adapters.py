"""LoRA on an existing draft: an adapter is trained, saved, loaded and drafts."""

import json

import pytest
import torch
from safetensors.torch import load_file

from hf_longspec import LongSpecDraftModel
from hf_longspec.testing import tiny_prompts

peft = pytest.importorskip("peft")


@pytest.fixture
def config():
    return peft.LoraConfig(r=3, target_modules=["q_proj", "o_proj", "down_proj"])


def test_an_adapter_alone_is_saved_loads_and_drafts(make_trainer, draft, target, config, tmp_path):
    draft.save_pretrained(tmp_path / "base")
    base = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    trainer = make_trainer(peft_config=config, max_steps=4)
    trainer.train()
    trainer.save_model(tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert saved and all("lora_" in name for name in saved)
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == 3

    fresh = LongSpecDraftModel.from_pretrained(tmp_path / "base")
    assert all(tensor.equal(base[name]) for name, tensor in fresh.state_dict().items())
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter")
    prompt, mask = tiny_prompts(target.config.vocab_size, [19])
    settings = {"attention_mask": mask, "max_new_tokens": 21, "do_sample": False, "return_dict_in_generate": True}
    plain = target.generate(prompt, **settings)
    for assistant in (loaded, loaded.merge_and_unload()):
        out = target.generate(prompt, assistant_model=assistant, **settings)
        assert out.sequences.tolist() == plain.sequences.tolist()
        assert out.speculation.num_draft_tokens > 0


def test_only_the_adapter_moves(make_trainer, draft, config):
    model = peft.get_peft_model(draft, config)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    make_trainer(model=model, max_steps=3).train()
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == {name for name in before if "lora_" in name}


def test_a_half_precision_draft_can_get_an_adapter(make_trainer, draft, config):
    trainer = make_trainer(model=draft.bfloat16(), peft_config=config, max_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] > 0
