"""Training of LongSpec drafts: the loss against its definition, and the random gaps and offsets."""

from collections import Counter

import pytest
import torch

from hf_longspec import LongSpecDraftModel
from hf_longspec.generation.target_modules import TargetParts
from hf_longspec.training.row_noise import RowNoise

LIMIT = 64


def draws(noise, steps, rows=8, length=60):
    """Gaps and offsets of all rows of some steps."""
    pairs = []
    for step in steps:
        gaps, offsets = noise.draw(step, rows, range(rows), [length] * rows)
        pairs += zip(gaps, offsets, strict=True)
    return pairs


class TestRowNoise:
    def test_all_gaps_and_offsets_of_the_range_are_equally_likely(self):
        pairs = draws(RowNoise(0, (2, 4), LIMIT, None), range(1500))
        # 12,000 draws over 3 x 5 cells: 800 each, with a standard deviation of 27; five of them
        cells = Counter(pairs)
        assert set(cells) == {(gap, offset) for gap in (2, 3, 4) for offset in range(LIMIT - 60 + 1)}
        assert all(abs(count - 800) < 5 * 27.3 for count in cells.values())

    def test_gaps_are_drawn_by_the_chance_that_their_level_is_reached(self):
        pairs = draws(RowNoise(0, (1, 3), LIMIT, None, "reached"), range(1000))
        counts = Counter(gap for gap, _ in pairs)
        expected = [8000 * weight / 1.96 for weight in (1, 0.6, 0.36)]  # 0.6 accepted at each level
        assert all(abs(counts[gap] - expected[gap - 1]) < 5 * expected[gap - 1] ** 0.5 for gap in (1, 2, 3))

    @pytest.mark.parametrize(
        ("length", "max_offset", "largest"),
        [(1, None, 63), (37, None, 27), (64, None, 0), (60, 0, 0), (60, 3, 3), (60, 1000, 4)],
    )
    def test_offsets_stay_within_the_target_and_max_offset(self, length, max_offset, largest):
        noise = RowNoise(0, (1, 5), LIMIT, max_offset)
        assert max(offset for _, offset in draws(noise, range(200), length=length)) == largest

    def test_a_row_draws_the_same_in_every_process(self):
        noise = RowNoise(3, (1, 5), None, 10_000)
        gaps, offsets = noise.draw(7, 6, range(6), [9] * 6)
        for rows in ([4, 5], [2], [1, 3]):
            part = noise.draw(7, 6, rows, [9] * len(rows))
            assert part == ([gaps[row] for row in rows], [offsets[row] for row in rows])

    def test_offsets_need_a_bound(self):
        with pytest.raises(ValueError, match="set max_offset"):
            RowNoise(0, (1, 1), None, None)


def causal_states(target, row, positions, layer):
    """Keys, values and logits of the target alone, under an explicit causal mask."""
    place = torch.arange(len(row))
    mask = torch.zeros(1, 1, len(row), len(row)).masked_fill(place[:, None] < place, torch.finfo(torch.float32).min)
    out = target(input_ids=row[None], position_ids=positions[None], attention_mask=mask, use_cache=True)
    cached = out.past_key_values.layers[layer]
    return cached.keys, cached.values, out.logits[0]


def definition(draft, target, row, gap, offset, loss):
    """Losses and hits of one row: query t, which sees keys up to t - gap, predicts token t + 1."""
    positions = torch.tensor([t if t < 4 else t + offset for t in range(len(row))])
    keys, values, wanted = causal_states(target, row, positions, draft.config.kv_layer)
    hidden = draft(row[None], positions[None], keys, values, [gap], TargetParts(target, draft.config.kv_layer))
    ids = draft.token_ids.tolist()
    drafted = target.lm_head(hidden[0])[:, ids]
    losses, hits = [], []
    for place in range(gap, len(row) - 1):
        log_draft, log_target = drafted[place].log_softmax(-1), wanted[place, ids].log_softmax(-1)
        best = ids[int(drafted[place].argmax())]
        if loss == "kl":
            losses.append((log_target.exp() * (log_target - log_draft)).sum())
            hits.append(best == int(wanted[place].argmax()))
        elif int(row[place + 1]) in ids:
            losses.append(-log_draft[ids.index(int(row[place + 1]))])
            hits.append(best == int(row[place + 1]))
    return losses, hits


class TestLoss:
    @pytest.mark.parametrize(("loss", "reduced"), [("kl", False), ("ce", False), ("kl", True), ("ce", True)])
    def test_the_first_step_is_the_definition(self, make_trainer, draft, target, rows, loss, reduced):
        draft.config.noise_range = [2, 4]
        if reduced:
            draft.set_vocabulary(range(1, target.config.vocab_size, 2))
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

    def test_an_evaluation_runs_every_row_at_every_gap_without_offsets(self, make_trainer, draft, target, rows):
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


def test_the_largest_position_is_recorded(make_trainer, draft, tmp_path):
    trainer = make_trainer(max_steps=3, max_offset=100)
    trainer.train()
    trainer.save_model(tmp_path / "draft")
    recorded = LongSpecDraftModel.from_pretrained(tmp_path / "draft").config.trained_max_length
    # drawn again, from the definition
    offsets = [offset for step in range(3) for offset in trainer.method.noise.draw(step, 2, range(2), [33, 33])[1]]
    assert recorded == 32 + max(offsets)
    assert 0 < max(offsets) <= 100


def test_the_log_has_a_tau_when_every_gap_has_been_seen(make_trainer, make_draft):
    """An entry of one row has the counts of one gap. Those of the others are from the entries before."""
    trainer = make_trainer(make_draft(noise_range=[1, 2]), max_steps=12, per_device_train_batch_size=1)
    trainer.train()
    shares, expected = {}, []
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    for entry in entries:
        shares |= {name: entry[name] for name in ("acceptance_gap_1", "acceptance_gap_2") if name in entry}
        first, second = (shares.get(f"acceptance_gap_{gap}") for gap in (1, 2))
        expected.append(None if len(shares) < 2 else 1 + first + first * second)
    assert [entry.get("estimated_tau") for entry in entries] == pytest.approx(expected)
    assert expected[0] is None and expected[-1] is not None
