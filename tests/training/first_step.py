"""The first step of a run beside a definition of the loss, one place after another."""

import pytest
import torch
from transformers import TrainingArguments

IN_ONE_BATCH = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}


def losses_of_steps(rows, logits_of, loss, steps, ids=None):
    """Losses, and whether the wanted tokens are the most likely ones, by step.

    `logits_of(tokens)` returns the draft's logits by step and entry, and the target's `(L, vocabulary)`; `ids` are the
    tokens of the draft.
    """
    losses, hits = [[] for _ in range(steps)], [[] for _ in range(steps)]
    for row in rows:
        labels = row.get("labels", row["input_ids"]).tolist()
        drafted, wanted = logits_of(row["input_ids"])
        known = list(range(wanted.shape[-1])) if ids is None else ids
        for step, entries in enumerate(drafted):
            for entry, logits in enumerate(entries):
                ahead = entry + step + 2
                if ahead >= len(labels) or labels[ahead] == -100 or (loss == "ce" and labels[ahead] not in known):
                    continue
                own, theirs = logits.double().log_softmax(-1), wanted[ahead - 1].double()
                token = labels[ahead] if loss == "ce" else int(theirs.argmax())
                theirs = theirs[known].log_softmax(-1)
                divergence = (theirs.exp() * (theirs - own)).sum()
                losses[step].append(divergence if loss == "kl" else -own[known.index(token)])
                hits[step].append(known[int(own.argmax())] == token)
    return losses, hits


def discounted(losses, hits):
    """The sum of the mean losses, each step weighing 0.8 of the one before, and the shares of hits."""
    mean = sum(0.8**step * float(sum(own)) / len(own) for step, own in enumerate(losses))
    return mean, {f"acceptance_step_{step}": sum(own) / len(own) for step, own in enumerate(hits, start=1)}


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


CHECKPOINTING = "activation_checkpointing"
if not hasattr(TrainingArguments, CHECKPOINTING):  # before transformers 5.23
    CHECKPOINTING = "gradient_checkpointing"
# float32 sums in another order, in two steps of SGD with gradients of size 1
SGD_TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}


def check_checkpointing(make_trainer, make, inner, rows):
    """Two steps that change all weights as without checkpointing; what the layers hold runs again for the gradients."""
    results = []
    for settings in ({}, {CHECKPOINTING: True}):
        draft, calls = make(), []
        draft.get_submodule(inner).register_forward_hook(lambda *_, calls=calls: calls.append(torch.is_grad_enabled()))
        sgd = {"optim": "sgd", "learning_rate": 0.1, "max_steps": 2, "dataset": rows, "per_device_train_batch_size": 4}
        trainer = make_trainer(model=draft, **sgd, **settings)
        trainer.train()
        log = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
        results.append((draft.state_dict(), log, len(calls)))
    (expected, steps, once), (weights, again, twice) = results
    torch.testing.assert_close(weights, expected, **SGD_TOLERANCE)
    assert again == [pytest.approx(step, rel=1e-4) for step in steps]
    assert twice == 2 * once > 0
