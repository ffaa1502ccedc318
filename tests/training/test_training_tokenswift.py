"""Training of TokenSwift heads: the loss against a loop over heads and tokens."""

import pytest
import torch

from hf_longspec.generation.target_modules import LayerInputs
from tests.modeling.tokenswift.restated_heads import restated_heads
from tests.training.first_step import check_first_step, losses_of_steps


@pytest.fixture
def rows(labelled, tokens):
    """Ragged rows, the last too short for the third head."""
    return [*labelled[:2], *({"input_ids": tokens[start : start + length]} for start, length in ((70, 6), (90, 3)))]


def logits_of(draft, target, tokens):
    """Logits of the heads `(num_heads, L, vocab)` and of the target `(L, vocab)`, in float64."""
    with torch.no_grad(), LayerInputs(target, True) as caught:
        wanted = target(tokens[None]).logits[0].double()
    config, weights = draft.config, draft.state_dict()
    sizes = config.num_heads, config.rms_norm_eps, config.chained
    embedded = target.get_input_embeddings()(tokens).detach().double() if config.sequential else None
    states = restated_heads(weights, "heads.layers.", caught.hidden[0], *sizes, embedded)
    return states @ target.lm_head.weight.detach().double().T[:, draft.token_ids], wanted


def with_hits(draft, target, row):
    """A row with many labels that are the choice of one of the heads."""
    drafted, _ = logits_of(draft, target, row["input_ids"])
    labels = row.get("labels", row["input_ids"]).clone()
    for place in range(2, len(labels)):
        head = place % 4  # every fourth label is not changed
        if 0 < head <= min(len(drafted), place - 1) and labels[place] != -100:
            labels[place] = draft.token_ids[drafted[head - 1, place - 1 - head].argmax()]
    return {**row, "labels": labels}


def definition(draft, target, rows, loss):
    """The loss, and the share of hits of every head."""
    logits = lambda tokens: logits_of(draft, target, tokens)  # noqa: E731
    ids = draft.token_ids.tolist()
    losses, hits = losses_of_steps(rows, logits, loss, len(draft.heads.layers), ids)
    shares = {f"acceptance_head_{head}": sum(own) / len(own) for head, own in enumerate(hits, start=1)}
    return sum(float(sum(own)) / len(own) for own in losses), shares


REDUCED = {"draft_vocab_size": 90}


@pytest.mark.parametrize(
    ("loss", "kind"),
    [("kl", {}), ("ce", {"sequential": True}), ("kl", REDUCED), ("ce", REDUCED)],
    ids=str,
)
def test_the_loss_is_the_definition(make_trainer, make_heads, target, rows, loss, kind):
    """In the first step of a run, and in an evaluation in one batch."""
    draft = make_heads(**kind)
    if draft.d2t is not None:  # with what the target wants, so that each head hits something
        wanted = torch.cat([target(row["input_ids"][None]).logits[0].argmax(-1) for row in rows]).tolist()
        draft.set_vocabulary(list(dict.fromkeys([*wanted, *range(1, 260, 2)]))[:90])
    rows = [with_hits(draft, target, row) for row in rows]
    expected, logs = definition(draft, target, rows, loss)
    check_first_step(make_trainer, draft, rows, loss, expected, logs)
    assert len(set(logs.values())) == 3


def test_rows_that_no_head_can_learn_from_have_no_loss(make_trainer, heads, tokens):
    trainer = make_trainer(model=heads, dataset=[{"input_ids": tokens[:2]}, {"input_ids": tokens[:1]}], max_steps=1)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["loss"] == 0 and log["grad_norm"] == 0 and "acceptance_head_1" not in log
