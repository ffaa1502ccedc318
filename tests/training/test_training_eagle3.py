"""Training of EAGLE-3 drafts: the loss against a loop over steps and places, the layout that is written."""

import json

import pytest
import torch

from hf_longspec import Eagle3DraftModel
from hf_longspec.modeling.eagle3.convert_eagle3 import save_speculators
from hf_longspec.training import TokenWindows
from tests.modeling.eagle3.residual_stream import residual_stream
from tests.training.first_step import check_first_step, discounted, losses_of_steps

GREEDY = {"max_new_tokens": 28, "do_sample": False, "eos_token_id": 999, "pad_token_id": 0}  # no token is 999


def definition(draft, target, rows, loss, window=None):
    """The weighted losses, and the share of hits of every step."""

    def logits_of(tokens):
        states, wanted = residual_stream(target, tokens[None])
        aux = torch.cat([states[j] for j in draft.layers_of(target.config)], -1)[:, :-1]
        steps = min(3, len(tokens) - 1)
        with torch.no_grad():
            drafted = draft(aux, tokens[None, 1:], steps, target=target, window=window, sinks=4)
        return [logits[0] for logits in drafted], wanted[0]

    return discounted(*losses_of_steps(rows, logits_of, loss, 3, draft.token_ids.tolist()))


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
def test_the_loss_is_the_definition(make_trainer, make_eagle3, target, labelled, loss, settings):
    """In the first step of a run, and in an evaluation in one batch."""
    draft = make_eagle3(tree_widths=[1, 1, 1], **settings)
    if draft.d2t is not None:
        draft.set_vocabulary(range(3, 23), target)
    expected, shares = definition(draft, target, labelled, loss, settings.get("window"))
    log = check_first_step(make_trainer, draft, labelled, loss, expected, shares, loss_chunk_size=7)
    tau = 1 + shares["acceptance_step_1"] * (1 + shares["acceptance_step_2"] * (1 + shares["acceptance_step_3"]))
    assert log["estimated_tau"] == pytest.approx(tau)


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_the_draft_learns_and_drafts_better(make_trainer, make_eagle3, target, tokens, kind, tmp_path):
    """On texts of the target; the draft that is written for other engines is the trained one."""
    starts = tokens[: 8 * 5].view(8, 5)
    texts = target.generate(starts, **GREEDY)

    def tau(draft):
        assert torch.equal(target.generate(starts, assistant_model=draft, **GREEDY), texts)
        return draft.last_speculation.mean_acceptance_length

    own = {"own_embedding": True, "draft_vocab_size": 60, "own_head": True, "tree_widths": [1, 1, 1], "gate": False}
    draft = make_eagle3(**own, **({"mask_token_id": 2} if kind == "peagle" else {}))
    draft.set_vocabulary(texts.flatten().bincount(minlength=260).topk(60).indices, target)
    untrained, rows = tau(draft), TokenWindows(texts.flatten(), 33)
    settings = {"max_steps": 20, "learning_rate": 1.5e-2, "per_device_train_batch_size": 8}
    trainer = make_trainer(model=draft, dataset=rows, eval_dataset=rows, **settings)
    before = trainer.evaluate()
    trainer.train()
    after, trained = trainer.evaluate(), tau(draft.eval())
    assert after["eval_loss"] < 0.7 * before["eval_loss"] and trained > untrained + 0.5
    assert after["eval_estimated_tau"] > before["eval_estimated_tau"] + 0.3
    save_speculators(draft, tmp_path / "theirs", target)
    raw = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert raw["speculators_model_type"] == kind and raw["draft_vocab_size"] == 60
    assert raw["eagle_aux_hidden_state_layer_ids"] == list(draft.layers_of(target.config))
    loaded = Eagle3DraftModel.from_pretrained(tmp_path / "theirs", target=target, tree_widths=[1, 1, 1], gate=False)
    assert all(torch.equal(value, draft.state_dict()[name]) for name, value in loaded.state_dict().items())
    assert tau(loaded) == trained


def test_refusals(make_trainer, make_eagle3):
    with pytest.raises(ValueError, match="training_steps=0"):
        make_trainer(model=make_eagle3(training_steps=0))
    with pytest.raises(ValueError, match="draft_vocab_size=20"):
        make_eagle3(**REDUCED).set_vocabulary([3, 4, 4])
