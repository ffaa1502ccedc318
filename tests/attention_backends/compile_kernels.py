"""Compile the Triton kernels for a GPU that need not be there; one line of JSON per variant, with what it uses.

    python compile_kernels.py ARCH short|all|spilling

A process of its own, without TRITON_INTERPRET: where triton was imported for interpretation, its own library of
functions is interpreted as well, and nothing can be compiled any more. Only the kernel files are imported, as modules
of an empty package: transformers alone would take several times as long as a kernel.
"""

import json
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import triton
from compiler_report import usage
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ROOT = Path(__file__).resolve().parents[2]
sys.modules["kernels"] = ModuleType("kernels")
sys.modules["kernels"].__path__ = [str(ROOT / "hf_longspec" / "attention_backends")]
triton_combine, triton_config = import_module("kernels.triton_combine"), import_module("kernels.triton_config")

# Shared memory that one program may use, in bytes (CUDA programming guide, compute capabilities).
SHARED_MEMORY = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
FLOAT_ARGUMENTS = ("scale", "cap", "lowest")
POINTERS = {"lengths": "i64", "positions": "i64", "last_node": "i64", "mask": "u8"} | dict.fromkeys(
    ("out", "lse", "score", "sinks", "merged_lse"), "fp32"
)
# Strides of queries, keys and values are divisible by 16 if the size of a vector is.
ALIGNED = ("stride_q", "stride_k", "stride_v")


def compile_kernel(kernel, dtype, constants, arch, num_warps, num_stages):
    signature, values, attributes = {}, {}, {}
    pointers = POINTERS | dict.fromkeys(("query", "key", "value", "merged"), dtype)
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[index,] = "constexpr", constants[name]
        elif name in pointers:
            signature[name], attributes[index,] = f"*{pointers[name]}", [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name in FLOAT_ARGUMENTS else "i32"
            if name[:-1] in ALIGNED:
                attributes[index,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature=signature, constexprs=values, attrs=attributes)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def sizes(config, size):
    names = ("BLOCK_ROWS", "BLOCK_KEYS", "BLOCK_SIZE", "BLOCK_VALUE")
    blocks = (config.block_rows, config.block_keys, config.block_size, config.block_value)
    return dict(zip(names, blocks, strict=True)) | {"GROUPS": 4, "SIZE": size, "VALUE_SIZE": size, "UPCAST": False}


def prefix_variant(size, rows, dtype, arch, plain):
    config = triton_config.prefix_config(rows, size, size, BYTES[dtype], SHARED_MEMORY[arch])
    features = {"HAS_WINDOW": not plain, "HAS_SOFTCAP": not plain, "SCORES": 0 if plain else 2}
    return "prefix", dtype, sizes(config, size) | features | {"SPLIT_KEYS": config.split_keys}, config


def tree_variant(size, rows, dtype, arch, plain):
    config = triton_config.tree_config(rows, size, size, BYTES[dtype], SHARED_MEMORY[arch])
    features = {"IN_CACHE": plain, "ADDITIVE": not plain, "HAS_SOFTCAP": not plain}
    return "tree", dtype, sizes(config, size) | features, config


def combine_variant(size, dtype):
    constants = {"VALUE_SIZE": size, "BLOCK_VALUE": size, "HAS_SINKS": True}
    constants |= {"BLOCK_STATES": triton_combine.BLOCK_STATES, "BLOCK_PARTS": triton_combine.BLOCK_PARTS}
    return "combine", dtype, constants, None


def variants(arch, all_of_them):
    """Every tile of the configurations, plain and with everything; or the latter for vectors of 128 in bfloat16."""
    for size in (64, 128, 256) if all_of_them else (128,):
        for dtype in ("bf16", "fp16", "fp32") if all_of_them else ("bf16",):
            tiles = triton_config.PREFIX_TILES_FLOAT32 if dtype == "fp32" else triton_config.PREFIX_TILES
            for plain in (True, False) if all_of_them else (False,):
                for rows in tiles[size]:
                    yield prefix_variant(size, rows, dtype, arch, plain)
                for rows in {min(rows, 32) for rows in tiles[size]}:
                    yield tree_variant(size, rows, dtype, arch, plain)
            yield combine_variant(size, dtype)


def spilling_variant():
    """A tile that is too large for the registers of one warp."""
    *head, constants, config = tree_variant(128, 32, "bf16", 90, True)
    return *head, constants, config._replace(num_warps=1)


def main(arch, profile):
    chosen = [spilling_variant()] if profile == "spilling" else variants(arch, profile == "all")
    for name, dtype, constants, config in chosen:
        kernel = getattr(import_module(f"kernels.triton_{name}"), f"{name}_kernel")
        warps, stages = (4, 1) if config is None else (config.num_warps, config.num_stages)
        compiled = compile_kernel(kernel, dtype, constants, arch, warps, stages)
        line = {"kernel": name, "dtype": dtype, "warps": warps, "stages": stages, "constants": constants}
        print(json.dumps(line | usage(compiled)), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
