"""The reference against a double loop in Python floats."""

import pytest
import torch

from hf_longspec.attention_backends.lengths import SeqLens
from tests.attention_backends import reference
from tests.attention_backends.oracle import LSE_ERROR, double, double_loop, tensors

FLOAT64 = torch.float64


def check(method, inputs, options, visible, bias=None, **more):
    """Compare with a loop over the keys of `inputs` that are `visible` `(B, 1 or H, N, S)`."""
    query, key, value, *rest = inputs
    visible = visible.expand(-1, query.shape[1], -1, -1)
    expected = double_loop(query, key, value, visible, bias=bias, **options)
    hidden = ~visible.unflatten(1, (key.shape[1], -1)).any(2).any(2)[..., None]
    key, value = key.masked_fill(hidden, torch.nan), value.masked_fill(hidden, torch.nan)
    state = getattr(reference, f"{method}_attention")(query, key, value, *rest, **options, **more)
    for actual, exact in zip(state, expected, strict=True):
        assert actual.dtype == FLOAT64
        torch.testing.assert_close(actual, exact, rtol=1e-12, atol=1e-12)
    hidden = ~visible.any(-1)
    assert (state[1][hidden] == -torch.inf).all() and not state[0][hidden].any()


@pytest.mark.parametrize(("window", "softcap"), [(None, 2.0), (1, None), (3, 2.0), (100, None)])
def test_prefix(window, softcap):
    lengths = torch.tensor([0, 7, 4])
    positions = lengths[:, None] + torch.tensor([[0, 1, 2], [0, 1, 1], [-1, 0, 3]])
    slots = torch.arange(7)
    visible = (slots < lengths[:, None, None]) & (positions[..., None] - slots < (window or 1000))
    inputs = *tensors(3, 2, 2, 3, 7, 5, FLOAT64, 4), SeqLens(lengths.tolist())
    where = {"positions": positions, "sliding_window": window}
    check("prefix", inputs, {"scaling": 0.7, "softcap": softcap}, visible[:, None], **where)


@pytest.mark.parametrize("shape", ["BNM", "B1NM", "BHNM", -torch.inf, torch.finfo(FLOAT64).min])
def test_tree(shape):
    """Under a boolean mask, and under one that is added and hides by a number."""
    bias = torch.randn(2, 6 if shape == "BHNM" else 1, 4, 4, generator=torch.Generator().manual_seed(1), dtype=FLOAT64)
    visible = bias < 0.5
    visible[1, :, 2] = False  # sees nothing
    mask = visible[:, 0] if shape == "BNM" else visible if isinstance(shape, str) else bias.masked_fill(~visible, shape)
    added = None if isinstance(shape, str) else bias
    check("tree", (*tensors(2, 2, 3, 4, 4, 3, FLOAT64), mask), {"scaling": 1.3}, visible, added)


@pytest.mark.parametrize("per_head", [True, False])
def test_sparse(per_head):
    counts, generator = torch.tensor([5, 2]), torch.Generator().manual_seed(1)
    picks = [torch.randperm(9, generator=generator)[:5] for _ in range(4 if per_head else 2)]
    indices = torch.stack(picks).view(2, -1, 5)
    visible = torch.zeros(2, 4, 2, 9, dtype=torch.bool)
    for b in range(2):
        for h in range(4):
            visible[b, h, :, indices[b, h // 2 if per_head else 0, : counts[b]]] = True
    check("sparse", (*tensors(2, 2, 2, 2, 9, 3, FLOAT64), indices, counts), {"scaling": 0.6}, visible)


@pytest.mark.parametrize(("length", "window"), [(5, None), (8, 1), (8, 3)])
def test_causal(length, window):
    distance = torch.arange(length - 5, length)[:, None] - torch.arange(length)
    visible = ((distance >= 0) & (distance < (window or 1000))).expand(2, 1, -1, -1)
    options = {"scaling": 0.6, "softcap": 3.0}
    check("causal", tensors(2, 1, 2, 5, length, 3, FLOAT64), options, visible, sliding_window=window)


def test_half_precision_is_computed_in_float32():
    inputs = tensors(1, 1, 2, 3, 50, 8, torch.bfloat16)
    out, lse = reference.prefix_attention(*inputs, SeqLens([50]), scaling=0.4)
    exact, exact_lse = reference.prefix_attention(*double(*inputs), SeqLens([50]), scaling=0.4)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(out, exact.to(torch.bfloat16), rtol=2**-8, atol=0.0)  # rounded once
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0.0, atol=LSE_ERROR)
