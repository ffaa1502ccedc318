"""The guarded import of Triton, the devices and the interpreter that its kernels run on, and tile sizes.

Without triton the kernel file still imports, as plain functions that nobody calls.

With TRITON_INTERPRET=1 in the environment before the first import, kernels run on a CPU, slowly, for tests. The
interpreter keeps bfloat16 as bit patterns and multiplies those, without an error. `upcast` returns whether kernels have
to convert what they load to float32 first.

Tile sizes are chosen by plain functions, not by autotuning. Autotuning would run every candidate in the middle of a
generation, cannot run while a CUDA graph is captured, and can choose differently on two days, which changes the order
of summation and so the last bits. The starting points are what other decoding kernels use for such shapes. Tests
compile them for sm_80 to sm_100 and check that no registers are spilled. None was timed on a GPU.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch

try:
    import triton
    from triton import language
except ImportError:
    triton = language = None

tl: Any = language

INSTALLED = triton is not None
INTERPRETED = INSTALLED and bool(triton.knobs.runtime.interpret)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Ampere. Older ones have neither bfloat16 nor asynchronous copies, and 64 KB of shared memory.
MIN_CAPABILITY = (8, 0)
# Shared memory of one program on the smallest GPUs of that age (RTX 30 and 40, L4). Every configuration fits in it
# where the device does not have more.
SHARED_MEMORY = 99 * 1024
# The namespace of the operators. A copy of this file from the Hub gets its own: registering an operator a second time
# would pull the first one from under the package.
LIBRARY = "hf_longspec" if __name__.startswith("hf_longspec.") else "hf_longspec_" + __name__.replace(".", "_")

# tl.dot needs at least this many rows, keys and numbers per vector.
SMALLEST_TILE = 16

# For 16-bit numbers: the largest size of a vector -> the rows of a program -> block_keys, num_warps, num_stages.
# Rows with other numbers than (16 or 32, 128, 4, 2) have them because these spilled: with vectors of 128 and 4 warps,
# 16 to 40 bytes a thread.
PREFIX_TILES = {
    64: {16: (128, 4, 2), 32: (64, 4, 3), 64: (64, 8, 3)},
    128: {16: (64, 4, 3), 32: (64, 8, 3), 64: (64, 8, 3)},
    256: {16: (64, 8, 2), 32: (64, 8, 2)},
}
# In float32 no tensor cores are used, and all operands of a product are in registers.
PREFIX_TILES_FLOAT32 = {64: {16: (16, 4, 2)}, 128: {16: (16, 4, 2)}, 256: {16: (16, 8, 2)}}
# Chosen slots of one program. A fixed length, not a fixed number: the order of summation depends on neither batch nor
# capacity. 128: one row of 8 key/value heads and 2,300 chosen slots (7 % of 32K) makes 144 programs, for 132
# multiprocessors. Not measured.
SPLIT_SLOTS = 128


class TileConfig(NamedTuple):
    """One way to run a kernel.

    Args:
        block_rows (`int`): Query rows of one program.
        block_keys (`int`): Keys per turn of its loop.
        split_keys (`int`): Prefix slots or chosen slots of one program.
        block_size (`int`): Size of a query and a key, rounded up.
        block_value (`int`): Size of a value, rounded up.
        num_warps (`int`): Warps of one program.
        num_stages (`int`): Turns of the loop whose loads are in flight together.
    """

    block_rows: int
    block_keys: int
    split_keys: int
    block_size: int
    block_value: int
    num_warps: int
    num_stages: int


def jit(**options: Any) -> Callable[[Any], Any]:
    """Return `triton.jit(**options)`, or without triton a decorator that does nothing."""
    return (lambda function: function) if triton is None else triton.jit(**options)


def constant(number: float) -> Any:
    """Return a number that kernels may use by its name: a compiled kernel reads no other globals."""
    return number if triton is None else tl.constexpr(number)


def upcast(tensor: torch.Tensor) -> bool:
    """Return whether kernels must convert this tensor's numbers to float32 before they calculate with them."""
    return INTERPRETED and tensor.dtype == torch.bfloat16


def output_dtype(value: torch.Tensor) -> torch.dtype:
    """Return what a kernel writes: the interpreter truncates where a GPU rounds, so torch rounds to bfloat16."""
    return torch.float32 if upcast(value) else value.dtype


def launching_on(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Make the tensor's device current: Triton launches there, and under `device_map="auto"` it may be another one."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def why_not_device(device: torch.device) -> str | None:
    """Return None if kernels run on this device, or the reason for refusing it."""
    if triton is None:
        return "triton is not installed: pip install hf_longspec[triton]"
    if INTERPRETED and device.type in ("cpu", "cuda"):
        return None
    if device.type != "cuda":
        return f"device is {device.type}, expected cuda (with TRITON_INTERPRET=1 set before the import, cpu for tests)"
    if torch.version.hip is not None:
        return "this is ROCm, where the configurations were never tried"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return f"compute capability is {capability[0]}.{capability[1]}, expected at least 8.0"
    return None


def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that one program may use."""
    return _shared_memory_of_gpu(device) if device.type == "cuda" else SHARED_MEMORY


@cache
def _shared_memory_of_gpu(device: torch.device) -> int:
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", SHARED_MEMORY)


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is not below `number`."""
    return 1 << max(0, number - 1).bit_length()


def largest_rows(size: int, value_size: int, itemsize: int) -> int:
    """Return the most query rows of one program of the prefix kernel."""
    return max(_tiles(size, value_size, itemsize))


@cache
def prefix_config(rows: int, size: int, value_size: int, itemsize: int, shared_memory: int) -> TileConfig:
    """Choose the tiles of the prefix kernel.

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
    tile = TileConfig(block_rows, block_keys, split_keys, *_padded(size, value_size), num_warps, num_stages)
    return _fit(tile, itemsize, shared_memory)


@cache
def tree_config(rows: int, size: int, value_size: int, itemsize: int, shared_memory: int) -> TileConfig:
    """Choose the tiles of the tree kernel; arguments as above. With 64 rows and a mask it spills, hence 32."""
    tile = prefix_config(min(rows, 32), size, value_size, itemsize, shared_memory)
    num_warps = 8 if max(size, value_size) > 128 else 4  # 8 spill with vectors of 128 on sm_80
    return tile._replace(block_keys=min(tile.block_keys, 32), num_warps=num_warps, num_stages=2)


@cache
def sparse_config(size: int, value_size: int, itemsize: int) -> TileConfig:
    """Choose the tiles of the sparse kernel; arguments as above.

    Not measured. These are the largest for which no architecture spills registers: 32 query rows spill 8 bytes in 16
    bits, and 4 warps up to 6 KB in float32, whose products run without matrix units. A drafting step has one query, so
    16 rows hold a group of 16 heads.
    """
    if itemsize == 4:
        block_keys, num_warps = 32, 8
    else:
        block_keys, num_warps = 64 if max(size, value_size) <= 128 else 32, 4
    return TileConfig(16, block_keys, SPLIT_SLOTS, *_padded(size, value_size), num_warps, 2)


def _tiles(size: int, value_size: int, itemsize: int) -> dict[int, tuple[int, int, int]]:
    tables = PREFIX_TILES_FLOAT32 if itemsize == 4 else PREFIX_TILES
    return next(tiles for largest, tiles in tables.items() if max(size, value_size) <= largest)


def _padded(size: int, value_size: int) -> tuple[int, int]:
    return power_of_two(max(SMALLEST_TILE, size)), power_of_two(max(SMALLEST_TILE, value_size))


def _fit(tile: TileConfig, itemsize: int, shared_memory: int) -> TileConfig:
    """Halve the keys per turn until keys, values, queries and weights fit in shared memory."""

    def needed(keys: int) -> int:
        staged = tile.num_stages * keys * (tile.block_size + tile.block_value)
        return itemsize * (staged + tile.block_rows * (tile.block_size + keys))

    keys = tile.block_keys
    while needed(keys) > shared_memory and keys > SMALLEST_TILE:
        keys //= 2
    return tile._replace(block_keys=keys)
