"""What a run does to draft, target and folder."""

import os

import pytest
import torch
from safetensors.torch import load_file

from hf_longspec import LongSpecDraftModel
from hf_longspec.testing import tiny_prompts
from hf_longspec.training import TokenWindows


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("loss", ["kl", "ce"])
def test_every_weight_of_the_draft_moves_and_none_of_the_target(make_trainer, draft, target, pristine_target, loss):
    before = weights(draft)
    make_trainer(loss=loss, target_chunk_size=None if loss == "kl" else 20).train()
    unmoved = [name for name, tensor in draft.state_dict().items() if torch.equal(tensor, before[name])]
    assert not unmoved
    pristine = pristine_target.state_dict()
    assert all(torch.equal(tensor, pristine[name]) for name, tensor in target.state_dict().items())
    assert all(parameter.grad is None for parameter in target.parameters())


@pytest.mark.parametrize("loss", ["kl", "ce"])
def test_the_loss_falls_and_acceptance_rises(make_trainer, tokens, loss):
    """Eight rows at every gap, until the draft knows them."""
    rows = TokenWindows(tokens[: 8 * 33], 33)
    trainer = make_trainer(
        dataset=rows, eval_dataset=rows, loss=loss, max_steps=60, per_device_train_batch_size=8, max_offset=0
    )
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_loss"] < 0.7 * before["eval_loss"]
    for name in [f"eval_acceptance_gap_{gap}" for gap in range(1, 6)]:
        assert after[name] > before[name] + 0.2
    assert after["eval_estimated_tau"] > before["eval_estimated_tau"] + 0.2


def test_a_saved_draft_loads_and_generates_what_the_target_alone_does(make_trainer, target, tmp_path):
    trainer = make_trainer(max_steps=4)
    trainer.train()
    trainer.save_model(tmp_path / "draft")
    draft = LongSpecDraftModel.from_pretrained(tmp_path / "draft")
    saved = load_file(tmp_path / "draft" / "model.safetensors")
    assert all(torch.equal(tensor, draft.state_dict()[name]) for name, tensor in saved.items())
    prompt, mask = tiny_prompts(target.config.vocab_size, [19])
    settings = {"attention_mask": mask, "max_new_tokens": 23, "do_sample": False}
    plain = target.generate(prompt, **settings)
    assert target.generate(prompt, assistant_model=draft, **settings).tolist() == plain.tolist()


def test_checkpoint_and_optimizer_hold_the_draft_alone(make_trainer, draft, tmp_path):
    trainer = make_trainer(max_steps=2, save_strategy="steps", save_steps=2)
    trainer.train()
    folder = tmp_path / "run" / "checkpoint-2"
    assert set(load_file(folder / "model.safetensors")) == set(draft.state_dict())
    trained = sum(len(group["params"]) for group in trainer.optimizer.param_groups)
    assert trained == len(list(draft.parameters()))
    size = sum(parameter.numel() * 4 for parameter in draft.parameters())
    # AdamW: two states per weight
    assert os.path.getsize(folder / "optimizer.pt") < 2.2 * size


@pytest.mark.parametrize("max_offset", [0, 100])
def test_the_largest_position_is_recorded(make_trainer, draft, tmp_path, max_offset):
    trainer = make_trainer(max_steps=5, max_offset=max_offset)
    trainer.train()
    trainer.save_model(tmp_path / "draft")
    recorded = LongSpecDraftModel.from_pretrained(tmp_path / "draft").config.trained_max_length
    offsets = [
        offset for step in range(5) for offset in trainer.method.noise.draw(step, 2, range(2), [33, 33])[1]
    ]  # drawn again, from the definition
    assert recorded == 32 + max(offsets)
    assert max(offsets) <= max_offset and (max_offset == 0 or max(offsets) > 0)
