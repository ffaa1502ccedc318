"""Ways to run that change speed or memory, and targets of other architectures."""

import pytest
import torch

from hf_longspec import LongSpecDraftModel
from hf_longspec.testing import tiny_target
from hf_longspec.training import DraftTrainer, DraftTrainingArguments, TokenWindows


def trained(make_trainer, model, **settings):
    trainer = make_trainer(model=model, optim="sgd", learning_rate=0.1, **settings)
    trainer.train()
    return trainer, {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_checkpointing": True},
        {"target_chunk_size": 7},
        {"loss_chunk_size": 5},
        {"torch_compile": True, "torch_compile_backend": "eager"},
        {"dataloader_num_workers": 1},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_the_result_is_the_same(make_trainer, make_draft, settings):
    expected = trained(make_trainer, make_draft())[1]
    # float32 sums in another order, in three steps of SGD with gradients of size 1
    torch.testing.assert_close(trained(make_trainer, make_draft(), **settings)[1], expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("loss", ["kl", "ce"])
def test_bfloat16_is_near(make_trainer, make_draft, target, loss):
    """Autocast of the draft, beside a target in float32 and one in bfloat16; its forward stays the user's own."""
    exact = trained(make_trainer, make_draft(), loss=loss)[0].state.log_history[0]["loss"]
    forward = target.forward
    for dtype in (torch.float32, torch.bfloat16):
        target.to(dtype)
        trainer, weights = trained(make_trainer, make_draft().float(), loss=loss, bf16=True)
        # 8 bits of mantissa in logits of size 3 to 10
        assert trainer.state.log_history[0]["loss"] == pytest.approx(exact, rel=0.05)
        assert all(tensor.dtype == torch.float32 for tensor in weights.values())
        assert target.dtype == dtype and target.forward == forward


@pytest.mark.parametrize("name", ["gemma2", "cohere2", "granite", "glm4", "smollm3", "gpt_oss"])
def test_other_architectures_learn(name, tmp_path):
    """Softcaps, windows, logit factors, interleaved and missing rotations, sinks."""
    target = tiny_target(name)
    torch.manual_seed(0)
    draft = LongSpecDraftModel.from_target(target, window=16)
    rows = TokenWindows(torch.randint(3, 128, (4 * 25,), generator=torch.Generator().manual_seed(0)), 25)
    settings = {"max_steps": 25, "per_device_train_batch_size": 4, "learning_rate": 5e-3, "max_offset": 100}
    settings |= {"save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "target_chunk_size": 10}
    args = DraftTrainingArguments(str(tmp_path), **settings)
    trainer = DraftTrainer(draft, target, args, train_dataset=rows, eval_dataset=rows)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.9 * before
