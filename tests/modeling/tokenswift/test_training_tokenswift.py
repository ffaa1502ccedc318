"""Training of TokenSwift heads: the loss against a loop over heads and tokens, and what a run changes."""

import pytest
import torch
from transformers import AutoModel, TrainerCallback

from hf_longspec import TokenSwiftDraftModel
from hf_longspec.generation.target_modules import FinalNormInput
from hf_longspec.testing import tiny_target
from hf_longspec.training import DraftTrainer, DraftTrainingArguments, TokenWindows
from hf_longspec.training.target_states import HiddenPass
from tests.modeling.tokenswift.restated_heads import restated_heads
from tests.training import conftest as training

# The fixtures of tests/training, whose `target` is another one than that of the loop's tests.
draft = training.draft
heads = training.heads
ligers_loss = training.ligers_loss
make_draft = training.make_draft
make_heads = training.make_heads
make_trainer = training.make_trainer
pristine_target = training.pristine_target
target = training.target
tokens = training.tokens

ROWS = [(0, 33), (40, 21), (70, 6), (90, 3)]


@pytest.fixture
def rows(tokens):
    """Ragged rows, the last too short for the third head. Some labels of the second are ignored."""
    rows = [{"input_ids": tokens[start : start + length]} for start, length in ROWS]
    rows[1]["labels"] = rows[1]["input_ids"].masked_fill(torch.arange(21) % 7 < 3, -100)
    return rows


def logits_of(draft, target, tokens):
    """Logits of the heads `(num_heads, L, vocab)` and of the target `(L, vocab)`, in float64."""
    with torch.no_grad(), FinalNormInput(target) as caught:
        wanted = target(tokens[None]).logits[0].double()
    config, weights = draft.config, draft.state_dict()
    sizes = config.num_heads, config.rms_norm_eps, config.chained
    embedded = target.get_input_embeddings()(tokens).detach().double() if config.sequential else None
    states = restated_heads(weights, "heads.layers.", caught.hidden[0], *sizes, embedded)
    return states @ target.lm_head.weight.detach().double().T, wanted


def with_hits(draft, target, row):
    """A row with many labels that are the first or the third choice of one of the heads."""
    drafted, _ = logits_of(draft, target, row["input_ids"])
    labels = row.get("labels", row["input_ids"]).clone()
    for place in range(2, len(labels)):
        head = place % 4  # every fourth label is not changed
        if 0 < head <= min(len(drafted), place - 1) and labels[place] != -100:
            labels[place] = drafted[head - 1, place - 1 - head].topk(3).indices[place % 3 and 2]
    return {**row, "labels": labels}


def definition(draft, target, rows, loss):
    """The loss, and top-1 and top-3 accuracy of every head, one token at a time."""
    losses, wins = [[] for _ in draft.heads.layers], [[] for _ in draft.heads.layers]
    for row in rows:
        labels = row["labels"].tolist()
        drafted, wanted = logits_of(draft, target, row["input_ids"])
        for head in range(1, len(drafted) + 1):
            for place in range(len(labels)):
                ahead = place + 1 + head
                if ahead >= len(labels) or labels[ahead] == -100:
                    continue
                logits = drafted[head - 1, place]
                log_draft, log_target = logits.log_softmax(-1), wanted[place + head].log_softmax(-1)
                token = labels[ahead] if loss == "ce" else int(log_target.argmax())
                divergence = (log_target.exp() * (log_target - log_draft)).sum()
                losses[head - 1].append(-log_draft[token] if loss == "ce" else divergence)
                order = logits.argsort(descending=True).tolist()
                wins[head - 1].append((order[0] == token, token in order[:3]))
    mean = sum(float(sum(own)) / len(own) for own in losses)
    logs = {}
    for head, own in enumerate(wins, start=1):
        first, top = zip(*own, strict=True)
        logs |= {f"head_{head}_top1": sum(first) / len(own), f"head_{head}_top3": sum(top) / len(own)}
    return mean, logs


@pytest.mark.parametrize(
    ("loss", "kind"),
    [("kl", {}), ("ce", {}), ("kl", {"chained": False}), ("ce", {"sequential": True})],
    ids=str,
)
def test_the_loss_is_the_definition(make_trainer, make_heads, target, rows, loss, kind):
    """In the first step of a run, and in an evaluation in one batch."""
    draft = make_heads(**kind)
    rows = [with_hits(draft, target, row) for row in rows]
    expected, logs = definition(draft, target, rows, loss)
    settings = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}
    trainer = make_trainer(model=draft, dataset=rows, eval_dataset=rows, loss=loss, max_steps=1, **settings)
    metrics = trainer.evaluate()
    trainer.train()
    log = trainer.state.log_history[0]
    # sums of about 40 losses around 3, in float32 against float64
    assert log["loss"] == pytest.approx(expected, rel=1e-5)
    assert metrics["eval_loss"] == pytest.approx(expected, rel=1e-5)
    assert len(logs) == 6 and len(set(logs.values())) > 3
    assert {name: log[name] for name in log if name.startswith("head")} == pytest.approx(logs)
    assert {name: metrics[f"eval_{name}"] for name in logs} == pytest.approx(logs)


@pytest.mark.parametrize(
    ("settings", "kind"),
    [({"loss": "kl"}, {"sequential": True}), ({"loss": "ce", "target_chunk_size": 20}, {})],
    ids=str,
)
def test_every_weight_of_every_head_changes_and_none_of_the_target(
    make_trainer, make_heads, target, pristine_target, settings, kind
):
    heads = make_heads(**kind)
    before = {name: tensor.clone() for name, tensor in heads.state_dict().items()}
    make_trainer(model=heads, **settings).train()
    assert not [name for name, tensor in heads.state_dict().items() if torch.equal(tensor, before[name])]
    pristine = pristine_target.state_dict()
    assert all(torch.equal(tensor, pristine[name]) for name, tensor in target.state_dict().items())
    assert all(parameter.grad is None for parameter in target.parameters())


def test_the_loss_falls_and_accuracy_rises(make_trainer, make_heads, tokens, tmp_path):
    """Eight rows, until the heads have learned them. The saved draft has the trained weights."""
    draft, rows = make_heads(num_heads=2), TokenWindows(tokens[: 8 * 33], 33)
    settings = {"loss": "ce", "max_steps": 40, "per_device_train_batch_size": 8, "learning_rate": 3e-2}
    trainer = make_trainer(model=draft, dataset=rows, eval_dataset=rows, **settings)
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_loss"] < 0.7 * before["eval_loss"]
    for head in (1, 2):
        assert after[f"eval_head_{head}_top1"] > before[f"eval_head_{head}_top1"] + 0.2
        assert after[f"eval_head_{head}_top3"] >= after[f"eval_head_{head}_top1"]
    trainer.save_model(tmp_path / "draft")
    loaded = AutoModel.from_pretrained(tmp_path / "draft")
    assert type(loaded) is TokenSwiftDraftModel and loaded.config.num_heads == 2
    assert all(torch.equal(tensor, draft.state_dict()[name]) for name, tensor in loaded.state_dict().items())


@pytest.mark.parametrize(
    "settings",
    [{"target_chunk_size": 7, "loss_chunk_size": 5}, {"dataloader_num_workers": 1}],
    ids=lambda settings: next(iter(settings)),
)
def test_the_result_is_the_same(make_trainer, make_heads, settings):
    results = []
    for more in ({}, settings):
        draft = make_heads()
        make_trainer(model=draft, optim="sgd", learning_rate=0.1, **more).train()
        results.append(draft.state_dict())
    # float32 sums in another order, in three steps of SGD with gradients of size 1
    torch.testing.assert_close(*results, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("loss", ["kl", "ce"])
def test_stored_states_give_the_losses_with_the_target(make_trainer, make_heads, rows, tmp_path, loss, monkeypatch):
    def losses(trainer):
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    settings = {"dataset": rows, "loss": loss}
    running = make_trainer(model=make_heads(), **settings)
    running.train()
    settings["target_kv_dir"] = str(tmp_path / "states")
    make_trainer(model=make_heads(), max_steps=1, **settings).train()
    monkeypatch.setattr(HiddenPass, "__call__", lambda *_: pytest.fail("the target was run"))
    stored = make_trainer(model=make_heads(), **settings)
    stored.train()
    # the padding of a row depends on its batch, which changes the order of float32 sums
    assert losses(stored) == pytest.approx(losses(running), rel=1e-5)


def test_a_store_of_another_kind_of_draft_is_refused(make_trainer, heads, rows, tmp_path):
    folder = str(tmp_path / "states")
    make_trainer(dataset=rows, target_kv_dir=folder, max_steps=1).train()
    with pytest.raises(ValueError, match="was written with states=None, and this run has 'final_norm_input'"):
        make_trainer(model=heads, dataset=rows, target_kv_dir=folder, max_steps=1).train()


class Interrupt(TrainerCallback):
    """Ctrl-C after a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


def test_an_interrupted_run_resumes_to_the_weights_of_an_uninterrupted_one(make_trainer, make_heads, tmp_path):
    """Bit for bit, from a checkpoint after the third of six steps, in the middle of an accumulated epoch."""
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": 2}
    drafts = []
    for name in ("whole", "interrupted"):
        drafts.append(make_heads())
        trainer = make_trainer(model=drafts[-1], output_dir=str(tmp_path / name), **settings)
        if name == "interrupted":
            trainer.add_callback(Interrupt(5))
            with pytest.raises(KeyboardInterrupt):
                trainer.train()
            drafts[-1] = make_heads()
            trainer = make_trainer(model=drafts[-1], output_dir=str(tmp_path / name), **settings)
            trainer.train(resume_from_checkpoint=True)
        else:
            trainer.train()
    whole, resumed = (draft.state_dict() for draft in drafts)
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())


# a softcap and windows; factors of embeddings and logits; a latent cache, which heads do not read
@pytest.mark.parametrize("name", ["gemma2", "granite", "deepseek_v3"])
def test_other_architectures_learn(name, tmp_path):
    """Accuracy is compared: with a large scale in the target's final norm, the logits of new heads stay flat for longer
    than this run.
    """
    target = tiny_target(name)
    torch.manual_seed(0)
    draft = TokenSwiftDraftModel.from_target(target)
    rows = TokenWindows(torch.randint(3, 128, (4 * 25,), generator=torch.Generator().manual_seed(0)), 25)
    settings = {"max_steps": 25, "per_device_train_batch_size": 4, "learning_rate": 3e-2, "target_chunk_size": 10}
    settings |= {"save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    trainer = DraftTrainer(
        draft, target, DraftTrainingArguments(str(tmp_path), **settings), train_dataset=rows, eval_dataset=rows
    )
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_loss"] < before["eval_loss"]
    for head in (1, 2, 3):
        assert after[f"eval_head_{head}_top1"] > before[f"eval_head_{head}_top1"] + 0.15


def test_bfloat16_is_near(make_trainer, make_heads, target):
    def first_loss(**settings):
        trainer = make_trainer(model=make_heads().float(), max_steps=1, **settings)
        trainer.train()
        return trainer.state.log_history[0]["loss"]

    exact = first_loss()
    target.bfloat16()
    # 8 bits of mantissa in logits of size 3 to 10
    assert first_loss(bf16=True) == pytest.approx(exact, rel=0.05)


def test_an_adapter_on_heads(make_trainer, heads):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(heads, peft.LoraConfig(r=3, target_modules=["linear"]))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    make_trainer(model=model).train()
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == {name for name in before if "lora_" in name} and len(moved) == 6


def test_ligers_loss_replaces_ours(make_trainer, make_heads, rows, ligers_loss):
    """Liger's loss of a head gets the tokens that the head predicts."""
    settings = {"dataset": rows, "loss": "ce", "max_steps": 1, "per_device_train_batch_size": 4}
    plain = make_trainer(model=make_heads(), **settings)
    plain.train()
    calls = ligers_loss()
    fused = make_trainer(model=make_heads(), **settings)
    fused.train()
    labels = [row.get("labels", row["input_ids"]) for row in rows]
    assert calls == [sum(int((own[first:] != -100).sum()) for own in labels) for first in (2, 3, 4)]
    ours, theirs = plain.state.log_history[0], fused.state.log_history[0]
    assert theirs["loss"] == pytest.approx(ours["loss"], rel=1e-5)
    assert theirs["grad_norm"] == pytest.approx(ours["grad_norm"], rel=1e-4)
    assert 0 <= theirs["head_1_top1"] <= theirs["head_1_top3"] <= 1


def test_rows_that_no_head_can_learn_from_have_no_loss(make_trainer, heads, tokens):
    trainer = make_trainer(model=heads, dataset=[{"input_ids": tokens[:2]}, {"input_ids": tokens[:1]}], max_steps=1)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["loss"] == 0 and log["grad_norm"] == 0 and "head_1_top1" not in log


def test_refusals(make_trainer, heads, tokens):
    with pytest.raises(ValueError, match=r"max_offset=100: heads have no positions of their own.*Leave it out"):
        make_trainer(model=heads, max_offset=100)
    with pytest.raises(ValueError, match="513 tokens, and the target has 512 positions"):
        make_trainer(model=heads, max_length=513)
    with pytest.raises(ValueError, match="600 tokens, and the target has 512 positions"):
        make_trainer(model=heads, dataset=TokenWindows(tokens, 600)).train()
