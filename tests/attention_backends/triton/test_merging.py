"""Tiles whose last program merges the parts of its rows (`TileConfig.merges`), against the reference in float64.

The interpreter runs one program after another, by default the last part last. It shows that every program counts, that
any of them can be the last, and that a launch leaves the counters as it found them. It cannot show that a program sees
what others have written at the same time: test_compiled.py reads the order of stores, barrier and addition in the
compiler's output, and only a GPU shows the rest.
"""

from importlib import import_module

import pytest
import torch

from hf_longspec.attention_backends.triton import config, launch
from hf_longspec.attention_backends.triton.backend import TRITON_BACKEND
from tests.attention_backends.oracle import (
    assert_within_budget,
    attended,
    computed,
    expected_tree,
    prefix_case,
    tree_case,
)
from tests.attention_backends.triton.machine import counted, on

FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
# Two orders of summation of the same parts, in float32 and of numbers around 1.
MERGE_ERROR = 2e-6


@pytest.fixture
def launches(monkeypatch, small_tiles, poisoned_memory):
    """Small tiles that merge, in memory that is NaN at first; yields the launches of both kernels."""
    for name in ("hybrid_config", "tree_config"):
        choose = getattr(launch, name)
        monkeypatch.setattr(launch, name, lambda *args, choose=choose: choose(*args)._replace(merges=True))
    monkeypatch.setattr(launch, "_kept_zeros", {})
    monkeypatch.setattr(launch, "MERGE_PARTS", 2)
    found = []
    for name in ("attention_kernel", "combine_kernel"):
        monkeypatch.setattr(launch, name, counted(getattr(launch, name), found))
    return found


def backwards(monkeypatch):
    """Let the interpreter run the parts from the last to the first: part 0, the tree, merges."""
    if not config.INTERPRETED:
        pytest.skip("a GPU chooses the order")
    builder, parts = import_module("triton.runtime.interpreter").interpreter_builder, []
    place = builder.set_grid_idx

    def reversed_place(x, y, z):
        parts.append(builder.grid_dim[2] - 1 - z)
        place(x, y, parts[-1])

    monkeypatch.setattr(builder, "set_grid_idx", reversed_place)
    return parts


@pytest.mark.parametrize(
    ("lengths", "nodes", "kv_heads", "groups", "size", "dtype", "window", "softcap", "with_sinks"),
    [
        pytest.param((0, 1, 150), 5, 2, 3, 16, FLOAT32, None, None, False, id="empty_and_ragged"),
        pytest.param((201, 77), 9, 1, 7, 24, FLOAT16, None, 3.0, True, id="two_tiles_and_sinks"),
        pytest.param((190,), 17, 2, 4, 16, BFLOAT16, 50, None, True, id="window"),
    ],
)
@pytest.mark.parametrize("order", ["forwards", "backwards"])
def test_the_last_program_merges(
    kernel_device,
    launches,
    monkeypatch,
    order,
    lengths,
    nodes,
    kv_heads,
    groups,
    size,
    dtype,
    window,
    softcap,
    with_sinks,
):
    """Whichever part ends last; programs without keys count, too. One launch."""
    context, query, key, value = tree_case(lengths, nodes, kv_heads, groups, size, size, dtype)
    sinks = torch.linspace(-2.0, 3.0, kv_heads * groups) if with_sinks else None
    exact, plain = expected_tree(context, query, key, value, window, softcap, sinks)
    order = backwards(monkeypatch) if order == "backwards" else []
    options = {"sliding_window": window, "softcap": softcap, "sinks": sinks}
    state = attended(context, TRITON_BACKEND, query, key, value, kernel_device, **options)
    assert_within_budget(state, exact, plain)
    [(constants, grid)] = launches
    assert constants["MERGE_PARTS"] > 0 and grid[2] > 2
    assert not order or order[-1] == 0
    assert state[0].transpose(1, 2).is_contiguous()


def test_a_replay_merges_again(kernel_device, launches):
    """The counters are those of the launch before, as in a graph, and 0 after every launch."""
    query, key, value, lengths, options, exact, plain = prefix_case(3, 2, 16, (200, 33), None, FLOAT32)
    inputs = query, key, value, lengths
    results = [computed(TRITON_BACKEND, "prefix", inputs, options, kernel_device) for _ in range(3)]
    assert launch._kept_zeros and not any(zeros.any() for zeros in launch._kept_zeros.values())
    for state in results:
        assert_within_budget(state, exact, plain)
        assert all(torch.equal(one, other) for one, other in zip(state, results[0], strict=True))
    assert [constants["MERGE_PARTS"] for constants, _ in launches] == [2] * 3


def test_a_tree_alone(kernel_device, launches):
    """One part: the only program is the last."""
    context, query, key, value = tree_case((0,), 13, 2, 3)
    key, value = key[:, :, :13], value[:, :, :13]
    exact, plain = expected_tree(context, query, key, value, None, None, None)
    inputs = on(kernel_device, query, key, value, context.mask)
    assert_within_budget(on("cpu", *TRITON_BACKEND.tree_attention(*inputs, scaling=0.3)), exact, plain)
    assert len(launches) == 1


def test_scores_are_the_same(kernel_device, launches, monkeypatch):
    """Attention weights are computed from the merged log-sum-exp."""
    query, key, value, lengths, options, _, _ = prefix_case(4, 2, 16, (130, 61), None, FLOAT32)
    inputs = query, key, value, lengths, torch.tensor([3, 1])
    options |= {"weights": True, "per_layer": True}
    merged = computed(TRITON_BACKEND, "scored", inputs, options, kernel_device)
    assert len(launches) == 1
    choose = launch.hybrid_config
    monkeypatch.setattr(launch, "hybrid_config", lambda *args: choose(*args)._replace(merges=False))
    apart = computed(TRITON_BACKEND, "scored", inputs, options, kernel_device)
    assert len(launches) == 3
    for one, other in zip(merged[:2], apart[:2], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=MERGE_ERROR)
    for b, length in enumerate(lengths.host):
        torch.testing.assert_close(merged[2][b, :, :length], apart[2][b, :, :length], rtol=1e-5, atol=MERGE_ERROR)


def test_graphs_share_zeros_that_were_allocated_outside_of_them(monkeypatch):
    """What a graph allocates lies in its memory, and is filled in its replays alone."""
    monkeypatch.setattr(launch, "_kept_zeros", {})
    stream, capturing = type("Stream", (), {"cuda_stream": 7})(), True
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *args, device, **options: zeros(*args, **options))
    device = torch.device("cuda")
    assert launch._zeros(5, device) is not launch._zeros(5, device)
    capturing = False
    first = launch._zeros(5, device)
    assert first.numel() == launch.FEWEST_ZEROS and launch._zeros(900, device) is first
    assert launch._zeros(1025, device).numel() == 2048
    assert launch._zeros(5, device) is first  # a graph may hold its address
    capturing = True
    of_graphs = launch._zeros(3, device)
    stream.cuda_stream = 8  # a capture has a stream of its own
    assert launch._zeros(5, device) is of_graphs is not first
    capturing = False
    assert launch._zeros(5, device) is not first and launch._zeros(5, device) is not of_graphs
