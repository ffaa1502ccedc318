"""The loss of a step and its acceptance, against the definition written out row by row and place by place."""

import pytest
import torch

from hf_longspec.generation.target_parts import TargetParts
from hf_longspec.training import liger
from hf_longspec.training import objective as objective_module

ROWS = [(0, 33), (40, 21), (70, 6)]


@pytest.fixture
def rows(tokens):
    return [{"input_ids": tokens[start : start + length]} for start, length in ROWS]


def causal_states(target, row, positions, layer):
    """Keys, values and logits of the target alone, under a mask that leaves transformers nothing to guess."""
    place = torch.arange(len(row))
    mask = torch.zeros(1, 1, len(row), len(row)).masked_fill(place[:, None] < place, torch.finfo(torch.float32).min)
    out = target(input_ids=row[None], position_ids=positions[None], attention_mask=mask, use_cache=True)
    cached = out.past_key_values.layers[layer]
    return cached.keys, cached.values, out.logits[0]


def definition(draft, target, row, gap, offset, loss):
    """Losses and hits of one row: place t, which sees keys up to t - gap, predicts what follows token t."""
    positions = torch.tensor([t if t < 4 else t + offset for t in range(len(row))])
    keys, values, wanted = causal_states(target, row, positions, draft.config.kv_layer)
    hidden = draft(row[None], positions[None], keys, values, [gap], TargetParts(target, draft.config.kv_layer))
    drafted = target.lm_head(hidden[0])
    losses, hits = [], []
    for place in range(gap, len(row) - 1):
        log_draft, log_target = drafted[place].log_softmax(-1), wanted[place].log_softmax(-1)
        if loss == "ce":
            losses.append(-log_draft[row[place + 1]])
            hits.append(drafted[place].argmax() == row[place + 1])
        else:
            losses.append((log_target.exp() * (log_target - log_draft)).sum())
            hits.append(drafted[place].argmax() == wanted[place].argmax())
    return losses, hits


@pytest.mark.parametrize("loss", ["kl", "ce"])
def test_the_first_step_is_the_definition(make_trainer, draft, target, rows, loss):
    draft.config.noise_range = [2, 4]
    trainer = make_trainer(dataset=rows, loss=loss, max_steps=1, per_device_train_batch_size=3)
    order = [int(batch) for batch in trainer.get_train_dataloader().batch_sampler.sampler]
    gaps, offsets = trainer.method.noise.draw(0, 3, range(3), [len(rows[row]["input_ids"]) for row in order])
    losses, hits = [], {gap: [] for gap in (2, 3, 4)}
    with torch.no_grad():
        for row, gap, offset in zip(order, gaps, offsets, strict=True):
            found = definition(draft, target, rows[row]["input_ids"], gap, offset, loss)
            losses += found[0]
            hits[gap] += found[1]
    trainer.train()
    log = trainer.state.log_history[0]
    # means of 50 losses around 3, in float32 and two orders of summation
    assert log["loss"] == pytest.approx(float(sum(losses)) / len(losses), rel=1e-4)
    shares = {f"acceptance_gap_{gap}": float(sum(seen)) / len(seen) for gap, seen in hits.items() if seen}
    assert {name: log[name] for name in log if name.startswith("acceptance")} == pytest.approx(shares)
    assert "estimated_tau" not in log  # gap 1 is not trained


def test_an_evaluation_runs_every_row_at_every_gap_without_offsets(make_trainer, draft, target, rows):
    trainer = make_trainer(eval_dataset=rows[:2], per_device_eval_batch_size=2)
    metrics = trainer.evaluate()
    losses, tau, chain = [], 1.0, 1.0
    with torch.no_grad():
        for gap in range(1, 6):
            found = [definition(draft, target, row["input_ids"], gap, 0, "kl") for row in rows[:2]]
            losses += [loss for row_losses, _ in found for loss in row_losses]
            hits = [hit for _, row_hits in found for hit in row_hits]
            share = float(sum(hits)) / len(hits)
            assert metrics[f"eval_acceptance_gap_{gap}"] == pytest.approx(share)
            chain *= share
            tau += chain
    assert metrics["eval_estimated_tau"] == pytest.approx(tau)
    assert metrics["eval_loss"] == pytest.approx(float(sum(losses)) / len(losses), rel=1e-4)


def test_ligers_loss_takes_the_place_of_ours(make_trainer, make_draft, rows, ligers_loss, monkeypatch):
    settings = {"dataset": rows, "loss": "ce", "max_steps": 2}
    plain = make_trainer(model=make_draft(), **settings)
    plain.train()
    assert liger.liger_cross_entropy(plain.method.parts, torch.zeros(1)) is None  # not on a CPU
    calls = ligers_loss()
    monkeypatch.setattr(objective_module, "SAMPLED_PLACES", 10)
    fused = make_trainer(model=make_draft(), **settings)
    fused.train()
    assert len(calls) == 2
    for ours, theirs in zip(plain.state.log_history[:2], fused.state.log_history[:2], strict=True):
        assert theirs["loss"] == pytest.approx(ours["loss"], rel=1e-5)
        assert theirs["grad_norm"] == pytest.approx(ours["grad_norm"], rel=1e-4)
        assert any(name.startswith("acceptance_gap") for name in theirs)


def test_ligers_loss_is_left_aside_for_heads_that_it_does_not_know(monkeypatch):
    from hf_longspec.testing import tiny_target

    monkeypatch.setattr(liger, "LigerFusedLinearCrossEntropyLoss", lambda **settings: None)
    on_gpu = type("OnGpu", (), {"is_cuda": True})
    assert liger.liger_cross_entropy(TargetParts(tiny_target("granite"), 1), on_gpu) is None
    assert liger.liger_cross_entropy(TargetParts(tiny_target("gemma2"), 1), on_gpu) is not None
