"""Attention over whole texts against a loop over queries, gradients included."""

import pytest
import torch

from hf_longspec.modeling.longspec.modeling_longspec import shifted_attention, windowed_attention

HEADS, KV_HEADS, SIZE = 4, 2, 8
# float32 sums of up to 40 terms in another order
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def tensors(length, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads, length, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def looped(query, key, value, visible):
    """`visible(row, place)` lists the places that a query sees."""
    out = torch.zeros_like(query)
    for row in range(query.shape[0]):
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            for place in range(query.shape[2]):
                if seen := visible(row, place):
                    scores = key[row, group, seen] @ query[row, head, place] / SIZE**0.5
                    out[row, head, place] = scores.softmax(0) @ value[row, group, seen]
    return out


def check(function, visible, states):
    expected = looped(*states, visible)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    wanted = torch.autograd.grad((expected * weights).sum(), states)
    found = function(*states)
    torch.testing.assert_close(found, expected, **CLOSE)
    for gradient, reference in zip(torch.autograd.grad((found * weights).sum(), states), wanted, strict=True):
        torch.testing.assert_close(gradient, reference, **CLOSE)


@pytest.mark.parametrize("length", [1, 6, 7, 8, 14, 29])
def test_windowed(length):
    window = 7
    check(
        lambda *states: windowed_attention(*states, window),
        lambda row, place: list(range(max(0, place - window + 1), place + 1)),
        tensors(length),
    )


@pytest.mark.parametrize("gaps", [[1, 1], [1, 5], [4, 2], [0, 13], [40, 3]])
def test_shifted(gaps):
    check(
        lambda *states: shifted_attention(*states, gaps),
        lambda row, place: list(range(place - gaps[row] + 1)),
        tensors(13),
    )
