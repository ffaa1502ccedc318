"""Training of MTP layers: the loss against single places and steps, layers that learn, adapters."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_longspec import MtpDraftModel
from hf_longspec.training import TokenWindows
from tests.modeling.eagle3.residual_stream import residual_stream
from tests.tiny_targets import write_mtp_layers
from tests.training.conftest import labelled_rows
from tests.training.first_step import check_first_step

FIXTURES = Path(__file__).parents[1] / "modeling" / "mtp" / "fixtures"
NEVER = 999


@pytest.fixture
def target(request):
    """A tiny target with an MTP layer."""
    return AutoModelForCausalLM.from_pretrained(FIXTURES / request.param).eval()


@pytest.fixture
def draft():
    """No other draft, which `make_trainer` has by default: not all exist for these targets."""


@pytest.fixture
def rows(tokens):
    """Ragged rows, the last too short for any step."""
    return labelled_rows(tokens, (0, 33), (40, 21), (70, 4), (90, 2))


def store(kept, mask):
    """Keep the keys and values of a forward in `kept`, and attend to all of it under a mask."""

    def update(keys, values):
        kept.append((keys, values))
        return *(torch.cat(parts, 2) for parts in zip(*kept, strict=True)), mask

    return update


def drafted(draft, target, states, tokens, steps, window, sinks):
    """Logits of every step after every entry: places one by one with a cache that is dropped, or layers in turn."""
    parts, count = draft.parts_of(target), len(tokens) - 1
    embedded, results = parts.embed(tokens[None]), [[] for _ in range(steps)]

    def layer(index, states, first, embedded, kept, mask):
        places = first + torch.arange(states.shape[1])[None]
        return draft.layers[index](states, embedded, places, parts.rotary(places, states), store(kept, mask))

    def seen(size):
        distance = torch.arange(size)[:, None] - torch.arange(size)
        near = (distance < (window or size)) | (torch.arange(size) < sinks)
        return ((distance >= 0) & near)[None]

    if len(draft.layers) > 1:
        for step in range(min(steps, count)):
            size = count - step
            states = layer(step, states[:, :size], step, embedded[:, 1 + step :], [], seen(size))
            results[step] = parts.head(states)[0].unbind()
        return results
    for entry in range(count):
        kept, mask = [], seen(entry + 1)
        output = layer(0, states[:, : entry + 1], 0, embedded[:, 1 : entry + 2], kept, mask)[:, -1:]
        for step in range(min(steps, count - entry)):
            if step:
                more = torch.ones(1, 1, step, dtype=torch.bool)
                ahead = entry + step
                whole = torch.cat([mask[:, -1:], more], 2)
                output = layer(0, output, ahead, embedded[:, ahead + 1 : ahead + 2], kept, whole)
            results[step].append(parts.head(output)[0, 0])
    return results


@torch.no_grad()
def definition(draft, target, rows, loss, steps, window, sinks):
    """The weighted losses, and the share of hits of every step."""
    losses, wins = [[] for _ in range(steps)], [[] for _ in range(steps)]
    for row in rows:
        tokens = row["input_ids"]
        labels = row.get("labels", tokens).tolist()
        states, wanted = residual_stream(target, tokens[None])
        final = target.model.norm(states[-1])[:, :-1]
        logits, wanted = drafted(draft, target, final, tokens, steps, window, sinks), wanted[0].double()
        for step in range(steps):
            for entry, own in enumerate(logits[step]):
                ahead = entry + step + 2
                if ahead >= len(tokens) or labels[ahead] == -100:
                    continue
                log_draft, log_target = own.double().log_softmax(-1), wanted[ahead - 1].log_softmax(-1)
                token = labels[ahead] if loss == "ce" else int(wanted[ahead - 1].argmax())
                divergence = (log_target.exp() * (log_target - log_draft)).sum()
                losses[step].append(divergence if loss == "kl" else -log_draft[token])
                wins[step].append(int(log_draft.argmax()) == token)
    mean = sum(0.8**step * float(sum(own)) / len(own) for step, own in enumerate(losses))
    return mean, {f"acceptance_step_{step}": sum(own) / len(own) for step, own in enumerate(wins, start=1)}


@pytest.mark.parametrize(
    ("target", "loss", "count", "settings"),
    [
        ("mimo_derived", "kl", 1, {}),
        ("ernie4_5_derived", "ce", 1, {"training_steps": 2}),
        ("qwen3_next", "kl", 1, {"window": 6, "sinks": 2}),
        ("deepseek_v3", "kl", 2, {"window": 9, "sinks": 1}),
    ],
    indirect=["target"],
    ids=str,
)
def test_the_loss_is_the_definition(make_trainer, target, rows, loss, count, settings, tmp_path):
    """In the first step of a run, and in an evaluation in one batch."""
    if count > 1:
        write_mtp_layers(target, tmp_path, count)
    draft = MtpDraftModel.from_target(target, str(tmp_path) if count > 1 else None, **settings)
    steps = settings.get("training_steps", 3) if count == 1 else count
    span = settings.get("window"), settings.get("sinks", 0)
    expected, shares = definition(draft, target, rows, loss, steps, *span)
    check_first_step(make_trainer, draft, rows, loss, expected, shares, loss_chunk_size=7)
    assert len(shares) == steps


def texts_of(target, tokens):
    starts = tokens[: 8 * 5].view(8, 5)
    return starts, target.generate(starts, max_new_tokens=28, do_sample=False, eos_token_id=NEVER, pad_token_id=0)


def tau(target, draft, starts, texts):
    """Tokens per verification; the text stays that of the target."""
    options = {"max_new_tokens": 28, "do_sample": False, "eos_token_id": NEVER, "pad_token_id": 0}
    assert torch.equal(target.generate(starts, assistant_model=draft, **options), texts)
    return getattr(draft, "get_base_model", lambda: draft)().last_speculation.mean_acceptance_length


CHAIN = {"tree_widths": [1, 1, 1], "gate": False, "on_unsupported": "error"}


@pytest.mark.parametrize("target", ["qwen3_5", "deepseek_v3"], indirect=True)
def test_the_draft_learns_and_drafts_better(make_trainer, target, tokens, tmp_path):
    """On texts of the target, which the saved draft continues without the target's files."""
    starts, texts = texts_of(target, tokens)
    draft = MtpDraftModel.from_target(target, **CHAIN)
    untrained = tau(target, draft, starts, texts)
    rows = TokenWindows(texts.flatten(), 33)
    settings = {"per_device_train_batch_size": 8, "max_steps": 30, "learning_rate": 1e-2}
    trainer = make_trainer(model=draft, dataset=rows, eval_dataset=rows, **settings)
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_loss"] < 0.7 * before["eval_loss"]
    assert after["eval_estimated_tau"] > before["eval_estimated_tau"] + 0.3
    trained = tau(target, draft.eval(), starts, texts)
    assert trained > untrained + 0.3
    trainer.save_model(tmp_path / "saved")
    loaded = MtpDraftModel.from_pretrained(tmp_path / "saved", **CHAIN)
    assert all(torch.equal(value, draft.state_dict()[name]) for name, value in loaded.state_dict().items())
    assert tau(target, loaded, starts, texts) == trained


@pytest.mark.parametrize("target", ["qwen3_next"], indirect=True)
def test_an_adapter_is_trained_and_drafts(make_trainer, target, tokens, tmp_path):
    peft = pytest.importorskip("peft")
    starts, texts = texts_of(target, tokens)
    draft = MtpDraftModel.from_target(target, **CHAIN)
    frozen = {name: weight.clone() for name, weight in draft.state_dict().items()}
    config = peft.LoraConfig(r=4, target_modules=["eh_proj", "q_proj", "v_proj", "o_proj"])
    settings = {"per_device_train_batch_size": 8, "max_steps": 15, "learning_rate": 2e-2}
    trainer = make_trainer(
        model=draft, dataset=TokenWindows(texts.flatten(), 33), peft_config=config, logging_steps=5, **settings
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    trainer.save_model(tmp_path / "adapter")
    trained = tau(target, trainer.model.eval(), starts, texts)
    fresh = MtpDraftModel.from_target(target, **CHAIN)
    assert all(torch.equal(fresh.state_dict()[name], weight) for name, weight in frozen.items())
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter")
    assert tau(target, loaded, starts, texts) == trained
    assert tau(target, loaded.merge_and_unload(), starts, texts) == pytest.approx(trained, abs=0.1)  # rounding


@pytest.mark.parametrize("target", ["mimo_derived"], indirect=True)
@pytest.mark.parametrize(("settings", "options"), [({"training_steps": 0}, {}), ({}, {"max_offset": 5})], ids=str)
def test_refusals(make_trainer, target, settings, options):
    (name,) = settings | options
    with pytest.raises(ValueError, match=f"{name}="):
        make_trainer(model=MtpDraftModel.from_target(target, **settings), **options)
