"""Training of MTP layers: the loss against single places and steps, layers that learn, adapters."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_longspec import MtpDraftModel
from tests.modeling.eagle3.residual_stream import residual_stream
from tests.training.first_step import (
    check_checkpointing,
    check_first_step,
    discounted,
    losses_of_steps,
)

FIXTURES = Path(__file__).parents[1] / "modeling" / "mtp" / "fixtures"


@pytest.fixture
def target(request):
    """A tiny target with an MTP layer."""
    return AutoModelForCausalLM.from_pretrained(FIXTURES / request.param).eval()


@pytest.fixture
def draft():
    """No other draft, which `make_trainer` has by default: not all exist for these targets."""


def store(kept, mask):
    """Keep the keys and values of a forward in `kept`, and attend to all of it under a mask."""

    def update(keys, values):
        kept.append((keys, values))
        return *(torch.cat(parts, 2) for parts in zip(*kept, strict=True)), mask

    return update


def drafted(draft, target, states, tokens, steps, window, sinks):
    """Logits of every step after every entry: places one by one with a cache that is dropped."""
    parts, count = draft.parts_of(target), len(tokens) - 1
    embedded, results = parts.embed(tokens[None]), [[] for _ in range(steps)]

    def layer(states, first, embedded, kept, mask):
        places = first + torch.arange(states.shape[1])[None]
        return draft.layers[0](states, embedded, places, parts.rotary(places, states), store(kept, mask))

    def seen(size):
        distance = torch.arange(size)[:, None] - torch.arange(size)
        near = (distance < (window or size)) | (torch.arange(size) < sinks)
        return ((distance >= 0) & near)[None]

    for entry in range(count):
        kept, mask = [], seen(entry + 1)
        output = layer(states[:, : entry + 1], 0, embedded[:, 1 : entry + 2], kept, mask)[:, -1:]
        for step in range(min(steps, count - entry)):
            if step:
                more = torch.ones(1, 1, step, dtype=torch.bool)
                ahead = entry + step
                whole = torch.cat([mask[:, -1:], more], 2)
                output = layer(output, ahead, embedded[:, ahead + 1 : ahead + 2], kept, whole)
            results[step].append(parts.head(output)[0, 0])
    return results


@torch.no_grad()
def definition(draft, target, rows, loss, steps, window, sinks):
    """The weighted losses, and the share of hits of every step."""

    def logits_of(tokens):
        states, wanted = residual_stream(target, tokens[None])
        final = target.model.norm(states[-1])[:, :-1]
        return drafted(draft, target, final, tokens, steps, window, sinks), wanted[0]

    return discounted(*losses_of_steps(rows, logits_of, loss, steps))


@pytest.mark.parametrize(
    ("target", "loss", "settings"),
    [
        ("mimo_derived", "kl", {}),
        ("ernie4_5_derived", "ce", {"training_steps": 2}),
        ("deepseek_v3", "kl", {"window": 6, "sinks": 2}),
    ],
    indirect=["target"],
    ids=str,
)
def test_the_loss_is_the_definition(make_trainer, target, labelled, loss, settings):
    """In the first step of a run, and in an evaluation in one batch."""
    draft, steps = MtpDraftModel.from_target(target, **settings), settings.get("training_steps", 3)
    span = settings.get("window"), settings.get("sinks", 0)
    expected, shares = definition(draft, target, labelled, loss, steps, *span)
    check_first_step(make_trainer, draft, labelled, loss, expected, shares, loss_chunk_size=7)
    assert len(shares) == steps


@pytest.mark.parametrize("target", ["qwen3_next"], indirect=True)
def test_checkpointing_changes_no_gradient(make_trainer, target, labelled):
    check_checkpointing(
        make_trainer, lambda: MtpDraftModel.from_target(target), "layers.0.block.self_attn.o_proj", labelled
    )


@pytest.mark.parametrize("target", ["mimo_derived"], indirect=True)
def test_offsets_are_refused(make_trainer, target):
    with pytest.raises(ValueError, match="max_offset=5"):
        make_trainer(model=MtpDraftModel.from_target(target), max_offset=5)
