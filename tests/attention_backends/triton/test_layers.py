"""Kernels of a decoder layer, in the interpreter, beside the modules and functions of transformers."""

from importlib import import_module

import pytest
import torch
from torch.nn.functional import gelu, silu

pytest.importorskip("triton", reason="triton is not installed")
from hf_longspec.attention_backends.triton.layers import NORM_FORMS, ROTARY_FORMS, add_norm, delta_rule, gated, rotate
from tests.attention_backends.triton.machine import DEVICE
from tests.pairwise import few

# Sums in another order, and other exponential functions; the interpreter truncates where a GPU rounds to bfloat16.
STEPS = {torch.float32: 4, torch.float16: 1, torch.bfloat16: 2}
DTYPES = pytest.mark.parametrize("dtype", list(STEPS), ids=str)
ACTIVATIONS = {"silu": silu, "sigmoid": torch.sigmoid, "gelu": gelu, "gelu_tanh": lambda x: gelu(x, approximate="tanh")}
SIZE = 26  # of a query and a key


def of(model, name):
    """A class or a function of a model's Python module."""
    return getattr(import_module(f"transformers.models.{model}.modeling_{model}"), name)


def numbers(*shape, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


def assert_close(found, expected):
    """Equal up to some rounding steps of the largest number."""
    assert found.dtype == expected.dtype
    step = torch.finfo(expected.dtype).eps * expected.float().abs().max().item()
    torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=STEPS[expected.dtype] * step)


@DTYPES
@pytest.mark.parametrize("rows", ["with a residual", "contiguous", "transposed", "parts"])
@pytest.mark.parametrize("form", list(zip(NORM_FORMS, ("Llama", "Olmo2", "Gemma2"), strict=True)), ids=str)
@torch.no_grad()
def test_norm(dtype, rows, form):
    form, name = form
    norm = of(name.lower(), f"{name}RMSNorm")(83, eps=1e-2).to(DEVICE, dtype)
    norm.weight.copy_(numbers(83, dtype=dtype))
    hidden = numbers(2, 3, 2, 97, dtype=dtype)[..., :83] / 7
    if rows == "transposed":
        hidden = hidden.contiguous().transpose(1, 2)
    if rows != "with a residual":
        hidden = hidden.contiguous() if rows == "contiguous" else hidden
        assert_close(add_norm(hidden, norm.weight, 1e-2, form), norm(hidden))
        return
    hidden, residual = hidden.contiguous(), numbers(2, 3, 2, 83, dtype=dtype)
    total = torch.full_like(hidden, torch.nan)
    assert_close(add_norm(hidden, norm.weight, 1e-2, form, residual, total), norm(hidden + residual))
    assert_close(total, hidden + residual)


@DTYPES
@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_gated(dtype, name):
    """Two parts of one tensor, as where one product computes both, and rows of another order."""
    both = numbers(3, 7, 2 * 211, dtype=dtype)
    for gate, up in (both.chunk(2, -1), (9 * numbers(3, 7, 211, dtype=dtype), numbers(3, 211, 7, dtype=dtype).mT)):
        assert_close(gated(name, gate, up), ACTIVATIONS[name](gate) * up)


def rotary_case(form, dtype, rows, nodes):
    """The function of a model whose rotation has this form, and its factors in the model's dtype or in float32."""
    name, rotated, is_float32 = {
        ROTARY_FORMS[0]: ("phi3", SIZE - 8, False),
        ROTARY_FORMS[1]: ("glm4", SIZE - 8, False),
        ROTARY_FORMS[2]: ("cohere2", SIZE, True),
        ROTARY_FORMS[3]: ("gpt_oss", SIZE, False),
    }[form]
    angles = numbers(rows, nodes, rotated // 2, dtype=torch.float32)
    if form.step == 2:
        angles = angles.repeat_interleave(2, -1)
    elif form.numbers == 1:
        angles = angles.repeat(1, 1, 2)
    factors = torch.float32 if is_float32 else dtype
    return of(name, "apply_rotary_pos_emb"), angles.cos().to(factors), angles.sin().to(factors)


@DTYPES
@pytest.mark.parametrize("is_ragged", [True, False])
@pytest.mark.parametrize("form", few(ROTARY_FORMS, 3), ids=str)
def test_rotation_and_write(dtype, is_ragged, form):
    """Buffers are parts of larger ones; rows and nodes share their factors or not; other slots stay as they are."""
    value_size, nodes = 17, 3
    query, key = numbers(2, nodes, 3, SIZE, dtype=dtype), numbers(2, nodes, 1, SIZE, dtype=dtype)
    value = numbers(2, nodes, 1, value_size, dtype=dtype)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    function, cos, sin = rotary_case(form, dtype, 2 if is_ragged else 1, nodes if is_ragged else 1)
    slots = torch.tensor([[4, 6, 0], [1, 2, 8]] if is_ragged else [3, 8, 6])
    keys, values = numbers(2, 1, 9, SIZE + 4, dtype=dtype)[..., :SIZE], numbers(2, 1, 9, value_size, dtype=dtype)
    rotated, rotated_key = function(query, key, cos, sin)
    expected = keys.clone(), values.clone()
    for row in range(2):
        at = slots[row] if is_ragged else slots
        expected[0][row, :, at], expected[1][row, :, at] = rotated_key[row], value[row]
    sources = query.clone(), key.clone()
    found, alone = torch.empty_like(query), torch.empty_like(key)
    rotate(query, key, cos, sin, form, found, keys, (value, values, slots.to(DEVICE)))
    assert_close(found, rotated)
    assert_close(keys, expected[0])
    assert torch.equal(values, expected[1])
    rotate(query, key, cos, sin, form, found, alone)
    assert_close(found, rotated)
    assert_close(alone, rotated_key)
    assert torch.equal(query, sources[0]) and torch.equal(key, sources[1])


def delta_rule_in_float64(state, query, key, value, decay, beta, epsilon):
    """Outputs and state after one node, term by term: the state fades, and its error at the key is corrected."""
    query, key, value, decay, beta = (x[:, 0].double() for x in (query, key, value, decay, beta))
    query, key = (x.repeat_interleave(value.shape[1] // x.shape[1], 1) for x in (query, key))
    if epsilon is not None:
        query, key = (x / (x.square().sum(-1, keepdim=True) + epsilon).sqrt() for x in (query, key))
    faded = state.double() * decay.exp().reshape(*decay.shape[:2], -1, 1)
    error = value - torch.einsum("bhk,bhkv->bhv", key, faded)
    last = faded + torch.einsum("bh,bhk,bhv->bhkv", beta, key, error)
    return torch.einsum("bhk,bhkv->bhv", query, last)[:, None] / query.shape[-1] ** 0.5, last


@DTYPES
@pytest.mark.parametrize(("has_channels", "epsilon"), [(False, 1e-2), (True, None)])
def test_delta_rule(dtype, has_channels, epsilon):
    """Three rows, groups of three heads, two blocks of a value; views as mixers have them. The state is only read."""
    rows, heads, groups, size, width = 3, 6, 3, 20, 131
    sizes = (size * heads // groups, size * heads // groups, width * heads)
    mixed = numbers(rows, sum(sizes), 5, dtype=dtype)[..., -1:].transpose(1, 2).split(sizes, -1)
    query, key, value = (x.reshape(rows, 1, -1, n) for x, n in zip(mixed, (size, size, width), strict=True))
    state = numbers(rows, 2 * heads, size, width, dtype=torch.float32)[:, heads:]
    decay = -numbers(rows, 1, heads, size, dtype=torch.float32).abs()
    decay, beta = decay if has_channels else decay[..., 7], numbers(rows, 1, 2 * heads, dtype=dtype).sigmoid()[..., ::2]
    before = state.clone()
    found, last = delta_rule(state, query, key, value, decay, beta, epsilon)
    expected, expected_last = delta_rule_in_float64(before, query, key, value, decay, beta, epsilon)
    assert_close(found, expected.to(dtype))
    assert_close(last, expected_last.float())
    assert torch.equal(state, before)
