"""Floors against figures worked out by hand, and the weights that are counted against those of models."""

import pytest

from benchmarks.random_inputs import Shape
from benchmarks.roofline import Machine, Roofline, shape_from_config


def test_a_tiny_model_by_hand():
    # 2 layers, width 8, 4 heads of 4 over 2 kv heads, feed-forward 16, vocabulary 10
    sizes = Shape(layers=2, hidden=8, intermediate=16, heads=4, kv_heads=2, head_dim=4, vocab=10)
    shape = shape_from_config(sizes.config(1), "tiny")
    layer = 8 * 16 + 8 * 8 + 8 * 8 + 16 * 8 + 3 * 8 * 16 + 2 * 8
    assert shape.read_weights == 2 * layer + 8 + 80
    machine = Machine("slow", 1e-9, 1e-9)  # a thousand bytes, a thousand operations per second
    found = Roofline(shape, machine, 3, 100)
    weights = (2 * layer + 88) * 2
    kv = 3 * 100 * (2 * 2 * 2 * 4) * 2
    # one token per row, three rows: 6 operations per weight against 2 bytes
    assert found.weights_ms(3) == pytest.approx(3 * weights)
    assert found.weights_ms(1) == pytest.approx(weights)
    # a query head: 4 * 4 operations per entry, 4 heads; keys and values 32 bytes per entry and layer
    assert found.attention_ms(1) == pytest.approx(max(kv, 3 * 100 * 2 * 4 * 16))
    fast = Roofline(shape, Machine("wide", 1e-9, 1.0), 3, 100)
    assert fast.ar_ms == pytest.approx(weights + kv)
    drafted = fast.specattn(2, 0.5)
    assert drafted.draft_ms == pytest.approx(2 * (weights + kv / 2))
    assert drafted.c == pytest.approx((weights + kv) / (3 * weights + 2 * kv))
    # the head of 80 in two bytes, the rest in half a byte and four bytes for 64 weights
    cheap = 2 * layer * (0.5 + 4 / 64) + 8 * (0.5 + 4 / 64) + 80 * 2
    assert fast.specattn(2, 0.5, "int4").draft_ms == pytest.approx(2 * (cheap + kv / 2))
    assert drafted.break_even_tau == pytest.approx(1 / drafted.c)
    heads = 2 * (8 * 8 + 0) * 2
    assert fast.tokenswift([1, 2, 2], budget=10).draft_ms == pytest.approx(heads + weights + kv / 10)
    assert fast.tokenswift([1, 2, 2], budget=None).draft_ms == pytest.approx(heads + 160)
    assert fast.tokenswift([1, 2, 2], budget=None).max_tau == 3
    block = (8 * 16 * 4 + 2 * 8 * 8 + 3 * 8 * 16 + 80) * 2
    assert fast.longspec([2, 2], window=20).draft_ms == pytest.approx(2 * (block + 3 * 120 * 32))
