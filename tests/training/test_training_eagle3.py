"""Training of EAGLE-3 drafts: the loss against a loop over steps and places, the layout that is written."""

import json

import pytest
import torch

from hf_longspec import Eagle3DraftModel
from hf_longspec.modeling.eagle3.convert_eagle3 import save_speculators
from hf_longspec.training import TokenWindows
from tests.modeling.eagle3.residual_stream import residual_stream
from tests.training.conftest import labelled_rows
from tests.training.first_step import check_first_step
from tests.watching import before

NEVER = 999


@pytest.fixture
def rows(tokens):
    """Ragged rows, the last too short for any step."""
    return labelled_rows(tokens, (0, 33), (40, 21), (70, 4), (90, 2))


@torch.no_grad()
def levels(draft, target, aux, tokens, steps, window):
    """Logits `(1, entries, vocabulary)` of every step; those of P-EAGLE from one forward after every entry."""
    if draft.mask_hidden is None:
        return draft(aux, tokens, steps, target=target, window=window, sinks=4)
    ends = target.get_input_embeddings(), target.get_output_embeddings()
    drafted = draft.draft_logits(aux, tokens, range(1, tokens.shape[1] + 1), *ends)
    return torch.stack(drafted, 2)[:, :steps].unbind(1)


def definition(draft, target, rows, loss, window=None):
    """The weighted losses, and the share of hits of every step, one place at a time."""
    losses, wins = [[], [], []], [[], [], []]
    ids = draft.token_ids.tolist()
    for row in rows:
        tokens = row["input_ids"]
        labels = row.get("labels", tokens).tolist()
        states, wanted = residual_stream(target, tokens[None])
        aux = torch.cat([states[j] for j in draft.layers_of(target.config)], -1)[:, :-1]
        steps = min(3, len(tokens) - 1)
        drafted = levels(draft, target, aux, tokens[None, 1:], steps, window)
        wanted = wanted[0].double()
        for step, logits in enumerate(drafted):
            for entry in range(len(tokens)):
                ahead = entry + step + 2
                if ahead >= len(tokens) or labels[ahead] == -100 or (loss == "ce" and labels[ahead] not in ids):
                    continue
                log_draft = logits[0, entry].double().log_softmax(-1)
                log_target = wanted[ahead - 1][ids].log_softmax(-1)
                token = labels[ahead] if loss == "ce" else int(wanted[ahead - 1].argmax())
                divergence = (log_target.exp() * (log_target - log_draft)).sum()
                losses[step].append(divergence if loss == "kl" else -log_draft[ids.index(token)])
                wins[step].append(ids[int(log_draft.argmax())] == token)
    mean = sum(0.8**step * float(sum(own)) / len(own) for step, own in enumerate(losses))
    return mean, {f"acceptance_step_{step}": sum(own) / len(own) for step, own in enumerate(wins, start=1)}


REDUCED = {"draft_vocab_size": 20, "own_head": True}


@pytest.mark.parametrize(
    ("loss", "settings"),
    [
        ("kl", REDUCED),
        ("ce", REDUCED),
        ("kl", {"window": 6, "fc_norm": True}),
        ("ce", {"num_hidden_layers": 2}),
        ("kl", {"mask_token_id": 2, "fc_norm": True, **REDUCED}),
        ("kl", {"mask_token_id": 2, "window": 6, "num_hidden_layers": 2, "layer_windows": [None, 2]}),
    ],
    ids=str,
)
def test_the_loss_is_the_definition(make_trainer, make_eagle3, target, rows, loss, settings):
    """In the first step of a run, and in an evaluation in one batch."""
    draft = make_eagle3(tree_widths=[1, 1, 1], **settings)
    if draft.d2t is not None:
        draft.set_vocabulary(range(3, 23), target)
    expected, shares = definition(draft, target, rows, loss, settings.get("window"))
    log = check_first_step(make_trainer, draft, rows, loss, expected, shares, loss_chunk_size=7)
    tau = 1 + shares["acceptance_step_1"] * (1 + shares["acceptance_step_2"] * (1 + shares["acceptance_step_3"]))
    assert log["estimated_tau"] == pytest.approx(tau)


def test_positions_after_the_anchors_are_shifted(make_trainer, make_eagle3, monkeypatch):
    seen = []
    before(monkeypatch, Eagle3DraftModel, "forward", lambda _, **inputs: seen.append(inputs["position_ids"]))
    make_trainer(model=make_eagle3(), max_offset=200, anchors=3, max_steps=2).train()
    positions = torch.cat(seen)
    assert (positions[:, :3] == torch.arange(3)).all() and (positions[:, 3:].diff() == 1).all()
    assert positions[:, 3].unique().numel() > 1 and positions.max() > 33
    seen.clear()
    make_trainer(model=make_eagle3(), max_steps=1).train()
    assert (seen[0] == torch.arange(32)).all()


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_the_draft_learns_and_drafts_better(make_trainer, make_eagle3, target, tokens, kind, tmp_path):
    """On texts of the target; the draft that is written for other engines is the trained one."""
    starts = tokens[: 8 * 5].view(8, 5)
    texts = target.generate(starts, max_new_tokens=28, do_sample=False, eos_token_id=NEVER, pad_token_id=0)
    rows = TokenWindows(texts.flatten(), 33)
    masks = {"mask_token_id": 2} if kind == "peagle" else {}
    own = {"own_embedding": True, "draft_vocab_size": 60, "own_head": True}
    draft = make_eagle3(tree_widths=[1, 1, 1], gate=False, **own, **masks)
    draft.set_vocabulary(texts.flatten().bincount(minlength=260).topk(60).indices, target)

    def tau():
        target.generate(starts, assistant_model=draft, max_new_tokens=28, do_sample=False, eos_token_id=NEVER)
        return draft.last_speculation.mean_acceptance_length

    untrained = tau()
    settings = {"per_device_train_batch_size": 8, "max_steps": 20, "learning_rate": 1.5e-2}
    trainer = make_trainer(model=draft, dataset=rows, eval_dataset=rows, **settings)
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_loss"] < 0.7 * before["eval_loss"]
    assert after["eval_estimated_tau"] > before["eval_estimated_tau"] + 0.3
    draft.eval()
    drafted = tau()
    assert drafted > untrained + 0.5
    save_speculators(draft, tmp_path / "theirs", target)
    raw = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert raw["speculators_model_type"] == kind and raw["draft_vocab_size"] == 60
    assert raw["eagle_aux_hidden_state_layer_ids"] == list(draft.layers_of(target.config))
    loaded = Eagle3DraftModel.from_pretrained(tmp_path / "theirs", target=target, tree_widths=[1, 1, 1], gate=False)
    assert all(torch.equal(value, draft.state_dict()[name]) for name, value in loaded.state_dict().items())
    draft = loaded
    assert tau() == drafted


def test_refusals(make_trainer, make_eagle3):
    with pytest.raises(ValueError, match="training_steps=0"):
        make_trainer(model=make_eagle3(training_steps=0))
    with pytest.raises(ValueError, match="draft_vocab_size=20"):
        make_eagle3(**REDUCED).set_vocabulary([3, 4, 4])
