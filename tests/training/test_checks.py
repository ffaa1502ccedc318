"""What is refused before a step is made: value, rule and remedy in one line."""

import pytest
import torch

from hf_longspec import SpecAttnDraftModel
from hf_longspec.testing import tiny_target
from hf_longspec.training import DraftTrainer, DraftTrainingArguments, TokenWindows


def refuse(match, make, **settings):
    with pytest.raises(ValueError, match=match) as caught:
        make(**settings)
    assert "\n" not in str(caught.value)


def test_datasets_without_rows_or_columns(make_trainer, tokenizer):
    refuse("train_dataset has no rows: check", make_trainer, dataset=[])
    refuse("eval_dataset has no rows: check", make_trainer, eval_dataset=iter(()))
    refuse(
        r"columns \['content', 'id'\].*text_column='text'.*right column",
        make_trainer,
        dataset=[{"content": "x", "id": 1}],
    )
    refuse("text_column='body'", make_trainer, dataset=[{"text": "x"}], text_column="body", tokenizer=tokenizer)
    refuse("no tokenizer was given: pass processing_class", make_trainer, dataset=[{"text": "x"}])


def test_lengths_beyond_the_target(make_trainer, tokens):
    refuse("513 tokens, and the target has 512 positions.*max_length", make_trainer, max_length=513)
    trainer = make_trainer(dataset=TokenWindows(tokens, 600))
    refuse("600 tokens, and the target has 512 positions", trainer.train)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"loss": "mse"}, "loss='mse': expected one of kl, ce"),
        ({"anchors": -1}, "anchors=-1: expected a whole number of at least 0"),
        ({"max_offset": -5}, "max_offset=-5"),
        ({"loss_chunk_size": 0}, "loss_chunk_size=0: expected a whole number of at least 1"),
        ({"target_chunk_size": 0}, "target_chunk_size=0"),
        ({"max_length": 1}, "max_length=1: a row needs 2 tokens"),
        ({"remove_unused_columns": True}, "leave it False"),
        ({"push_to_hub": True}, "without its code, under the name of a folder: leave it False"),
    ],
)
def test_settings(tmp_path, settings, match):
    refuse(match, DraftTrainingArguments, output_dir=str(tmp_path), use_cpu=True, **settings)


def test_a_trainer_does_not_upload(make_trainer):
    refuse(r"call draft.push_to_hub\('owner/name'\)", make_trainer().push_to_hub)


def test_models_that_do_not_go_together(make_trainer, make_draft, target):
    refuse(
        "SpecAttnDraftModel, which is not trained: make one with LongSpecDraftModel",
        make_trainer,
        model=SpecAttnDraftModel.from_target(target),
    )
    refuse("bfloat16, in which small updates.*draft.float", make_trainer, model=make_draft().bfloat16())
    refuse("requires a gradient: call", make_trainer, model=make_draft().requires_grad_(False))
    refuse(r"noise_range=\[3, 2\]", make_trainer, model=make_draft(noise_range=[3, 2]))
    args = DraftTrainingArguments("unused", use_cpu=True)
    refuse("hidden_size=64, and this target has hidden_size=32", DraftTrainer, model=make_draft(), args=args,
           target=tiny_target("llama", vocab_size=260, hidden_size=32))  # fmt: skip


@pytest.mark.parametrize("loss", ["kl", "ce"])
def test_a_loss_of_nan_ends_the_run_before_it_reaches_the_weights(make_trainer, draft, loss):
    trainer = make_trainer(loss=loss, max_steps=5)
    with torch.no_grad():
        draft.block.mlp.down_proj.weight[0, 0] = float("nan")
    before = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    with pytest.raises(FloatingPointError, match="the loss at step 1 is nan: lower learning_rate"):
        trainer.train()
    assert all(
        tensor.equal(before[name]) or name.endswith("down_proj.weight") for name, tensor in draft.state_dict().items()
    )
