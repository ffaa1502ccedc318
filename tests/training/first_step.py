"""The first step of a run and an evaluation in one batch, beside a definition of the loss."""

import pytest

IN_ONE_BATCH = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}


def check_first_step(make_trainer, draft, rows, loss, expected, shares, **settings):
    """Compare loss and shares of four rows with those of a definition, and return the log of the step."""
    trainer = make_trainer(
        model=draft, dataset=rows, eval_dataset=rows, loss=loss, max_steps=1, **IN_ONE_BATCH, **settings
    )
    metrics = trainer.evaluate()
    trainer.train()
    log = trainer.state.log_history[0]
    # sums of about 40 losses around 3 or 4, in float32 against float64
    assert log["loss"] == pytest.approx(expected, rel=1e-5)
    assert metrics["eval_loss"] == pytest.approx(expected, rel=1e-5)
    assert {name: log[name] for name in shares} == pytest.approx(shares)
    assert {name: metrics[f"eval_{name}"] for name in shares} == pytest.approx(shares)
    return log
