"""DraftAlong: the draft learns from generated texts, and the model is trained as without it."""

import copy
import logging
from functools import partial

import pytest
import torch
from datasets import Dataset
from transformers import AutoModel, Trainer, TrainerCallback, TrainingArguments

import hf_longspec
from hf_longspec import Eagle3DraftModel, LongSpecDraftModel, NgramDraftModel, TokenSwiftDraftModel
from hf_longspec.training import DraftAlong
from tests.tiny_targets import randomize, tiny_prompts, tiny_target

VOCAB, PAD, END = 24, 0, 5
KINDS = {
    "longspec": (LongSpecDraftModel, {"window": 8, "noise_range": [1, 3]}),
    "eagle3": (Eagle3DraftModel, {"training_steps": 2}),
    "tokenswift": (TokenSwiftDraftModel, {"num_heads": 2}),
}


class Rollouts(TrainerCallback):
    """Generate before each step, as a trainer of reinforcement learning does, and report the logs."""

    def __init__(self):
        self.texts, self.reported = [], []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.reported.append(dict(logs))

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        was_training = model.training
        model.eval()
        ids, mask = tiny_prompts(VOCAB, (9, 4), seed=state.global_step)
        ids, mask = ids.repeat_interleave(2, 0), mask.repeat_interleave(2, 0)
        how = {"max_new_tokens": 20, "do_sample": True, "pad_token_id": PAD, "eos_token_id": END}
        torch.manual_seed(state.global_step)
        self.texts.append(model.generate(ids, attention_mask=mask, **how))
        model.train(was_training)


def trained(folder, model, draft, make_along=None, steps=4):
    """The trainer after some steps, and the texts that the model generated in between."""
    rows = Dataset.from_list(
        [{"input_ids": row.tolist(), "labels": row.tolist()} for row in tiny_prompts(VOCAB, [12] * 8)[0]]
    )
    how = {
        "output_dir": str(folder),
        "report_to": [],
        "use_cpu": True,
        "max_steps": steps,
        "logging_steps": 2,
        "seed": 1,
    }
    how |= {"per_device_train_batch_size": 2, "learning_rate": 3e-3, "save_steps": steps, "disable_tqdm": True}
    rollouts = Rollouts()
    trainer = Trainer(model, TrainingArguments(**how), train_dataset=rows, callbacks=[rollouts])
    with hf_longspec.bind(trainer, draft) as bound:
        along = make_along and make_along(bound)
        if along is not None:
            trainer.add_callback(along)
        trainer.train()
        assert not bound.listeners
    return trainer, rollouts, along


def drafts(model, kind):
    draft_class, settings = KINDS[kind]
    draft = draft_class.from_target(model, gate=False, **settings)
    randomize(draft, 3)
    return draft


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_is_trained_as_without_it(tmp_path, kind):
    found = []
    for folder, make in ("alone", None), ("along", lambda bound: DraftAlong(bound, steps=3)):
        model = tiny_target("llama", vocab_size=VOCAB)
        model.requires_grad_(True)
        draft = drafts(model, kind)
        before = copy.deepcopy(draft.state_dict())
        _, rollouts, along = trained(tmp_path / folder, model, draft, make)
        changed = any(not torch.equal(before[name], value) for name, value in draft.state_dict().items())
        assert changed == (along is not None)
        found.append((model.state_dict(), rollouts.texts, rollouts.reported))
    for name, value in found[0][0].items():
        assert torch.equal(value, found[1][0][name]), name
    assert all(map(torch.equal, found[0][1], found[1][1]))
    assert all(parameter.requires_grad for parameter in model.parameters())
    for logs in found[1][2][:2]:
        assert logs["draft_tau"] >= 1 and logs["draft_seconds"] > 0 and logs["draft_loss"] > 0
        assert 1 <= logs["draft_estimated_tau_before"] and 1 <= logs["draft_estimated_tau_after"]
    assert not any("draft" in name for logs in found[0][2] for name in logs)
    saved = AutoModel.from_pretrained(tmp_path / "along" / "checkpoint-4" / "draft")
    for name, value in draft.state_dict().items():
        assert torch.equal(saved.state_dict()[name], value)


def test_the_draft_learns_the_texts(tmp_path):
    model = tiny_target("llama", vocab_size=VOCAB)
    make = partial(DraftAlong, learning_rate=3e-3, per_device_train_batch_size=4)
    _, _, along = trained(tmp_path, model, drafts(model, "longspec"), make)
    along.steps, along.metrics = 60, {}
    model.eval()
    along.update()
    assert along.metrics["draft_estimated_tau_after"] > along.metrics["draft_estimated_tau_before"] + 0.3


def test_what_is_kept_of_a_call():
    """Prompts without their padding, which is not trained on, and generated tokens up to the end of the text."""
    model = tiny_target("llama", vocab_size=VOCAB)
    draft = drafts(model, "longspec")
    ids, mask = tiny_prompts(VOCAB, (6, 3))
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, eos_token_id=None)
    end = int(expected[0, 9])
    first = expected[0, 6:].tolist().index(end) + 1
    with hf_longspec.bind(model, draft) as bound:
        along = DraftAlong(bound)
        bound.listeners.append(along.add)
        how = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": PAD, "eos_token_id": end}
        text = model.generate(ids, attention_mask=mask, num_return_sequences=1, **how)
    (tokens, labels), (others, _) = along.texts
    assert tokens.tolist() == text[0, : 6 + first].tolist()
    assert labels.tolist() == [-100] * 6 + tokens[6:].tolist()
    assert others[:3].tolist() == ids[1, 3:].tolist()


def test_refusals():
    model = tiny_target("llama", vocab_size=VOCAB)
    for draft, message in (
        (NgramDraftModel.from_target(model), "NgramDraftModel cannot be trained"),
        (drafts(model, "longspec").bfloat16(), "small updates are rounded away"),
    ):
        with hf_longspec.bind(model, draft) as bound, pytest.raises(ValueError, match=message):
            DraftAlong(bound)
    with hf_longspec.bind(model, drafts(model, "longspec")) as bound:
        for name in ("every", "steps"):
            with pytest.raises(ValueError, match=f"{name}=0: expected 1 or more"):
                DraftAlong(bound, **{name: 0})
        with pytest.raises(ValueError, match="loss='mse'"):
            DraftAlong(bound, loss="mse")
        with pytest.raises(TypeError, match="rate: no such setting"):
            DraftAlong(bound, rate=1)


def test_a_loss_that_is_not_finite_leaves_the_draft_as_it_is(caplog):
    """The trainer's run does not end for it."""
    model = tiny_target("llama", vocab_size=VOCAB)
    draft = drafts(model, "longspec")
    ids, mask = tiny_prompts(VOCAB, (6, 6))
    with hf_longspec.bind(model, draft) as bound:
        along = DraftAlong(bound)
        bound.listeners.append(along.add)
        model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=PAD)
    before = copy.deepcopy(draft.state_dict())
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    with caplog.at_level(logging.WARNING):
        along.update(is_logged=False)
    assert "The loss of the draft is nan" in caplog.text
    assert all(torch.equal(value, before[name]) for name, value in draft.state_dict().items())
