"""A run whose loss grows ends with an error that names a lower rate and the last checkpoint from before."""

from types import SimpleNamespace

import pytest
from transformers import TrainerState

from hf_longspec.training.loss_growth import LossGrowth

EVERY = 10


def follow(losses, folder, warmup=0, history=(), checkpoints=()):
    """Log one loss every ten steps; a checkpoint is written after the log of its step. Returns the protected ones."""
    state = TrainerState(logging_steps=EVERY, max_steps=1000, log_history=[{"loss": loss} for loss in history])
    args = SimpleNamespace(
        output_dir=folder, learning_rate=2e-3, metric_for_best_model=None, get_warmup_steps=lambda total: warmup
    )
    callback, kept = LossGrowth(), []
    callback.on_train_begin(args, state, None)
    for number, loss in enumerate(losses, 1):
        state.global_step = EVERY * number
        callback.on_log(args, state, None, {"loss": loss})
        kept.append(state.best_model_checkpoint)
        if state.global_step in checkpoints:
            (folder / f"checkpoint-{state.global_step}").mkdir()
            (folder / f"checkpoint-{state.global_step}" / "trainer_state.json").write_text("{}")
    return kept


def test_a_loss_that_falls_or_varies_goes_on(tmp_path):
    falling = [8 - 0.3 * number for number in range(20)]
    follow(falling + [2.0, 3.4, 1.6, 2.9, 2.2, 1.5, 3.0, 2.4] * 4, tmp_path)
    follow([2.0, 1.6, 2.4, 1.9, 2.3, 1.7, 2.3, 2.2], tmp_path)  # a draft that is trained further


def test_a_loss_that_grows_over_its_best_mean_ends_the_run(tmp_path):
    losses = [8, 6, 5, 4, 4, 4, 4, 4.2, 5, 7, 9, 9, 9]
    wanted = "grown from 4.04 to 6.84 at step 120: lower learning_rate from 0.002 to 0.0005. The last .*checkpoint-60"
    with pytest.raises(FloatingPointError, match=wanted):
        follow(losses, tmp_path, checkpoints=(20, 60, 90))


def test_a_loss_that_grows_from_the_beginning_ends_the_run_after_the_warm_up(tmp_path):
    losses = [7.8, 10, 14, 16, 18, 18, 18]
    with pytest.raises(FloatingPointError, match=r"from 8.9 to 13.2 at step 50: .* No checkpoint was saved"):
        follow(losses, tmp_path)
    with pytest.raises(FloatingPointError, match="at step 60"):
        follow(losses, tmp_path, warmup=50)


def test_the_checkpoint_from_before_is_kept_while_the_loss_is_larger(tmp_path):
    kept = follow([4, 4, 4, 4, 4, 4, 6, 6, 4, 4, 4, 4, 4], tmp_path, checkpoints=(50,))
    name = str(tmp_path / "checkpoint-50")
    assert kept == [None] * 6 + [name if mean > 4.4 else None for mean in (4.4, 4.8, 4.8, 4.8, 4.8, 4.4, 4)]


def test_a_resumed_run_goes_on_with_its_log(tmp_path):
    with pytest.raises(FloatingPointError, match="from 4 to 6 at step 10"):
        follow([14], tmp_path, history=[4] * 10)


def test_a_trainer_stops(make_trainer):
    trainer = make_trainer(max_steps=200, learning_rate=3.0, logging_steps=10, lr_scheduler_type="constant")
    with pytest.raises(FloatingPointError, match="the loss has grown"):
        trainer.train()
    assert trainer.state.global_step < 200
