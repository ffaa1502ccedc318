"""Whole runs of every method: what they change, and what they do not depend on."""

import pytest
import torch

from hf_longspec.training.target_states import TargetPass
from tests.training.first_step import SGD_TOLERANCE, check_checkpointing

RECURRENT = {"markov_rank": 3, "markov_head_type": "rnn", "sample_from_anchor": True}
KINDS = pytest.mark.parametrize("kind", ["longspec", "heads"])


@pytest.fixture
def make(make_draft, make_heads, make_eagle3, make_dflash):
    """`make[kind](**settings)`: a new draft, with the same weights every time."""
    return {"longspec": make_draft, "heads": make_heads, "eagle3": make_eagle3, "dflash": make_dflash}


def trained(make_trainer, model, **settings):
    trainer = make_trainer(model=model, **settings)
    trainer.train()
    return trainer, {name: tensor.clone() for name, tensor in model.state_dict().items()}


def history(trainer):
    log = trainer.state.log_history
    return [(entry["loss"], entry["grad_norm"]) for entry in log if "loss" in entry]


@pytest.mark.parametrize(
    ("kind", "overrides", "settings"),
    [
        ("longspec", {}, {"loss": "ce", "target_chunk_size": 20}),
        ("heads", {"sequential": True}, {"loss": "kl"}),
        ("dflash", RECURRENT | {"conv_kernel_size": 2}, {}),
        ("eagle3", {"own_embedding": True, "own_head": True, "norm_before_fc": True, "draft_vocab_size": 20}, {}),
    ],
    ids=str,
)
def test_every_weight_of_the_draft_changes_and_none_of_the_target(
    make_trainer, make, target, pristine_target, kind, overrides, settings
):
    draft = make[kind](**overrides)
    before = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    after = trained(make_trainer, draft, **settings)[1]
    same = [name for name, tensor in after.items() if torch.equal(tensor, before[name])]
    assert same == (["d2t", "embed_tokens.weight"] if kind == "eagle3" else [])
    pristine = pristine_target.state_dict()
    assert all(torch.equal(tensor, pristine[name]) for name, tensor in target.state_dict().items())
    assert all(parameter.grad is None for parameter in target.parameters())


SAME = {
    "longspec": (
        {"target_chunk_size": 7},
        {"torch_compile": True, "torch_compile_backend": "eager", "loss_chunk_size": 5},
    ),
    "heads": ({"target_chunk_size": 7, "loss_chunk_size": 5, "dataloader_num_workers": 1},),
}


@KINDS
def test_the_result_is_the_same(make_trainer, make, kind):
    sgd = {"optim": "sgd", "learning_rate": 0.1, "max_steps": 2}
    expected = trained(make_trainer, make[kind](), **sgd)[1]
    for settings in SAME[kind]:
        torch.testing.assert_close(trained(make_trainer, make[kind](), **sgd, **settings)[1], expected, **SGD_TOLERANCE)


@pytest.mark.parametrize(
    ("kind", "overrides", "inner"),
    [
        ("longspec", {}, "block.self_attn.q_proj"),
        ("heads", {"sequential": True}, "heads.layers.1.fusion"),
        ("eagle3", {"num_hidden_layers": 2}, "layers.1.self_attn.k_proj"),
        ("eagle3", {"mask_token_id": 2, "own_embedding": True}, "layers.0.self_attn.k_proj"),
        ("dflash", RECURRENT | {"conv_kernel_size": 2, "num_hidden_layers": 2}, "layers.1.mlp.down_proj"),
    ],
    ids=str,
)
def test_checkpointing_changes_no_gradient(make_trainer, make, labelled, kind, overrides, inner):
    check_checkpointing(make_trainer, lambda: make[kind](**overrides), inner, labelled)


@pytest.mark.parametrize(("kind", "loss"), [("longspec", "kl"), ("heads", "ce")])
def test_stored_states_give_the_losses_with_the_target(make_trainer, make, rows, tmp_path, loss, kind, monkeypatch):
    settings = {"dataset": rows, "loss": loss, "max_steps": 2} | ({"max_offset": 0} if kind == "longspec" else {})
    running = trained(make_trainer, make[kind](), **settings)[0]
    settings["target_kv_dir"] = str(tmp_path / "states")
    trained(make_trainer, make[kind](), **settings | {"max_steps": 1})
    monkeypatch.setattr(TargetPass, "__call__", lambda *_: pytest.fail("the target was run"))
    stored = trained(make_trainer, make[kind](), **settings)[0]
    # the padding of a row depends on its batch, which changes the order of float32 sums
    assert history(stored) == [pytest.approx(step, rel=1e-4) for step in history(running)]


@pytest.mark.parametrize(
    ("kind", "overrides", "loss", "dtype"),
    [
        ("longspec", {}, "kl", torch.bfloat16),
        ("heads", {}, "ce", torch.float32),
        ("eagle3", {"draft_vocab_size": 20}, "kl", torch.bfloat16),
        ("eagle3", {"draft_vocab_size": 20, "own_head": True}, "kl", torch.bfloat16),
    ],
    ids=str,
)
def test_bfloat16_is_near(make_trainer, make, target, kind, overrides, loss, dtype):
    """The draft runs under autocast. The target keeps its dtype and its forward."""
    ((exact, _),) = history(trained(make_trainer, make[kind](**overrides), loss=loss, max_steps=1)[0])
    forward = target.to(dtype).forward
    trainer, after = trained(make_trainer, make[kind](**overrides).float(), loss=loss, bf16=True, max_steps=1)
    # 8 bits of mantissa in logits of size 3 to 10
    assert history(trainer)[0][0] == pytest.approx(exact, rel=0.05)
    assert all(tensor.dtype == torch.float32 for name, tensor in after.items() if name != "d2t")
    assert target.dtype == dtype and target.forward == forward
