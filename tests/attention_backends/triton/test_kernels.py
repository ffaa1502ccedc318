"""The Triton kernels beyond their parity with other backends (test_parity.py): what they read, merge and launch, and
their tiles: plain functions against counting, and every shipped tile against the reference in float64.

Interpreted on a CPU, compiled on a GPU.
"""

import math

import pytest
import torch

from hf_longspec.attention_backends.lengths import SeqLens
from hf_longspec.attention_backends.registry import merge_attention_states
from hf_longspec.attention_backends.triton import backend, launch
from hf_longspec.attention_backends.triton.backend import TRITON_BACKEND
from hf_longspec.attention_backends.triton.config import Gpu, hybrid_config, most_splits
from tests.attention_backends.oracle import (
    SCALING,
    assert_within_budget,
    attended,
    computed,
    expected_tree,
    prefix_case,
    tree_case,
)
from tests.attention_backends.triton.machine import counted, on
from tests.pairwise import few

HOPPER, SMALLEST = Gpu(227 * 1024, True), Gpu(99 * 1024, False)
FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16


@pytest.fixture
def small(small_tiles, poisoned_memory):
    """Small tiles, and memory that is NaN at first."""


def test_the_result_does_not_depend_on_the_capacity(kernel_device, small, monkeypatch):
    """A split follows from the row's own prefix: more room, other rows or a longer one beside it change no bit."""
    monkeypatch.setattr(launch, "wanted_splits", lambda *args: 2)
    query, key, value, lengths, options, _, _ = prefix_case(3, 2, 16, (400, 170), None, FLOAT32)
    both = computed(TRITON_BACKEND, "prefix", (query, key, value, lengths), options, kernel_device)
    short = query[[1, 1]], key[[1, 1], :, :170], value[[1, 1], :, :170], SeqLens([170, 170])
    same = computed(TRITON_BACKEND, "prefix", short, {"scaling": options["scaling"]}, kernel_device)
    assert all(torch.equal(one[1], other[1]) for one, other in zip(both, same, strict=True))


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 70])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_combine(kernel_device, small, monkeypatch, parts, with_sinks):
    """Any number of parts, some of them empty and their outputs NaN, against the merge in float64."""
    if parts == 70:  # as it is shipped
        monkeypatch.undo()
        assert (launch.BLOCK_STATES, launch.BLOCK_PARTS) == (1, 64)
    generator = torch.Generator().manual_seed(parts)
    out = torch.randn(2, 4, 3, parts, 12, generator=generator)
    lse = 10 * torch.randn(2, 4, 3, parts, generator=generator)
    lse[torch.rand(lse.shape, generator=generator) < 0.4] = -torch.inf
    lse[0, 0, 0] = -torch.inf
    empty = lse == -torch.inf
    sinks = torch.linspace(-9.0, 9.0, 4) if with_sinks else None
    states = [(out[..., p, :].double().masked_fill(empty[..., p, None], 0), lse[..., p].double()) for p in range(parts)]
    exact = merge_attention_states(states, None if sinks is None else sinks.double())
    partial = torch.cat([out.masked_fill(empty[..., None], torch.nan).flatten(), (lse / math.log(2.0)).flatten()])
    merge = launch.merge_of(out.shape, with_sinks, launch.BLOCK_STATES, launch.BLOCK_PARTS)
    assert merge.partial == partial.numel()
    state = on("cpu", *launch.launch_merge(merge, *on(kernel_device, partial, out[:, :, 0], sinks)))
    torch.testing.assert_close(state[0].double(), exact[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(state[1].double(), exact[1], rtol=1e-6, atol=1e-5)
    assert state[0].transpose(1, 2).is_contiguous()


def test_hybrid_is_one_operator_and_reads_lengths_on_the_device(kernel_device, small, monkeypatch):
    """Wrong host lengths change nothing, as they must not under a CUDA graph."""
    context, query, key, value = tree_case((70, 33), 5)
    exact, plain = expected_tree(context, query, key, value, None, None, None)
    calls, op = [], backend.hybrid_op
    monkeypatch.setattr(backend, "hybrid_op", lambda *args: calls.append(1) or op(*args))
    context = context.to(kernel_device)
    context.lengths = SeqLens([1, 1], context.lengths.on(kernel_device))
    inputs = on(kernel_device, query, key, value)
    out = context.attend(TRITON_BACKEND, 0, *inputs, scaling=SCALING)
    assert calls == [1]
    assert_within_budget((out.cpu(), exact[1].float()), exact, plain)


def test_offsets_beyond_32_bits(kernel_device, small):
    """Row 2 of a batch begins after 2^31 numbers. The memory is reserved, and only what is used is touched."""
    torch.use_deterministic_algorithms(False)  # poisoned_memory would fill all of it
    stride = 2**30 + 64
    try:
        memory = torch.empty(2 * stride + 2048, dtype=FLOAT16, device=kernel_device)
    except RuntimeError as error:
        pytest.skip(f"no address space: {error}")
    context, query, key, value = tree_case((20, 3, 9), 5, kv_heads=1, dtype=FLOAT16)
    exact, plain = expected_tree(context, query, key, value, None, None, None)
    view = {"size": key.shape, "stride": (stride, key[0, 0].numel(), 16, 1)}
    far = [memory.as_strided(**view, storage_offset=offset).copy_(x) for offset, x in ((0, key), (1024, value))]
    assert_within_budget(attended(context, TRITON_BACKEND, query, *far, kernel_device), exact, plain)


def splits_of(length, wanted, split_keys, block_keys):
    """The splits of a prefix, as (first, stop), by the rule in the kernel's docstring."""
    size = max(split_keys, length // (wanted * block_keys) * block_keys)
    return [(first, min(first + size, length)) for first in range(0, length, size)]


@pytest.mark.parametrize("wanted", [1, 2, 5, 32])
@pytest.mark.parametrize(("split_keys", "block_keys"), [(128, 64), (128, 32), (64, 32), (128, 128)])
def test_there_is_a_part_for_every_split(wanted, split_keys, block_keys):
    most = 0
    for length in range(0, 12 * wanted * block_keys, 7):
        splits = splits_of(length, wanted, split_keys, block_keys)
        assert sum(stop - first for first, stop in splits) == length
        most = max(most, len(splits))
        assert most <= most_splits(length, wanted, split_keys, block_keys)
    assert wanted <= most  # a long prefix has as many as were wanted, at least


@pytest.fixture
def hopper(monkeypatch, poisoned_memory):
    """The tiles of a Hopper GPU, wherever the kernels run, and two splits for a long prefix; few programs merge."""
    monkeypatch.setattr(launch, "gpu_of", lambda device: HOPPER)
    monkeypatch.setattr(launch, "wanted_splits", lambda *args: 2)
    monkeypatch.setattr(launch, "BLOCK_STATES", 64)


# Nodes and heads of a group, and so the tile: of 16, 32 and 64 rows, and two and three of 64.
TILES = [(1, 3), (3, 7), (16, 4), (31, 4), (33, 4)]


@pytest.mark.parametrize(
    ("nodes", "groups", "size"), few([*((*tile, 128) for tile in TILES), (31, 4, 64), (1, 3, 136), (16, 4, 136)], 4)
)
def test_every_tile_with_its_tree(kernel_device, hopper, monkeypatch, nodes, groups, size):
    """Ragged rows: none, a part of a block, and splits longer than the shortest. One launch and one merge."""
    lengths = (0, 37, 450) if nodes < 16 else (450, 33)
    context, query, key, value = tree_case(lengths, nodes, 1, groups, size, size, FLOAT16)
    exact, plain = expected_tree(context, query, key, value, None, None, None)
    launches = []
    for name in ("attention_kernel", "combine_kernel"):
        monkeypatch.setattr(launch, name, counted(getattr(launch, name), launches))
    assert_within_budget(attended(context, TRITON_BACKEND, query, key, value, kernel_device), exact, plain)
    (options, grid), (merging, _) = launches
    assert options["enable_fp_fusion"] and merging["enable_fp_fusion"]  # off by default from triton 3.10 on
    config = hybrid_config(nodes * groups, size, size, 2, HOPPER)
    assert (options["BLOCK_ROWS"], options["BLOCK_KEYS"]) == (config.block_rows, config.block_keys)
    splits = most_splits(key.shape[2], 2, config.split_keys, config.block_keys)
    tree = int(nodes > 1)  # a lone node is one more token of the prefix
    assert options["TREE"] == tree
    assert grid == (-(-nodes * groups // config.block_rows), len(lengths), tree + splits)


@pytest.mark.parametrize(("nodes", "groups"), TILES[1:4])
def test_every_tile_with_scores(kernel_device, hopper, nodes, groups):
    """With a window and a softcap; the scores of node 0 and of the last node by a plain product."""
    query, key, value, lengths, options, exact, plain = prefix_case(nodes, groups, 128, (270, 33), 150, FLOAT16, 3.0)
    last = torch.tensor([nodes - 1, nodes // 2])
    inputs, options = on(kernel_device, (query, key, value, lengths, last), options)
    *state, scores = on("cpu", *backend.attention_with_scores(*inputs, **options))
    assert_within_budget(state, exact, plain)
    for b, length in enumerate(lengths.host):
        both = query[b].double()[:, [0, int(last[b])]].unflatten(0, (2, groups)).sum((1, 2))
        products = torch.einsum("kd,ksd->ks", both, key[b, :, :length].double())
        # sums of products of float16 numbers in float32
        torch.testing.assert_close(scores[b, :, :length].double(), products, rtol=1e-5, atol=2e-4)
