"""The guarded import of Triton, and tile sizes of the kernels. Neither torch nor a GPU is needed.

Without triton the kernel files still import, as plain functions that are never called. With TRITON_INTERPRET=1 in the
environment before the first import, kernels run on a CPU, slowly, for tests.

Tile sizes are plain functions of shapes and of the GPU. Autotuning would run every candidate in the middle of a
generation, cannot run while a CUDA graph is captured, and can choose differently on two days, which changes the order
of summation and so the last bits. tests/attention_backends/triton/test_compiled.py reads the compiler's report, and
names the few that spill registers. Those for vectors of 128 in 16 bits with warpgroup instructions were timed on an
H100 beside others, the rest were not.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

try:
    import triton
    from triton import language
except ImportError:
    triton = language = None

tl: Any = language

INSTALLED = triton is not None
INTERPRETED = INSTALLED and bool(triton.knobs.runtime.interpret)


def jit(**options: Any) -> Callable[[Any], Any]:
    """Return `triton.jit(**options)`, or without triton a decorator that does nothing."""
    return (lambda function: function) if triton is None else triton.jit(**options)


# For every kernel: a product and a sum are one instruction. It is the default up to triton 3.9, which warns about it.
OPTIONS = {"enable_fp_fusion": True}

# tl.dot needs at least this many rows, keys and numbers per vector.
SMALLEST_TILE = 16

# For 16-bit numbers: the largest size of a vector -> the rows of a program -> block_keys, num_warps, num_stages.
# With warpgroup instructions (Hopper and data-center Blackwell) a tile of 64 rows needs 4 warps, so that two programs
# fit on a multiprocessor. Two of them were faster than one of 128 rows, which reads keys half as often.
WARPGROUP_TILES = {
    64: {16: (64, 4, 3), 32: (64, 4, 3), 64: (64, 4, 3), 128: (64, 8, 3)},
    128: {16: (32, 4, 4), 32: (64, 4, 3), 64: (64, 4, 3)},
    256: {16: (32, 8, 3), 32: (64, 8, 2), 64: (32, 8, 3)},
}
# Elsewhere 64 rows spill with 4 warps, and 128 rows spill in any case.
TILES = {
    64: {16: (64, 4, 3), 32: (64, 4, 3), 64: (64, 8, 3)},
    128: {16: (64, 4, 3), 32: (64, 8, 3), 64: (64, 8, 3)},
    256: {16: (32, 8, 3), 32: (64, 8, 2)},
}
# In float32 no tensor cores are used, and all operands of a product are in registers.
FLOAT32_TILES = {64: {16: (16, 4, 2)}, 128: {16: (16, 4, 2)}, 256: {16: (16, 8, 3)}}
# Programs of one launch: two for each of the 132 multiprocessors of an H100 or H200.
PROGRAMS = 264
# Prefix slots of one program at least. With fewer, partial results weigh more than the keys that they save.
SHORTEST_SPLIT = 128


class Gpu(NamedTuple):
    """The properties of a GPU that tiles depend on."""

    shared_memory: int  # bytes that one program may use
    warpgroups: bool  # whether four warps multiply together, from shared memory: compute capability 9 or 10


class TileConfig(NamedTuple):
    """One way to run a kernel."""

    block_rows: int  # query rows of one program
    block_keys: int  # prefix slots per turn of its loop
    tree_keys: int  # nodes per turn of the loop over the tree
    tree_stages: int  # turns of that loop whose loads are in flight together
    split_keys: int  # prefix slots of one program at least
    block_size: int  # size of a query and a key, rounded up
    block_value: int  # size of a value, rounded up
    num_warps: int  # warps of one program
    num_stages: int  # turns of the loop over the prefix whose loads are in flight together


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is not below `number`."""
    return 1 << max(0, number - 1).bit_length()


def largest_rows(size: int, value_size: int, itemsize: int, gpu: Gpu) -> int:
    """Return the most query rows of one program."""
    return max(_tiles(size, value_size, itemsize, gpu))


@cache
def hybrid_config(
    rows: int,
    size: int,
    value_size: int,
    itemsize: int,
    gpu: Gpu,
    has_tree: bool = True,
    has_scores: bool = False,
    is_bounded: bool = False,
) -> TileConfig:
    """Choose the tiles of attention to the prefix, with or without a tree.

    Args:
        rows (`int`): Query rows that share a key head, `H // K * N`.
        size (`int`): Size of a query and a key.
        value_size (`int`): Size of a value.
        itemsize (`int`): Bytes of one number.
        gpu (`Gpu`): Properties of the device.
        has_tree (`bool`, *optional*, defaults to `True`): Whether there is a tree.
        has_scores (`bool`, *optional*, defaults to `False`): Whether scores are written.
        is_bounded (`bool`, *optional*, defaults to `False`): Whether there is a window or a softcap.
    """
    tiles = _tiles(size, value_size, itemsize, gpu)
    block_rows = min(max(SMALLEST_TILE, power_of_two(rows)), max(tiles))
    block_keys, num_warps, num_stages = tiles[block_rows]
    # tiles of 64 keys and 32 rows or more spill up to 88 bytes per thread here
    is_tight = has_scores and is_bounded if gpu.warpgroups else has_scores or not has_tree
    if is_tight and block_rows > 16 and block_keys > 32:
        block_keys, num_stages = 32, num_stages + 1
    # The loop over the tree is short, and stages would spill 56 bytes; in float32 it spills 300 without.
    tree = (16 if block_rows == 16 else 32, 1) if itemsize == 2 else (16, num_stages)
    sizes = power_of_two(max(SMALLEST_TILE, size)), power_of_two(max(SMALLEST_TILE, value_size))
    tile = TileConfig(block_rows, block_keys, *tree, SHORTEST_SPLIT, *sizes, num_warps, num_stages)
    return _fit(tile, itemsize, gpu.shared_memory)


@cache
def tree_config(rows: int, size: int, value_size: int, itemsize: int, gpu: Gpu) -> TileConfig:
    """Choose the tiles of attention under a mask alone; arguments as above. 64 rows spill with an additive mask."""
    tile = hybrid_config(min(rows, 32), size, value_size, itemsize, gpu)
    num_warps = 8 if max(size, value_size) > 128 else 4  # 8 spill with vectors of 128 on sm_80
    return tile._replace(tree_keys=min(tile.block_keys, 32), num_warps=num_warps)


def wanted_splits(row_tiles: int, all_kv_heads: int, has_tree: bool) -> int:
    """Return the splits of a row's prefix that make `PROGRAMS` programs, with those of the tree.

    `row_tiles` tiles of query rows share a key head, and all rows of the batch have `all_kv_heads` of these.
    """
    return max(1, -(-PROGRAMS // (row_tiles * all_kv_heads)) - has_tree)


def most_splits(capacity: int, wanted: int, split_keys: int, block_keys: int) -> int:
    """Return the largest number of splits of any prefix of up to `capacity` slots.

    A prefix of S slots has splits of `k = max(split_keys / block_keys, S // (wanted * block_keys))` blocks, all full
    but the last: see the kernel. S is below `(k + 1) * wanted` blocks, so there are up to `wanted + wanted / k` splits.
    """
    shortest = split_keys // block_keys
    return min(-(-capacity // split_keys), wanted + -(-wanted // shortest))


def _tiles(size: int, value_size: int, itemsize: int, gpu: Gpu) -> dict[int, tuple[int, int, int]]:
    tables = FLOAT32_TILES if itemsize == 4 else WARPGROUP_TILES if gpu.warpgroups else TILES
    return next(tiles for largest, tiles in tables.items() if max(size, value_size) <= largest)


def _fit(tile: TileConfig, itemsize: int, shared_memory: int) -> TileConfig:
    """Halve the keys per turn until keys, values, queries and weights fit in shared memory."""

    def needed(keys: int) -> int:
        staged = tile.num_stages * keys * (tile.block_size + tile.block_value)
        return itemsize * (staged + tile.block_rows * (tile.block_size + keys))

    keys = tile.block_keys
    while needed(keys) > shared_memory and keys > SMALLEST_TILE:
        keys //= 2
    return tile._replace(block_keys=keys)
