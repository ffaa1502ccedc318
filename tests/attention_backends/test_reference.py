"""The reference against a double loop in Python floats."""

import pytest
import torch

from hf_longspec.attention_backends.lengths import SeqLens
from tests.attention_backends import reference
from tests.attention_backends.oracle import LSE_ERROR, double_loop


def tensors(batch, heads, kv_heads, nodes, slots, size, value_size=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, heads, nodes, size), (batch, kv_heads, slots, size), (batch, kv_heads, slots, value_size or size))
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


def assert_same(state, expected):
    for actual, exact in zip(state, expected, strict=True):
        assert actual.dtype == torch.float64
        torch.testing.assert_close(actual, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_prefix(window, softcap):
    query, key, value = tensors(3, 4, 2, 3, 7, 5, value_size=4)
    lengths, depths = torch.tensor([0, 7, 4]), torch.tensor([[0, 1, 2], [0, 1, 1], [-1, 0, 3]])
    positions = lengths[:, None] + depths
    visible = torch.zeros(3, 4, 3, 7, dtype=torch.bool)
    for b in range(3):
        for n in range(3):
            for j in range(int(lengths[b])):
                visible[b, :, n, j] = window is None or int(positions[b, n]) - j < window
    expected = double_loop(query, key, value, visible, scaling=0.7, softcap=softcap)
    for b, length in enumerate(lengths.tolist()):
        key[b, :, length:] = torch.nan
        value[b, :, length:] = torch.nan
    options = {"positions": positions, "sliding_window": window, "softcap": softcap}
    assert_same(
        reference.prefix_attention(query, key, value, SeqLens(lengths.tolist()), scaling=0.7, **options), expected
    )


@pytest.mark.parametrize("shape", ["BNM", "B1NM", "BHNM"])
def test_tree_with_a_boolean_mask(shape):
    query, key, value = tensors(2, 6, 2, 4, 4, 3)
    visible = torch.rand(2, 6 if shape == "BHNM" else 1, 4, 4, generator=torch.Generator().manual_seed(1)) < 0.4
    visible[1, :, 2] = False  # sees nothing
    expected = double_loop(query, key, value, visible.expand(-1, 6, -1, -1), scaling=1.3)
    mask = visible[:, 0] if shape == "BNM" else visible
    assert_same(reference.tree_attention(query, key, value, mask, scaling=1.3), expected)
    assert (expected[1][1, 0, 2], expected[0][1, 0, 2].any()) == (-torch.inf, False)


@pytest.mark.parametrize("lowest", [-torch.inf, torch.finfo(torch.float64).min])
def test_tree_with_an_additive_mask(lowest):
    query, key, value = tensors(2, 2, 2, 3, 5, 3)
    bias = torch.randn(2, 1, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    visible = bias < 0.5
    visible[0, :, 1] = False
    expected = double_loop(query, key, value, visible.expand(-1, 2, -1, -1), scaling=0.5, bias=bias)
    assert_same(reference.tree_attention(query, key, value, bias.masked_fill(~visible, lowest), scaling=0.5), expected)


@pytest.mark.parametrize("per_head", [True, False])
def test_sparse(per_head):
    query, key, value = tensors(2, 4, 2, 2, 9, 3)
    generator = torch.Generator().manual_seed(1)
    kv_heads = 2 if per_head else 1
    indices = torch.stack([torch.randperm(9, generator=generator)[:5] for _ in range(2 * kv_heads)]).view(
        2, kv_heads, 5
    )
    counts = torch.tensor([5, 2])
    visible = torch.zeros(2, 4, 2, 9, dtype=torch.bool)
    for b in range(2):
        for h in range(4):
            visible[b, h, :, indices[b, h // 2 if per_head else 0, : counts[b]]] = True
    expected = double_loop(query, key, value, visible, scaling=0.6)
    assert_same(reference.sparse_attention(query, key, value, indices, counts, scaling=0.6), expected)


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("length", [5, 8])
def test_causal(length, window):
    query, key, value = tensors(2, 2, 1, 5, length, 3)
    visible = torch.zeros(2, 2, 5, length, dtype=torch.bool)
    for n in range(5):
        position = length - 5 + n
        visible[:, :, n, 0 if window is None else max(0, position - window + 1) : position + 1] = True
    expected = double_loop(query, key, value, visible, scaling=0.6, softcap=3.0)
    state = reference.causal_attention(query, key, value, scaling=0.6, sliding_window=window, softcap=3.0)
    assert_same(state, expected)


def test_half_precision_is_computed_in_float32():
    query, key, value = (x.to(torch.bfloat16) for x in tensors(1, 2, 1, 3, 50, 8))
    out, lse = reference.prefix_attention(query, key, value, SeqLens([50]), scaling=0.4)
    double = (x.double() for x in (query, key, value))
    exact, exact_lse = reference.prefix_attention(*double, SeqLens([50]), scaling=0.4)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(out, exact.to(torch.bfloat16), rtol=2**-8, atol=0.0)  # rounded once
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0.0, atol=LSE_ERROR)
