"""Tiles and splits: plain functions against counting, and every shipped tile against the reference in float64."""

import pytest
import torch

from hf_longspec.attention_backends.lengths import SeqLens
from hf_longspec.attention_backends.triton import launch
from hf_longspec.attention_backends.triton.backend import TRITON_BACKEND, scored_attention
from hf_longspec.attention_backends.triton.config import (
    SHORTEST_SPLIT,
    Gpu,
    hybrid_config,
    most_splits,
    wanted_splits,
)
from tests.attention_backends.oracle import (
    assert_within_budget,
    attended,
    expected_tree,
    prefix_case,
    tree_case,
)
from tests.attention_backends.triton.machine import on

HOPPER, SMALLEST = Gpu(227 * 1024, True), Gpu(99 * 1024, False)
FLOAT32, FLOAT16 = torch.float32, torch.float16


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


@pytest.mark.parametrize(("nodes", "block_rows"), [(1, 16), (4, 16), (8, 32), (16, 64), (17, 128), (64, 128)])
def test_two_programs_for_every_multiprocessor(nodes, block_rows):
    """8K tokens, 8 key heads, groups of 4, on a GPU with 132: programs that have keys, the tree's included."""
    config = hybrid_config(4 * nodes, 128, 128, 2, HOPPER)
    assert config.block_rows == block_rows
    row_tiles, tree = -(-4 * nodes // block_rows), nodes > 1
    splits = splits_of(8192, wanted_splits(row_tiles, 8, tree), config.split_keys, config.block_keys)
    assert 264 <= row_tiles * 8 * (len(splits) + tree) <= 1.31 * 264


def test_a_batch_needs_fewer_splits():
    """4 rows of 8 key heads: the programs of one row, each of them four times as long."""
    assert wanted_splits(1, 8, True) == 32
    assert wanted_splits(1, 4 * 8, True) == 8
    assert wanted_splits(2, 64 * 8, True) == 1


def test_small_gpus_get_no_tile_of_warpgroups_and_smaller_blocks():
    assert hybrid_config(500, 128, 128, 2, HOPPER).block_rows == 128
    assert hybrid_config(500, 128, 128, 2, SMALLEST).block_rows == 64
    large = hybrid_config(64, 128, 128, 2, Gpu(163 * 1024, False))
    small = hybrid_config(64, 128, 128, 2, SMALLEST)
    assert (large.block_keys, small) == (64, large._replace(block_keys=32))


def test_every_tile_fits():
    for size in (64, 128, 256):
        for itemsize in (2, 4):
            for rows in (16, 32, 64, 128):
                small = hybrid_config(rows, size, size, itemsize, SMALLEST)
                assert small.split_keys % small.block_keys == 0
                # without warpgroups the compiler keeps a buffer less than stages: soak compiles all of them
                staged = (small.num_stages - 1) * small.block_keys * 2 * size
                assert itemsize * (staged + small.block_rows * size) <= SMALLEST.shared_memory


@pytest.fixture
def hopper(monkeypatch, poisoned_memory):
    """The tiles of a Hopper GPU, wherever the kernels run, and two splits for a long prefix; few programs merge."""
    monkeypatch.setattr(launch, "gpu_of", lambda device: HOPPER)
    monkeypatch.setattr(launch, "wanted_splits", lambda *args: 2)
    monkeypatch.setattr(launch, "BLOCK_STATES", 64)


# Nodes and heads of a group, and so the tile: of 16, 32, 64 and 128 rows, and two of 128.
TILES = [(1, 3), (3, 7), (16, 4), (31, 4), (33, 4)]


@pytest.mark.parametrize(
    ("nodes", "groups", "size"), [*((*tile, 128) for tile in TILES), (31, 4, 64), (1, 3, 136), (16, 4, 136)]
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
    (options, grid), (_, _) = launches
    config = hybrid_config(nodes * groups, size, size, 2, HOPPER)
    assert (options["BLOCK_ROWS"], options["BLOCK_KEYS"]) == (config.block_rows, config.block_keys)
    splits = most_splits(key.shape[2], 2, config.split_keys, config.block_keys)
    tree = int(nodes > 1)  # a lone node is one more token of the prefix
    assert options["TREE"] == tree
    assert grid == (-(-nodes * groups // config.block_rows), len(lengths), tree + splits)


@pytest.mark.parametrize(("nodes", "groups"), TILES[1:4])
def test_every_tile_with_scores(kernel_device, hopper, nodes, groups):
    """The tiles of 32 keys, a window and a softcap; the scores of node 0 and of the last node by a plain product."""
    query, key, value, lengths, options, exact, plain = prefix_case(nodes, groups, 128, (270, 33), 150, FLOAT16, 3.0)
    options = {name: x.to(kernel_device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    last = torch.tensor([nodes - 1, nodes // 2])
    inputs = (*on(kernel_device, query, key, value), lengths, last)
    *state, scores = on("cpu", *scored_attention(*inputs, **options))
    assert_within_budget(state, exact, plain)
    for b, length in enumerate(lengths.host):
        both = query[b].double()[:, [0, int(last[b])]].unflatten(0, (2, groups)).sum((1, 2))
        products = torch.einsum("kd,ksd->ks", both, key[b, :, :length].double())
        # sums of products of float16 numbers in float32
        torch.testing.assert_close(scores[b, :, :length].double(), products, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("window", [None, 100])
def test_long_splits_change_no_result(kernel_device, hopper, window):
    """Splits of 448 and 192 slots instead of 128, with and without a window that begins within a block."""
    query, key, value, lengths, options, exact, plain = prefix_case(3, 2, 16, (900, 401), window, FLOAT32)
    assert [splits_of(length, 2, SHORTEST_SPLIT, 16)[0] for length in lengths.host] == [(0, 448), (0, 192)]
    options = {name: x.to(kernel_device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    inputs = on(kernel_device, query, key, value)
    state = on("cpu", *TRITON_BACKEND.prefix_attention(*inputs, SeqLens(None, lengths.on("cpu")), **options))
    assert_within_budget(state, exact, plain)


def counted(kernel, launches):
    """A kernel that notes its launches: `(options, grid)`."""

    class Counted:
        def __getitem__(self, grid):
            def run(*args, **options):
                launches.append((options, grid))
                return kernel[grid](*args, **options)

            return run

    return Counted()
