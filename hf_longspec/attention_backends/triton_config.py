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


def largest_rows(itemsize: int) -> int:
    """Most query rows of one program. Without tensor cores all operands of a product are in registers."""
    return 16 if itemsize == 4 else 64


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
    block_size, block_value = (power_of_two(max(SMALLEST_TILE, x)) for x in (size, value_size))
    block_rows = min(max(SMALLEST_TILE, power_of_two(rows)), largest_rows(itemsize))
    large = max(block_size, block_value) > 128
    if itemsize == 4:
        block_keys, num_warps, num_stages = 32, 8 if large else 4, 2
    elif block_rows == 64:
        block_keys, num_warps, num_stages = 64, 8 if large else 4, 2 if large else 3
    else:
        block_keys, num_warps, num_stages = 64 if large else 128, 4, 2
    # The length of a split depends on the rows, never on the prefix or the batch: a query's sums then have the same
    # order however long the cache is. Partial results are written once per split; with many rows that costs as much as
    # 512 keys and values themselves, hence longer splits.
    split_keys = 512 if block_rows < 64 else 1024
    tile = TileConfig(block_rows, block_keys, split_keys, block_size, block_value, num_warps, num_stages)
    return fit(tile, itemsize, shared_memory)


@cache
def tree_config(rows: int, size: int, value_size: int, itemsize: int, shared_memory: int) -> TileConfig:
    """Tiles of the tree kernel; arguments as above. With 64 rows and a mask it spills, hence 32."""
    tile = prefix_config(min(rows, 32), size, value_size, itemsize, shared_memory)
    return fit(tile._replace(block_keys=min(tile.block_keys, 32)), itemsize, shared_memory)


def fit(tile: TileConfig, itemsize: int, shared_memory: int) -> TileConfig:
    """The same with fewer keys per turn, if keys, values, queries and weights would not fit in shared memory."""

    def needed(keys: int) -> int:
        staged = tile.num_stages * keys * (tile.block_size + tile.block_value)
        return itemsize * (staged + tile.block_rows * (tile.block_size + keys))

    keys = tile.block_keys
    while needed(keys) > shared_memory and keys > SMALLEST_TILE:
        keys //= 2
    return tile._replace(block_keys=keys)
