# Published with a draft by hf_longspec, Apache-2.0.
"""Tile sizes of the Triton kernels, chosen by plain functions.

Not by autotuning: that would run every candidate in the middle of a generation, cannot run while a CUDA graph is
captured, and can choose differently on two days, which changes the order of summation and so the last bits.

The starting points are what other decoding kernels use for such shapes; that they compile without spilling registers is
tested for sm_80, sm_90 and sm_100. None was timed on a GPU.
"""

from functools import cache
from typing import NamedTuple

# tl.dot needs at least this many rows, keys and numbers per vector.
SMALLEST_TILE = 16


class TileConfig(NamedTuple):
    """One way to run a kernel.

    Args:
        block_rows (`int`): Query rows of one program.
        block_keys (`int`): Keys per turn of its loop.
        split_keys (`int`): Prefix slots of one program.
        block_size (`int`): Size of a query and a key, rounded up.
        block_value (`int`): Size of a value, rounded up.
        num_warps (`int`): Warps of one program.
        num_stages (`int`): Turns of the loop whose loads are under way together.
    """

    block_rows: int
    block_keys: int
    split_keys: int
    block_size: int
    block_value: int
    num_warps: int
    num_stages: int


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << max(0, number - 1).bit_length()


# For 16-bit numbers: the largest size of a vector -> the rows of a program -> block_keys, num_warps, num_stages.
# What differs from the usual (16 or 32, 128, 4, 2) spilled: with vectors of 128 and 4 warps 16 to 40 bytes a thread.
PREFIX_TILES = {
    64: {16: (128, 4, 2), 32: (64, 4, 3), 64: (64, 8, 3)},
    128: {16: (64, 4, 3), 32: (64, 8, 3), 64: (64, 8, 3)},
    256: {16: (64, 8, 2), 32: (64, 8, 2)},
}
# In float32 no tensor cores are used, and all operands of a product are in registers.
PREFIX_TILES_FLOAT32 = {64: {16: (16, 4, 2)}, 128: {16: (16, 4, 2)}, 256: {16: (16, 8, 2)}}


def largest_rows(size: int, value_size: int, itemsize: int) -> int:
    """Most query rows of one program of the prefix kernel."""
    return max(_tiles(size, value_size, itemsize))


@cache
def prefix_config(rows: int, size: int, value_size: int, itemsize: int, shared_memory: int) -> TileConfig:
    """Tiles of the prefix kernel.

    Args:
        rows (`int`): Query rows that share a key head, `H // K * N`.
        size (`int`): Size of a query and a key.
        value_size (`int`): Size of a value.
        itemsize (`int`): Bytes of one number.
        shared_memory (`int`): Bytes that one program may use.
    """
    tiles = _tiles(size, value_size, itemsize)
    block_rows = min(max(SMALLEST_TILE, power_of_two(rows)), max(tiles))
    block_keys, num_warps, num_stages = tiles[block_rows]
    # The length of a split depends on the rows, never on the prefix or the batch: a query's sums then have the same
    # order however long the cache is. Partial results are written once per split; those of 64 rows are a quarter of
    # what 512 keys and values are (D=128, 16 bits), hence longer splits then.
    split_keys = 512 if block_rows < 64 else 1024
    block_size, block_value = (power_of_two(max(SMALLEST_TILE, x)) for x in (size, value_size))
    tile = TileConfig(block_rows, block_keys, split_keys, block_size, block_value, num_warps, num_stages)
    return fit(tile, itemsize, shared_memory)


@cache
def tree_config(rows: int, size: int, value_size: int, itemsize: int, shared_memory: int) -> TileConfig:
    """Tiles of the tree kernel; arguments as above. With 64 rows and a mask it spills, hence 32."""
    tile = prefix_config(min(rows, 32), size, value_size, itemsize, shared_memory)
    num_warps = 8 if max(size, value_size) > 128 else 4  # 8 spill with vectors of 128 on sm_80
    return tile._replace(block_keys=min(tile.block_keys, 32), num_warps=num_warps, num_stages=2)


def fit(tile: TileConfig, itemsize: int, shared_memory: int) -> TileConfig:
    """The same with fewer keys per turn, if keys, values, queries and weights would not fit in shared memory."""

    def needed(keys: int) -> int:
        staged = tile.num_stages * keys * (tile.block_size + tile.block_value)
        return itemsize * (staged + tile.block_rows * (tile.block_size + keys))

    keys = tile.block_keys
    while needed(keys) > shared_memory and keys > SMALLEST_TILE:
        keys //= 2
    return tile._replace(block_keys=keys)


def _tiles(size: int, value_size: int, itemsize: int) -> dict[int, tuple[int, int, int]]:
    tables = PREFIX_TILES_FLOAT32 if itemsize == 4 else PREFIX_TILES
    return next(tiles for largest, tiles in tables.items() if max(size, value_size) <= largest)
