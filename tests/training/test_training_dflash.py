"""Training of DFlash drafts: the loss against a loop over blocks and levels, and a draft that learns."""

from math import exp

import pytest
import torch

from hf_longspec import DFlashDraftModel
from tests.modeling.eagle3.residual_stream import residual_stream


def definition(draft, target, rows, loss, anchors, window=None):
    """The weighted losses, and the share of hits of every level, one block and one level at a time."""
    config, ids = draft.config, draft.token_ids.tolist()
    levels = range(config.num_drafted)
    losses, wins = [[] for _ in levels], [[] for _ in levels]
    for row, own in zip(rows, anchors.tolist(), strict=True):
        tokens = row["input_ids"]
        labels = row.get("labels", tokens).tolist()
        states, wanted = residual_stream(target, tokens[None])
        aux, wanted = torch.cat([states[j] for j in draft.layers_of(target.config)], -1), wanted[0].double()
        for anchor in own:
            with torch.no_grad():
                block = draft(aux, tokens[None], torch.tensor([[anchor]]), target, window, 4)[:, 0]
                logits, memory = draft.logits(block, target), draft.first_memory(tokens[None, :1])
            for level in levels:
                ahead, slot = anchor + 1 + level, config.first_slot + level
                if ahead >= len(tokens):
                    continue
                with torch.no_grad():
                    own_state, before = block[0, slot], tokens[ahead - 1]
                    row_logits, memory = draft.next_logits(
                        logits[:, [slot]], block[:, [slot]], tokens[None, [ahead - 1]], memory
                    )
                if labels[ahead] == -100 or (loss == "ce" and labels[ahead] not in ids):
                    continue
                log_draft = row_logits[0, 0].double().log_softmax(-1)
                log_target = wanted[ahead - 1][ids].log_softmax(-1)
                token = labels[ahead] if loss == "ce" else int(wanted[ahead - 1].argmax())
                divergence = (log_target.exp() * (log_target - log_draft)).sum()
                losses[level].append(divergence if loss == "kl" else -log_draft[ids.index(token)])
                wins[level].append(ids[int(log_draft.argmax())] == token)
                if draft.confidence_head is not None:
                    with torch.no_grad():
                        confidence = draft.confidence_logits(own_state, before).double().sigmoid()
                    losses[level][-1] -= (confidence if wins[level][-1] else 1 - confidence).log()
    mean = sum(exp(-2 * k / config.block_size) * float(sum(own)) / len(own) for k, own in enumerate(losses))
    return mean, {f"acceptance_slot_{k}": sum(own) / len(own) for k, own in enumerate(wins, start=1)}


@pytest.mark.parametrize(
    ("loss", "settings"),
    [
        ("kl", {"draft_vocab_size": 20, "own_head": True}),
        ("ce", {"draft_vocab_size": 20, "own_head": True, "sample_from_anchor": True, "num_hidden_layers": 2}),
        ("kl", {"window": 6, "markov_rank": 3, "markov_head_type": "rnn", "sample_from_anchor": True}),
        ("kl", {"markov_rank": 3, "sample_from_anchor": True, "confidence_head": "markov"}),
        ("kl", {"layer_windows": [5], "causal_windows": True, "block_window": True, "conv_kernel_size": 2}),
    ],
    ids=str,
)
def test_the_loss_is_the_definition(make_trainer, make_dflash, target, labelled, loss, settings, monkeypatch):
    """In the first step of a run, whose anchors are drawn, and in an evaluation in one batch."""
    draft, drawn, forward = make_dflash(**settings), [], DFlashDraftModel.forward

    def recording(self, **arguments):
        drawn.append((arguments["tokens"], arguments["anchors"]))
        return forward(self, **arguments)

    if draft.d2t is not None:
        draft.set_vocabulary(range(3, 23), target)
    before = {name: weight.clone() for name, weight in draft.state_dict().items()}
    sizes = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "loss_chunk_size": 7}
    trainer = make_trainer(model=draft, dataset=labelled, eval_dataset=labelled, loss=loss, max_steps=1, **sizes)
    monkeypatch.setattr(DFlashDraftModel, "forward", recording)
    metrics = trainer.evaluate()
    trainer.train()
    monkeypatch.undo()
    draft.load_state_dict(before)
    log = trainer.state.log_history[0]
    for (tokens, anchors), found, prefix in zip(drawn, (metrics, log), ("eval_", ""), strict=True):
        places = [next(i for i, ids in enumerate(tokens) if is_start(row["input_ids"], ids)) for row in labelled]
        expected, shares = definition(draft, target, labelled, loss, anchors[places], settings.get("window"))
        # sums of about 40 losses around 3, in float32 against float64
        assert found[f"{prefix}loss"] == pytest.approx(expected, rel=1e-5)
        assert {name: found[prefix + name] for name in shares} == pytest.approx(shares)
        ends = torch.tensor([max(1, len(row["input_ids"]) - 2) for row in labelled])
        assert (anchors[places] >= 1).all() and (anchors[places] <= ends[:, None]).all()
        assert anchors.unique().numel() > 5


def is_start(row, padded):
    return torch.equal(padded[: len(row)], row)


def test_a_selector_is_refused(make_trainer, make_dflash):
    with pytest.raises(ValueError, match="selector_rank=3: this part of a draft is not trained here"):
        make_trainer(model=make_dflash(selector_rank=3))
