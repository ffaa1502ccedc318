"""Which modules run fused kernels while a step is captured, and that nothing else changes."""

import threading
from types import MethodType

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="fused kernels are Triton's")

from hf_longspec.attention_backends.interface import register
from hf_longspec.generation import fused_layers
from hf_longspec.generation.fused_layers import FAMILIES, fused, fused_forward, fused_modules
from tests.tiny_targets import tiny_target

TYPES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(fused_layers, "_verdicts", {})
    register()


def on_our_attention(name, **options):
    model = tiny_target(name, **options)
    model.set_attn_implementation("hf_longspec")
    return model


def kinds(model):
    """The kinds of modules with a fused forward."""
    names = {type(module).__name__ for module in model.modules() if fused_forward(module) is not None}
    return {suffix for name in names for suffix in fused_layers._KINDS if name.endswith(suffix)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", TYPES)
@torch.no_grad()
def test_known_families(name, dtype):
    """Every layer of these types is fused, but for the experts of a mixture."""
    assert kinds(on_our_attention(name).to(dtype)) >= {"RMSNorm", "DecoderLayer", "Attention"}
    assert len(TYPES) == len(FAMILIES)


@torch.no_grad()
def test_modules_that_compute_something_else_are_not_fused():
    """An activation, a norm and a rotation of another kind under a known name; a forward that the user replaced."""
    model = on_our_attention("llama")
    mlp, attention, norm = model.model.layers[0].mlp, model.model.layers[0].self_attn, model.model.norm
    assert all(fused_forward(module) for module in (mlp, attention, norm))
    mlp.act_fn = nn.GELU()
    other = type("LlamaRMSNorm", (type(norm),), {"forward": lambda self, x: x * self.weight})
    norm.__class__ = other
    assert fused_forward(mlp) is None and fused_forward(norm) is None
    layer = model.model.layers[1]
    layer.post_attention_layernorm.__class__ = other
    assert fused_forward(layer) is None
    layer.mlp.forward = MethodType(type(layer.mlp).forward, layer.mlp)
    assert fused_forward(layer.mlp) is None


@torch.no_grad()
def test_a_rotation_of_another_kind_is_not_fused(monkeypatch):
    model = on_our_attention("llama")
    module = __import__(type(model).__module__, fromlist=["x"])
    right = module.apply_rotary_pos_emb
    monkeypatch.setattr(module, "apply_rotary_pos_emb", lambda q, k, cos, sin: right(q, k, cos, -sin))
    assert kinds(model) == {"RMSNorm", "MLP", "DecoderLayer"}


@torch.no_grad()
def test_hooks_of_the_second_norm_run():
    """Whenever they are registered. Comparisons run no hooks."""
    model, seen = on_our_attention("llama"), []
    model.model.norm.register_forward_pre_hook(lambda *args: seen.append(args))
    assert "DecoderLayer" in kinds(model)
    for layer in model.model.layers:
        layer.post_attention_layernorm.register_forward_pre_hook(lambda *args: seen.append(args))
    assert kinds(model) == {"RMSNorm", "MLP", "Attention"} and not seen


@torch.no_grad()
def test_other_threads_and_later_forwards_run_the_model_as_it_is(monkeypatch):
    model, calls = on_our_attention("llama"), []
    tokens = torch.arange(3, 14)[None]
    plain = model(tokens).logits
    monkeypatch.setattr(
        fused_layers, "silu_mul", lambda gate, up: (calls.append(1), nn.functional.silu(gate) * up * 0)[1]
    )
    monkeypatch.setattr(fused_layers, "_agree", lambda *results: True)
    found = []
    modules = fused_modules(model)
    calls.clear()
    with fused(modules):
        thread = threading.Thread(target=lambda: found.append(model(tokens).logits))
        thread.start(), thread.join()
        assert modules and not calls
        assert not torch.equal(model(tokens).logits, plain) and calls
    assert torch.equal(found[0], plain) and torch.equal(model(tokens).logits, plain)
    assert not any("forward" in vars(module) for module in model.modules())


@torch.no_grad()
def test_a_model_without_known_layers_is_named(caplog):
    assert fused_modules(on_our_attention("olmo2")) == []
    assert "no module of Olmo2ForCausalLM has a fused kernel" in caplog.text
