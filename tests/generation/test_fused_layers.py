"""Which operations run as fused kernels while a step is captured, and that nothing else changes."""

import threading
from collections import Counter
from functools import partial
from types import MethodType

import pytest
import torch
from torch import nn
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

pytest.importorskip("triton", reason="fused kernels are Triton's")

from hf_longspec.attention_backends.triton.layers import NORM_FORMS, ROTARY_FORMS
from hf_longspec.generation.compiled import fused_layers
from hf_longspec.generation.compiled.fused_layers import (
    FusedOperations,
    fused,
    fused_forward,
    fused_modules,
    normalized,
)
from hf_longspec.generation.special_cases.recurrences import delta_step
from hf_longspec.generation.target_modules import rotated
from tests.pairwise import few
from tests.tiny_targets import tiny_target

# Norms alone, norms with a residual sum, gates, rotations. No sum precedes the first norm; one precedes the final norm.
FAMILIES = {
    "llama": (1, 4, 2, 2),
    "phi3": (1, 4, 2, 2),
    "olmo2": (8, 1, 2, 2),  # no norm follows the other sums
    "smollm3": (1, 4, 2, 1),  # one of two layers rotates
    "glm4": (5, 4, 2, 2),
    "gemma3": (13, 6, 3, 3),
    "gpt_oss": (1, 4, 2, 2),
    "cohere2": (0, 0, 2, 1),  # its norms subtract the mean
    "deepseek_v3": (5, 4, 3, 0),  # rotates by a function of its own
}
# Most difference of logits in rounding steps of the largest one: those of several kernels, through the layers.
MOST_STEPS = 100


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(fused_layers, "_decided", {})
    monkeypatch.setattr(fused_layers, "_of_rotations", type(fused_layers._of_rotations)())


@pytest.fixture
def kernels(monkeypatch):
    """Counts the calls of kernels."""
    found = Counter()

    def call(name, function, *args):
        found[name if name != "add_norm" or len(args) < 5 else "sum"] += 1
        return function(*args)

    for name in ("add_norm", "gated", "rotate", "delta_rule"):
        monkeypatch.setattr(fused_layers, name, partial(call, name, getattr(fused_layers, name)))
    return found


def numbers(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("name", few(list(FAMILIES), 6))
@torch.no_grad()
def test_families(name, kernels):
    model, tokens = tiny_target(name), torch.arange(3, 6)[None]
    expected = model(tokens).logits
    with fused(fused_modules(model)):  # decides
        model(tokens)
    kernels.clear()
    with fused(fused_modules(model)):
        logits = model(tokens).logits
    assert tuple(kernels[kind] for kind in ("add_norm", "sum", "gated", "rotate")) == FAMILIES[name]
    step = torch.finfo(logits.dtype).eps * expected.abs().max()
    assert (logits - expected).abs().max() <= MOST_STEPS * step
    assert not any("forward" in vars(module) for module in model.modules())


@torch.no_grad()
def test_modules_that_compute_something_else_are_not_fused():
    """A norm of another kind under a known name, one of another module, a forward that the user replaced."""
    norm = LlamaRMSNorm(8, eps=1e-5)
    assert fused_forward(norm).args == (1e-5, NORM_FORMS[0], None)
    other = type("LlamaRMSNorm", (LlamaRMSNorm,), {"forward": lambda self, x: x * self.weight})(8, eps=1e-5)
    assert fused_forward(other) is None
    assert fused_forward(nn.LayerNorm(8, bias=False)) is None and fused_forward(nn.LayerNorm(8)) is None
    norm.forward = MethodType(LlamaRMSNorm.forward, norm)
    assert fused_forward(norm) is None


@torch.no_grad()
def test_norms_of_other_inputs_run_as_they_are():
    """Another dtype, a second input: the norm's own forward decides."""
    norm = LlamaRMSNorm(8, eps=1e-5)
    forward, hidden = fused_forward(norm), numbers(2, 8).half()
    assert torch.equal(forward(norm, hidden), norm(hidden))
    with pytest.raises(TypeError):
        forward(norm, hidden, gate=hidden)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_with_a_gate(kernels, dtype):
    """Silu, sigmoid, and a gate before the norm, which is not fused."""
    hidden, gate = numbers(2, 3, 24).to(dtype), 3 * numbers(2, 3, 48).to(dtype)[..., 24:]
    for kind in (Qwen3NextRMSNormGated, KimiLinearRMSNormGated):
        norm = kind(24, eps=1e-5).to(dtype)
        norm.weight.copy_(numbers(24))
        forward, expected = fused_forward(norm), norm(hidden, gate)
        kernels.clear()
        step = torch.finfo(dtype).eps * expected.abs().max()
        assert (forward(norm, hidden, gate) - expected).abs().max() <= fused_layers.MOST_STEPS * step
        assert kernels["add_norm"] == kernels["gated"] == 1
        assert torch.equal(forward(norm, hidden, gate.double()), norm(hidden, gate.double()))  # runs as it is
    assert fused_forward(MambaRMSNormGated(24, 24, eps=1e-5)) is None


def turned(query, key, cos, sin):
    return apply_rotary_pos_emb(query, key, cos, -sin)


def without_a_half(query, key, cos, sin):
    return query * cos[:, None], key * cos[:, None]


@pytest.mark.parametrize("function", [apply_rotary_pos_emb, turned, without_a_half])
@torch.no_grad()
def test_rotations(function, kernels):
    """Of a known kind and of others, with angles that show it and at position 0, where all kinds agree."""
    query, key, angles = numbers(1, 4, 3, 8), numbers(1, 2, 3, 8), numbers(1, 3, 4).repeat(1, 1, 2)
    is_known = function is apply_rotary_pos_emb
    for factor, form in ((0, None), (1, ROTARY_FORMS[0] if is_known else None)):
        cos, sin = (factor * angles).cos(), (factor * angles).sin()
        with FusedOperations():
            found = rotated(function, query, key, cos, sin)
        for one, other in zip(found, function(query, key, cos, sin), strict=True):
            torch.testing.assert_close(one, other)
        assert [*fused_layers._of_rotations[function].values()] == ([] if not factor else [form])


@pytest.mark.parametrize("factor", [1, 1.01])
@torch.no_grad()
def test_a_node_of_the_delta_rule(factor, kernels, monkeypatch):
    """By the kernel, or as it is if the kernel computes something else."""
    kernel = fused_layers.delta_rule
    monkeypatch.setattr(fused_layers, "delta_rule", lambda *args: tuple(factor * x for x in kernel(*args)))
    query, value, decay = numbers(2, 1, 2, 12), numbers(2, 1, 4, 9), -numbers(2, 1, 4).abs()
    args = numbers(2, 4, 12, 9), query, query.flip(2), value, decay, decay.exp(), 1e-6
    expected = delta_step(*args)
    for _ in range(2):
        kernels.clear()
        with FusedOperations():
            found = delta_step(*args)
    assert kernels["delta_rule"] == (factor == 1)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@torch.no_grad()
def test_every_function_sees_what_was_held_back(kernels):
    """Numbers, views, changes in place and what leaves the context; a projection between a gate and its product."""
    a, b, weight = numbers(1, 3, 8), numbers(1, 3, 8), numbers(8, 8)
    norm, square = torch.ones(8), torch.arange(64.0).view(8, 8)
    silu = nn.functional.silu
    with FusedOperations():
        assert (a + b).sum() == torch.stack([a, b]).sum(0).sum()
        view = (a + b).mT
        assert view.is_contiguous() is False and torch.equal(view, torch.stack([a, b]).sum(0).mT)
        total, first = a + b, a.clone()
        total_again, _ = first + b, first.zero_()
        before, activated = a.clone(), silu(a)
        product = activated * (nn.functional.linear(b, weight))
        other = nn.functional.linear(silu(before), square)
        changed = silu(before)
        before.zero_()
        alone = normalized(a, norm, 1e-5, NORM_FORMS[0])
        kept = a + b
        joined = normalized(kept, norm, 1e-5, NORM_FORMS[0])
        last = silu(b)
    torch.testing.assert_close(total, a.add(b))
    torch.testing.assert_close(total_again, total)
    torch.testing.assert_close(product, silu(a) * (b @ weight.T))
    torch.testing.assert_close(other, silu(a) @ square.T)
    torch.testing.assert_close(changed, silu(a))
    torch.testing.assert_close(kept, total)
    torch.testing.assert_close(joined, nn.functional.rms_norm(total, (8,), eps=1e-5))
    torch.testing.assert_close(alone, nn.functional.rms_norm(a, (8,), eps=1e-5))
    torch.testing.assert_close(last, silu(b))
    assert kernels["sum"] == 1 and kernels["add_norm"] == 1


@torch.no_grad()
def test_hooks_run():
    """Those of a norm see its input and its output."""
    model, seen = tiny_target("llama", num_hidden_layers=1), []
    for norm in (model.model.norm, model.model.layers[0].post_attention_layernorm):
        norm.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0].clone(), output.clone())))
    tokens = torch.arange(3, 6)[None]
    model(tokens)
    with fused(fused_modules(model)):
        model(tokens)
    for plain, other in zip(seen[:2], seen[2:], strict=True):
        torch.testing.assert_close(other, plain)


@torch.no_grad()
def test_other_threads_and_later_forwards_run_the_model_as_it_is(monkeypatch):
    model, calls = tiny_target("llama", num_hidden_layers=1), []
    tokens = torch.arange(3, 6)[None]
    plain = model(tokens).logits
    modules, found = fused_modules(model), []
    monkeypatch.setattr(fused_layers, "add_norm", lambda hidden, *args: (calls.append(1), hidden * 0)[1])
    with fused(modules):
        thread = threading.Thread(target=lambda: found.append(model(tokens).logits))
        thread.start(), thread.join()
        assert modules and not calls
        assert not torch.equal(model(tokens).logits, plain) and calls
    assert torch.equal(found[0], plain) and torch.equal(model(tokens).logits, plain)
    assert not any("forward" in vars(module) for module in model.modules())
