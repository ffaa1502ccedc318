"""Kernels of a decoder layer, in the interpreter, beside the modules and functions of transformers."""

import pytest
import torch
from torch.nn.functional import silu
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

pytest.importorskip("triton", reason="triton is not installed")
from hf_longspec.attention_backends.triton.layers import add_norm, rotate_and_write, silu_mul
from tests.attention_backends.triton.machine import DEVICE

# Sums in another order, and other exponential functions; the interpreter truncates where a GPU rounds to bfloat16.
STEPS = {torch.float32: 4, torch.float16: 1, torch.bfloat16: 2}
DTYPES = pytest.mark.parametrize("dtype", list(STEPS), ids=str)


def numbers(*shape, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


def assert_close(found, expected):
    """Equal up to some rounding steps of the largest number."""
    assert found.dtype == expected.dtype
    step = torch.finfo(expected.dtype).eps * expected.float().abs().max().item()
    torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=STEPS[expected.dtype] * step)


@DTYPES
@pytest.mark.parametrize("has_residual", [True, False])
@torch.no_grad()
def test_norm(dtype, has_residual):
    norm = LlamaRMSNorm(83, eps=1e-2).to(DEVICE, dtype)
    norm.weight.copy_(numbers(83, dtype=dtype))
    hidden, residual = numbers(2, 5, 83, dtype=dtype) / 7, numbers(2, 5, 83, dtype=dtype)
    normed, total = add_norm(hidden, residual if has_residual else None, norm.weight, 1e-2)
    expected = hidden + residual if has_residual else hidden
    assert_close(total, expected)
    assert_close(normed, norm(expected))
    assert (total is hidden) != has_residual


@DTYPES
def test_activation(dtype):
    gate, up = 9 * numbers(3, 7, 211, dtype=dtype), numbers(3, 211, 7, dtype=dtype).transpose(1, 2)
    assert_close(silu_mul(gate, up), silu(gate) * up)


@DTYPES
@pytest.mark.parametrize("is_ragged", [True, False])
def test_rotation_and_write(dtype, is_ragged):
    """Buffers are parts of larger ones; a batch shares its factors or not; other slots stay as they are."""
    size, value_size, nodes = 26, 17, 5
    query, key = numbers(3, nodes, 6, size, dtype=dtype), numbers(3, nodes, 2, size, dtype=dtype)
    value = numbers(3, nodes, 2, value_size, dtype=dtype)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    angles = numbers(3 if is_ragged else 1, nodes, size // 2, dtype=torch.float32).repeat(1, 1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    slots = torch.tensor([[4, 6, 5, 0, 9], [1, 2, 3, 8, 4], [0, 1, 2, 3, 4]] if is_ragged else [3, 4, 8, 6, 2])
    keys, values = numbers(3, 2, 12, size + 4, dtype=dtype)[..., :size], numbers(3, 2, 12, value_size, dtype=dtype)
    rotated, rotated_key = apply_rotary_pos_emb(query, key, cos, sin)
    expected = keys.clone(), values.clone()
    for row in range(3):
        at = slots[row] if is_ragged else slots
        expected[0][row, :, at], expected[1][row, :, at] = rotated_key[row], value[row]
    source = key.clone()
    rotate_and_write(query, key, value, cos, sin, keys, values, slots.to(DEVICE))
    for found, right in zip((query, keys), (rotated, expected[0]), strict=True):
        assert_close(found, right)
    assert torch.equal(values, expected[1]) and torch.equal(key, source)
