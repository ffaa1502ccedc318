"""Floors against figures worked out by hand, and the weights that are counted against those of models."""

from functools import cache

import pytest

from benchmarks.random_inputs import Shape
from benchmarks.roofline import Machine, Roofline, main, shape_from_config, shape_of
from tests.tiny_targets import tiny_target

H200 = Machine("H200", 4.3, 790, 141)
# The expected figures below were computed by hand with two decimals and taken over rounded: half of the last one.
ROUNDED = 0.0051
# batch, context: a step, 69 nodes, 69 nodes with attention at 400 TFLOP/s; then LongSpec's c with 5 and 4 levels,
# SpecAttn's with gamma 6 and 9, in milliseconds and as ratios
LLAMA = {
    (1, 8192): (3.74, 3.87, 4.23, 0.65, 0.72, 0.151, 0.106),
    (1, 32768): (4.49, 4.99, 6.45, 0.65, 0.74, 0.174, 0.123),
    (1, 131072): (7.49, 9.49, 15.34, 0.63, 0.79, 0.249, 0.181),
    (4, 131072): (19.47, 29.25, 52.66, 0.58, 0.85, 0.413, 0.319),
    (8, 32768): (11.48, 22.49, 34.20, 0.45, 0.82, 0.321, 0.240),
}


shape_named = cache(shape_of)


def at(place, **options):
    return Roofline(shape_named("Llama-3.1-8B"), H200, *place, **options)


@pytest.mark.parametrize("place", LLAMA, ids=str)
def test_figures_worked_out_by_hand(place):
    step, ideal, slow, five, four, six, nine = LLAMA[place]
    found = at(place)
    assert found.ar_ms == pytest.approx(step, abs=ROUNDED)
    assert found.verify_ms(17) == found.ar_ms
    assert found.verify_ms(69) == pytest.approx(ideal, abs=ROUNDED)
    assert at(place, attention_tflops=400).verify_ms(69) == pytest.approx(slow, abs=ROUNDED)
    assert found.longspec([4, 16, 16, 16, 16]).c == pytest.approx(five, abs=ROUNDED)
    assert found.longspec([4, 4, 4, 3]).c == pytest.approx(four, abs=ROUNDED)
    assert found.specattn(6, 0.07).c == pytest.approx(six, abs=ROUNDED / 10)
    assert found.specattn(9, 0.07).c == pytest.approx(nine, abs=ROUNDED / 10)


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
    assert drafted.break_even_tau == pytest.approx(1 / drafted.c)
    heads = 2 * (8 * 8 + 0) * 2
    assert fast.tokenswift([1, 2, 2], budget=10).draft_ms == pytest.approx(heads + weights + kv / 10)
    assert fast.tokenswift([1, 2, 2], budget=None).draft_ms == pytest.approx(heads + 160)
    assert fast.tokenswift([1, 2, 2], budget=None).max_tau == 3
    block = (8 * 16 * 4 + 2 * 8 * 8 + 3 * 8 * 16 + 80) * 2
    assert fast.longspec([2, 2], window=20).draft_ms == pytest.approx(2 * (block + 3 * 120 * 32))


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "qwen3_moe", "gpt_oss", "mistral"])
def test_shape_of_any_configuration(name):
    model = tiny_target(name)
    shape = shape_from_config(model.config, name)
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    total = sum(p.numel() for p in model.parameters())
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    table = 0 if tied else 128 * 64
    assert shape.stored_weights == total and shape.expert_weights == experts
    assert shape.read_weights == total - experts - table
    assert bool(shape.experts) == (name in ("qwen3_moe", "gpt_oss"))
    layers = model.config.num_hidden_layers
    sliding = {"gemma2": 1, "gpt_oss": 1, "mistral": 2}.get(name, 0)
    assert shape.visible(100) == (layers - sliding) * 100 + sliding * 16


def test_command_line(tmp_path, capsys):
    tiny_target("llama").save_pretrained(tmp_path)
    small = ["--contexts", "64", "--batches", "1", "--nodes", "5"]
    main(["--target", str(tmp_path), *small, "--tbs", "1", "--tflops", "1"])
    text = capsys.readouterr().out
    assert "measured rates (1 TB/s, 1 TFLOP/s)" in text and "| 1 | 64 | SpecAttn gamma 6, 7% |" in text
    main(["--contexts", "8192,131072", "--batches", "8"])
    text = capsys.readouterr().out
    assert f"| 8 | 8192 | {at((8, 8192)).ar_ms:.2f} |" in text and "| 8 | 131072 (does not fit) |" in text
    assert f"| {at((8, 8192)).specattn(6, 0.07).c:.3f} |" in text
    with pytest.raises(SystemExit):
        main(["--tbs", "3"])
    assert "--tflops" in capsys.readouterr().err
