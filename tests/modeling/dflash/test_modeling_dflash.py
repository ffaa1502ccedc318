"""DFlash, DSpark and DFlash2 drafts against the outputs of the projects that publish them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_longspec import DFlashDraftModel
from tests.modeling.dflash.block_logits import block_logits, ends_of
from tests.rounding import rounding, share
from tests.tiny_targets import random_draft, tiny_target

FIXTURES = Path(__file__).with_name("fixtures")
NAMES = sorted(path.name for path in FIXTURES.iterdir())
# two layers, the projection of the auxiliary hidden states, and the head
TOLERANCE = share(layers=4)


def expected_of(name):
    return load_file(FIXTURES / name / "expected.safetensors")


def load(name, **options):
    return DFlashDraftModel.from_pretrained(FIXTURES / name, window=None, **options)


def error_of(draft, expected):
    """Largest error of a logit of the three blocks, as a share of the largest logit of its block."""
    errors, lengths = [], expected["context_lengths"].tolist()
    target = ends_of(expected.get("target_embed_tokens"), expected.get("target_lm_head"))
    found = block_logits(draft, target, expected["taps"][None], expected["ids"][None], lengths)
    for block, logits in enumerate(found):
        wanted = expected.get(f"block_{block}_logits", expected.get(f"block_{block}_base_logits"))
        assert logits[0].shape == wanted.shape
        errors.append(float((logits[0] - wanted).abs().max() / wanted.abs().max()))
    return max(errors)


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_three_blocks(name):
    assert error_of(load(name), expected_of(name)) < TOLERANCE


@pytest.mark.parametrize("name", [name for name in NAMES if "dspark" in name or "dflash2" in name])
def test_tokens_are_chosen_after_the_token_before(name):
    """The walk of the publisher's code from the anchor on: tokens, of its reduced vocabulary, and confidences."""
    draft, expected = load(name), expected_of(name)
    target = ends_of(expected.get("target_embed_tokens"), expected.get("target_lm_head"))
    for block, length in enumerate(expected["context_lengths"].tolist()):
        anchor = torch.tensor([[length]])
        with torch.no_grad():
            states = draft(expected["taps"][None], expected["ids"][None], anchor, target)[:, 0]
            logits, before, tokens = draft.logits(states, target), expected["ids"][None, length : length + 1], []
            memory, confidence = draft.first_memory(before), []
            for slot in range(draft.config.first_slot, draft.config.block_size):
                row, memory = draft.next_logits(logits[:, [slot]], states[:, [slot]], before, memory)
                if draft.confidence_head is not None:
                    confidence.append(draft.confidence_logits(states[:, [slot]], before)[0, 0])
                before = draft.token_ids[row.argmax(-1)]
                tokens.append(int(before))
        assert tokens == expected[f"block_{block}_tokens"].tolist()
        if confidence:
            torch.testing.assert_close(torch.stack(confidence), expected[f"block_{block}_confidence_logits"])


def test_layers_that_are_read_are_counted_in_two_ways():
    """speculators counts inputs of layers, z-lab and DeepSpec outputs."""
    raw = json.loads((FIXTURES / "spec_dflash_anchor" / "config.json").read_text())
    assert load("spec_dflash_anchor").config.target_layer_ids == raw["aux_hidden_state_layer_ids"]
    outputs = expected_of("zlab_full")["target_layer_ids"].tolist()
    assert load("zlab_full").config.target_layer_ids == [layer + 1 for layer in outputs]


def restated(draft, model, aux, root, causal):
    """States of a block after entries `aux` `(T, layers * hidden)`, one slot and one head after another, in float64."""
    config, weights = draft.config, {name: x.double() for name, x in draft.state_dict().items()}
    length, size, half = len(aux), config.block_size, config.head_dim // 2
    embed, groups = (
        model.get_input_embeddings().weight.double(),
        config.num_attention_heads // config.num_key_value_heads,
    )

    def norm(x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weights[name]

    def heads(x, name, position=None):
        found = (weights[f"{name}_proj.weight"] @ x).view(-1, 2 * half)
        if position is None:
            return found
        found = norm(found, f"{name}_norm.weight")
        angle = position * config.rope_parameters["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        one, two = found[:, :half], found[:, half:]
        return torch.cat([one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()], -1)

    context = [norm(weights["fc.weight"] @ x.double(), "hidden_norm.weight") for x in aux]
    states = [embed[token] for token in [root] + [config.mask_token_id] * (size - 1)]
    for index in range(config.num_hidden_layers):
        at, sinks = f"layers.{index}.self_attn.", weights[f"layers.{index}.self_attn.attention_sink_bias"]
        entries = [(heads(x, at + "k", p), heads(x, at + "v")) for p, x in enumerate(context)]
        normed = [norm(x, f"layers.{index}.input_layernorm.weight") for x in states]
        slots = [(heads(x, at + "k", length + s), heads(x, at + "v")) for s, x in enumerate(normed)]
        after = []
        for slot, x in enumerate(normed):
            query, seen, out = heads(x, at + "q", length + slot), slots[: slot + 1] if causal else slots, []
            for head in range(config.num_attention_heads):
                pairs = [(key[head // groups], value[head // groups]) for key, value in entries + seen]
                scores = torch.stack([query[head] @ key / config.head_dim**0.5 for key, _ in pairs])
                shares = scores.exp() / (scores.exp().sum() + sinks[head].exp())
                out.append(sum(share * value for share, (_, value) in zip(shares, pairs, strict=True)))
            x = states[slot] + weights[at + "o_proj.weight"] @ torch.cat(out)
            mlp, z = f"layers.{index}.mlp.", norm(x, f"layers.{index}.post_attention_layernorm.weight")
            gate = torch.nn.functional.silu(weights[mlp + "gate_proj.weight"] @ z)
            after.append(x + weights[mlp + "down_proj.weight"] @ (gate * (weights[mlp + "up_proj.weight"] @ z)))
        states = after
    return torch.stack([norm(x, "norm.weight") for x in states])


@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_a_causal_block_and_sinks_in_straight_lines(causal):
    """A setting replaces the field; with the other order of slots the states differ."""
    model = tiny_target("llama", vocab_size=31)
    parts = {"num_hidden_layers": 2, "attention_sink_bias": True}
    draft = random_draft(DFlashDraftModel, model, block_size=5, causal=causal, **parts)
    size = draft.config.num_aux_hidden_states * draft.config.target_hidden_size
    aux, tokens = torch.randn(1, 7, size, generator=torch.Generator().manual_seed(1)), torch.arange(8)[None]
    expected = restated(draft, model, aux[0], int(tokens[0, 7]), causal)
    states = draft(aux, tokens, torch.tensor([[7]]), model)[0, 0]
    torch.testing.assert_close(states.double(), expected, **rounding(expected, layers=4))
    draft.generation_config.causal = not causal
    assert (draft(aux, tokens, torch.tensor([[7]]), model)[0, 0] - states).abs().max() > 1e-2
