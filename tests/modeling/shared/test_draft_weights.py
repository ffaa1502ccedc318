"""Drafting steps with a copy of the target in fewer bits: its weights, who runs what, and the text."""

import copy
import logging
import threading
from contextlib import nullcontext

import pytest
import torch

from hf_longspec import SpecAttnDraftModel
from hf_longspec.modeling.shared import draft_weights
from hf_longspec.modeling.shared.draft_weights import LowBitLinear, rounded_copy
from tests.pairwise import few
from tests.robustness.enumeration import build
from tests.tiny_targets import tiny_prompts, tiny_target

# Sizes that the kernels for 4 bits take, and such that they do not take.
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
ODD_SIZES = {"hidden_size": 72, "intermediate_size": 200, "head_dim": 18}
FREE = {"gate": False, "check_target": False, "sparse_min_tokens": 8, "num_assistant_tokens": 3}


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama", **SIZES)


def rounded_by_hand(weight, bits, group):
    """The weights rounded one group at a time, with scales in bfloat16 as the kernels read them."""
    rows = []
    for row in weight.double():
        parts = []
        for part in row.split(group):
            scale = (part.abs().max() / (2 ** (bits - 1) - 1)).float()
            parts.append((part / scale).round() * scale.to(torch.bfloat16).double())
        rows.append(torch.cat(parts))
    return torch.stack(rows)


@pytest.mark.parametrize(("weights", "bits", "group"), [("int8", 8, 128), ("int4", 4, 64)])
@torch.no_grad()
def test_products_are_those_of_rounded_weights(target, weights, bits, group):
    layer, of_target = (one.model.layers[1].mlp.gate_proj for one in (rounded_copy(target, weights), target))
    expected = rounded_by_hand(of_target.weight, bits, group)
    x = torch.randn(3, 5, 128, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    product = x.double() @ expected.T
    # kernels round a weight and a result to bfloat16, by half of its last of 8 bits each
    most = (x.double().abs() @ expected.abs().T).max().item()
    torch.testing.assert_close(layer(x).double(), product, rtol=0, atol=2 * 2**-9 * most)
    # the scale and its multiple are rounded to bfloat16: (1 + 2**-9)**2 - 1
    torch.testing.assert_close(layer.weight.double(), expected, rtol=1.01 * 2**-8, atol=0)
    assert (expected - of_target.weight).abs().max() > 0


@pytest.mark.parametrize(
    ("bits", "rows", "columns"), [(4, 200, 72), (4, 72, 200), (4, 576, 576), (8, 72, 201), (8, 5, 24)]
)
@torch.no_grad()
def test_products_of_odd_sizes(bits, rows, columns):
    """Zeros that are added to rows and columns change neither products nor scales."""
    torch.manual_seed(0)  # of one in 25 matrices, float32 and float64 round a weight to different multiples
    linear = torch.nn.Linear(columns, rows)
    layer, expected = LowBitLinear(linear, bits), rounded_by_hand(linear.weight, bits, 64 if bits == 4 else columns)
    # what lies after the end of another matrix may be zeros by chance, or end the process
    assert layer.columns % 16 == 0
    x = torch.randn(2, 3, columns, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    most = (x.double().abs() @ expected.abs().T).max().item()
    product = x.double() @ expected.T + linear.bias
    torch.testing.assert_close(layer(x).double(), product, rtol=2**-8, atol=2 * 2**-9 * most)
    # the scale and its multiple are rounded to bfloat16: (1 + 2**-9)**2 - 1
    torch.testing.assert_close(layer.weight.double(), expected, rtol=1.01 * 2**-8, atol=0)


@pytest.mark.parametrize(
    ("kind", "sizes", "layers", "message"),
    [
        ("llama", ODD_SIZES, 14, "% of the weights are not rounded: lm_head ("),
        ("llama", {"vocab_size": 4096}, 14, "As these are more than half, drafting will hardly be faster"),
        ("mixtral", {}, 8, r"mlp.experts.gate_up_proj ("),
    ],
)
def test_the_share_that_stays_is_in_the_message(kind, sizes, layers, message):
    target = tiny_target(kind, **sizes)
    rounded = dict(draft_weights.rounded_layers(target, 4))
    described = draft_weights.described_copy(target, "int4", rounded)
    assert len(rounded) == layers and message in described
    weights = {name: weight.numel() for name, weight in target.named_parameters() if weight.dim() > 1}
    of_step = sum(weights.values()) - weights["model.embed_tokens.weight"]
    left = of_step - sum(weights[f"{name}.weight"] for name in rounded)
    assert f" {left / of_step:.1%} of the weights" in described
    assert ("more than half" in described) == (left / of_step > 0.5)


def test_a_copy_runs_the_hooks_that_the_target_has():
    """Also one that holds what cannot be copied, and none that was removed."""
    target, lock, seen = tiny_target("llama", **SIZES), threading.Lock(), []

    class Holder:
        def __init__(self):
            self.lock = lock

        def hook(self, *_):
            seen.append(1)

    handle = target.model.layers[1].register_forward_pre_hook(Holder().hook)
    copied = rounded_copy(target, "int4")
    for count in (1, 0):
        seen.clear()
        copied(torch.ones(1, 3, dtype=torch.long))
        assert len(seen) == count
        handle.remove()


def test_a_copy_shares_all_but_rounded_weights(target):
    copied = rounded_copy(target, "int4")
    rounded = {name for name, module in copied.named_modules() if isinstance(module, LowBitLinear)}
    linear = {name for name, module in target.named_modules() if isinstance(module, torch.nn.Linear)}
    assert rounded == linear - {"lm_head"}
    own = dict(target.named_parameters())
    assert all(value is own[name] for name, value in copied.named_parameters())
    layer = copied.model.layers[0].mlp.down_proj
    # half a byte for a weight, two numbers of two bytes for a group
    assert sum(x.nbytes for x in layer.buffers()) == 128 * 256 // 2 + 128 * (256 // 64) * 4


CASES = [
    (SpecAttnDraftModel, {"draft_weights": "int4"}, "llama", False),
    (SpecAttnDraftModel, {"draft_weights": "int8", "selection": "all"}, "gemma3", True),
    (SpecAttnDraftModel, {"draft_weights": "int8"}, "qwen3_5_text", False),
    (SpecAttnDraftModel, {"draft_weights": "int4"}, "qwen3", True),
]


@pytest.mark.parametrize(("draft", "settings", "kind", "samples"), few(CASES, 4))
def test_the_text_is_that_of_the_target(draft, settings, kind, samples):
    """Greedy the text of `generate`; sampled with coupled noise the text of the same loop without a copy."""
    if kind == "qwen3_5_text":  # the copy also runs recurrences, on copies of the target's states
        model = build(kind, 0)
    else:
        model = tiny_target(kind, **{"llama": SIZES, "qwen3": ODD_SIZES}.get(kind, {}))
    ids, mask = tiny_prompts(128, [31, 9, 44])
    how = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": samples, "pad_token_id": 0}
    made = draft.from_target(model, **settings, **FREE, **({"acceptance": "coupled"} if samples else {}))
    other = {"assistant_model": draft.from_target(model, **FREE, acceptance="coupled")} if samples else {}
    torch.manual_seed(3)
    expected = model.generate(ids, **how, **other)
    torch.manual_seed(3)
    assert torch.equal(model.generate(ids, assistant_model=made, **how), expected)
    assert made.last_speculation.num_spec_steps > 0


def test_the_copy_runs_the_drafting_steps_and_the_target_the_rest(target):
    draft = SpecAttnDraftModel.from_target(target, draft_weights="int4", **FREE)
    ids, mask = tiny_prompts(128, [40])
    calls = {"target": 0, "copy": 0}
    copied = draft.weights_for(target)

    def count(module, *_):
        calls["copy" if module is copied.model.layers[0].mlp else "target"] += 1

    handle = target.model.layers[0].mlp.register_forward_hook(count)  # the copy shares it
    state, _ = draft._made
    draft._made = (state[0], draft_weights.state_of_weights(target), *state[2:]), copied
    target.generate(ids, attention_mask=mask, assistant_model=draft, max_new_tokens=12, do_sample=False)
    handle.remove()
    verifications = draft.last_speculation.num_spec_steps
    assert draft.weights_for(target) is copied
    assert calls["copy"] == 3 * verifications and 0 < calls["target"] <= verifications + 3


def test_a_copy_that_is_given_drafts_and_is_not_saved(target, tmp_path, caplog):
    given = copy.deepcopy(target)
    draft = SpecAttnDraftModel.from_target(target, draft_weights=given, **FREE)
    assert draft.weights_for(target) is given and not list(draft.parameters())
    with caplog.at_level(logging.WARNING):
        draft.save_pretrained(tmp_path)
    assert SpecAttnDraftModel.from_pretrained(tmp_path, target=target).weights_for(target) is None


def test_another_copy_is_made_when_weights_change(target):
    model = copy.deepcopy(target)
    draft = SpecAttnDraftModel.from_target(model, draft_weights="int4")
    first = draft.weights_for(model)
    assert draft.weights_for(model) is first
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
    second = draft.weights_for(model)
    assert second is not first
    model.model.layers[0].mlp.up_proj.weight.data.mul_(2)  # counts no version, as fused optimizers do not
    third = draft.weights_for(model)
    assert third not in (first, second) and draft.weights_for(model) is third
    draft.generation_config.draft_weights = "int8"
    assert draft.weights_for(model) not in (first, second, third)
    draft.generation_config.draft_weights = None
    assert draft.weights_for(model) is None


def quantized(model):
    """With torch's own kind of quantised layers, without a flag."""
    return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)


def of_another_class(model):
    """With layers of which only their own forward is known to be right."""

    class OwnLinear(torch.nn.Linear):
        pass

    for module in model.model.modules():
        if isinstance(module, torch.nn.Linear):
            module.__class__ = OwnLinear
    return model


# the successor of torch's own quantization is another package
@pytest.mark.filterwarnings("ignore:torch.ao.quantization:DeprecationWarning")
@pytest.mark.parametrize(
    ("kind", "sizes", "weights", "change", "message"),
    [
        ("llama", SIZES, "int2", None, "draft_weights='int2': expected None or one of int8, int4"),
        ("llama", {}, "int4", of_another_class, "LlamaForCausalLM has no linear layer but the head"),
        ("llama", SIZES, "int4", quantized, "quantized already"),
        ("llama", SIZES, lambda: tiny_target("llama", num_hidden_layers=3, **SIZES), None, "num_hidden_layers=3"),
    ],
)
def test_what_is_refused(kind, sizes, weights, change, message):
    model = tiny_target(kind, **sizes)
    model = model if change is None else change(model)
    with pytest.raises(ValueError, match=message):
        SpecAttnDraftModel.from_target(model, draft_weights=weights() if callable(weights) else weights)


def test_adapters_of_the_target_are_those_of_the_copy(target):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    lora = peft.get_peft_model(copy.deepcopy(target), config).eval()
    model = lora.get_base_model()
    draft = SpecAttnDraftModel.from_target(model, draft_weights="int8", **FREE)
    ids, mask = tiny_prompts(128, [40])
    how = {"attention_mask": mask, "max_new_tokens": 10, "do_sample": False}
    logits = []
    for context in (nullcontext, lora.disable_adapter):
        with context():
            assert torch.equal(model.generate(ids, assistant_model=draft, **how), model.generate(ids, **how))
            logits += [of(ids, attention_mask=mask).logits for of in (draft.weights_for(model), model)]
    near = 0.1 * logits[1].abs().max().item()  # far from the distance that the adapter makes
    assert (logits[0] - logits[1]).abs().max() < near < (logits[1] - logits[3]).abs().max()
    assert (logits[2] - logits[3]).abs().max() < near
