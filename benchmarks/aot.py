"""The compiler's report on every variant of the Triton kernels, and counts of programs and bytes. No GPU is needed.

The kernels are compiled without a GPU, and `cuobjdump` reads registers, shared memory and spills from the machine code.
Programs and bytes are computed from the shapes. Times are estimates by a formula, not measurements. Needs only triton,
and runs for a minute on a CPU.

    python benchmarks/aot.py
    python benchmarks/aot.py --page docs/kernels.md     # between its markers
    python benchmarks/aot.py --nodes 16 --capability 80 --json
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # before triton is imported: what is interpreted cannot be compiled

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ROOT = Path(__file__).resolve().parents[1]
# As modules of an empty package: the package itself imports torch and transformers.
PACKAGE = "hf_longspec_kernels"
sys.modules[PACKAGE] = ModuleType(PACKAGE)
sys.modules[PACKAGE].__path__ = [str(ROOT / "hf_longspec" / "attention_backends" / "triton")]
kernels, tiles = (import_module(f"{PACKAGE}.{name}") for name in ("kernels", "config"))

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
START, END = "<!-- aot:start -->", "<!-- aot:end -->"

# One layer of Llama-3.1-8B in bfloat16.
KV_HEADS, GROUPS, SIZE, ITEMSIZE = 8, 4, 128, 2
CONTEXTS = (8192, 32768, 131072)
# An H200, measured elsewhere: long reads, and matrix products in bfloat16. Attention kernels reach about half of these.
TB_PER_SECOND, TFLOPS, ATTENTION_TFLOPS = 4.3, 790, 400

# Registers, shared memory and warps of a multiprocessor; shared memory that a program can have, and that the system
# takes for each (CUDA programming guide, compute capabilities).
REGISTERS, WARPS, RESERVED = 65536, {80: 64, 89: 48, 90: 64, 100: 64}, 1024
SHARED = {80: 164 * 1024, 89: 100 * 1024, 90: 228 * 1024, 100: 228 * 1024}

POINTERS = {
    **dict.fromkeys(("query", "key", "value"), "*bf16"),
    **dict.fromkeys(("lengths", "positions", "last_node", "indices", "counts"), "*i64"),
    **dict.fromkeys(("out", "lse", "score", "merged_lse"), "*fp32"),
    "mask": "*u8",
    "merged": "*bf16",
    "sinks": "*bf16",
}
FLOATS = ("scale", "cap", "lowest")
# Strides of a mask, whose last one is 1, and the numbers that change from step to step.
UNALIGNED = ("stride_mb", "stride_mh", "stride_mn", "stride_cb", "stride_ib", "stride_ih")


@dataclass(frozen=True)
class Variant:
    """A kernel with its constants."""

    name: str  # for the table
    kernel: Any  # the function of kernels.py
    constants: dict[str, Any]  # its constants, and `num_warps` and `num_stages`
    config: Any = None  # its tiles
    nodes: int = 0  # nodes of a verification whose programs and bytes are counted


def hybrid(nodes: int, gpu: Any, name: str = "", size: int = SIZE, **features: Any) -> Variant:
    """Attention of `nodes` nodes to the prefix, and with more than one of them to the tree."""
    tree = nodes > 1 and features.pop("TREE", 1)
    rows, plain = nodes * GROUPS, bool(tree) and not features.get("SCORES")
    config = tiles.hybrid_config(rows, size, size, ITEMSIZE, gpu, plain)
    constants = {"stride_mm": 1, "PREFIX": True, "TREE": int(tree), "HAS_WINDOW": False, "SCORES": 0}
    constants |= loops(config) | features
    options = tiles.tile_options(config, GROUPS, size, size, constants.pop("HAS_SOFTCAP", False), False)
    name = name or f"{nodes} node{'s' * (nodes > 1)}"
    return Variant(name, kernels.attention_kernel, constants | options, config, nodes if size == SIZE else 0)


def loops(config: Any) -> dict[str, int]:
    """The constants of the two loops."""
    names = {"TREE_KEYS": "tree_keys", "TREE_STAGES": "tree_stages", "SHORTEST_SPLIT": "split_keys"}
    return {constant: getattr(config, name) for constant, name in names.items()}


def others(gpu: Any) -> list[Variant]:
    """The other variants."""
    features = {"HAS_WINDOW": True, "HAS_SOFTCAP": True, "SCORES": 2}
    variants = [hybrid(nodes, gpu, f"{nodes} nodes, window, softcap, scores", **features) for nodes in (4, 8, 16, 32)]
    variants.append(hybrid(16, gpu, "16 nodes, no tree", TREE=0))
    variants += [
        hybrid(nodes, gpu, f"{nodes} nodes, vectors of {size}", size) for size in (64, 256) for nodes in (4, 8, 16)
    ]
    config = tiles.tree_config(64, SIZE, SIZE, ITEMSIZE, gpu)
    alone = {"stride_mm": 1, "PREFIX": False, "TREE": 1, "HAS_WINDOW": False, "SCORES": 0} | loops(config)
    alone |= tiles.tile_options(config, GROUPS, SIZE, SIZE, False, False)
    variants.append(Variant("tree alone", kernels.attention_kernel, alone, config))
    config = tiles.sparse_config(SIZE, SIZE, ITEMSIZE)
    strides = {"stride_qd": 1, "stride_kd": 1, "stride_vd": 1, "stride_it": 1, "SPLIT": config.split_keys}
    strides |= tiles.tile_options(config, GROUPS, SIZE, SIZE, False, False)
    variants.append(Variant("chosen slots", kernels.sparse_kernel, strides, config))
    for parts in (16, 64):
        merge = {"VALUE_SIZE": SIZE, "BLOCK_VALUE": SIZE, "BLOCK_STATES": 1, "BLOCK_PARTS": parts, "HAS_SINKS": True}
        variants.append(Variant(f"merge of {parts} parts", kernels.combine_kernel, merge | {"num_warps": 4}))
    return variants


def resources(variant: Variant, capability: int) -> dict[str, Any]:
    """Compile a variant, and read what the machine code uses: the columns of the table."""
    constants, options = dict(variant.constants), {}
    for name in ("num_warps", "num_stages"):
        if name in constants:
            options[name] = constants.pop(name)
    signature, values, attributes = {}, {}, {}
    for place, name in enumerate(variant.kernel.arg_names):
        if name in constants:
            signature[name], values[(place,)] = "constexpr", constants[name]
            continue
        signature[name] = POINTERS.get(name, "fp32" if name in FLOATS else "i32")
        if name in POINTERS or (name.startswith("stride_") and name not in UNALIGNED):
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(variant.kernel, signature, values, attributes)
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        text = subprocess.run([CUOBJDUMP, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    usage = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    warps, shared = options["num_warps"], kernel.metadata.shared
    registers = warps * -(-usage["REG"] * 32 // 256) * 256  # given out to warps in units of 256
    return {
        "registers": usage["REG"],
        "shared, KiB": round(shared / 1024, 1),
        "spilled": usage["STACK"] + usage["LOCAL"],
        "per SM": min(REGISTERS // registers, SHARED[capability] // (shared + RESERVED), WARPS[capability] // warps),
    }


def counts(variant: Variant, context: int) -> dict[str, Any]:
    """Count programs, tiles of rows, and bytes of one layer and row of the batch after `context` tokens.

    Returns:
        `dict`: Also all bytes over those of keys and values (`ratio`), and two times in microseconds. `floor`: keys and
        values at the bandwidth, or the operations of the rows at the peak, whichever is longer. `estimate`: all bytes
        at the bandwidth, or the operations of whole tiles at what attention reaches; no launches.
    """
    config, rows, tree = variant.config, variant.nodes * GROUPS, int(variant.constants["TREE"] > 0)
    row_tiles = -(-rows // config.block_rows)  # programs that read the same keys
    # partial results of a row: the tree, and the splits by the rule of the kernel
    blocks = context // (tiles.wanted_splits(row_tiles, KV_HEADS, tree) * config.block_keys)
    parts = tree - (-context // max(config.split_keys, blocks * config.block_keys))
    kv_bytes = 2 * KV_HEADS * SIZE * ITEMSIZE * context
    partial_bytes = 2 * 4 * (SIZE + 1) * KV_HEADS * rows * parts  # with log-sum-exps, float32, written and read
    vectors = variant.nodes * (2 * KV_HEADS + 2 * KV_HEADS * GROUPS) * SIZE * ITEMSIZE  # tree, queries, outputs
    ratio = (kv_bytes + partial_bytes + vectors) / kv_bytes
    reading, operations = kv_bytes / TB_PER_SECOND / 1e6, 4 * SIZE * KV_HEADS * context
    return {
        "programs": row_tiles * KV_HEADS * parts,
        "row_tiles": row_tiles,
        "ratio": ratio,
        "floor": max(reading, operations * rows / TFLOPS / 1e6),
        "estimate": max(ratio * reading, operations * row_tiles * config.block_rows / ATTENTION_TFLOPS / 1e6),
    }


def row(variant: Variant, capability: int) -> dict[str, Any]:
    """Return the report on a variant, for JSON and for the tables."""
    config = variant.config
    keys = "block_keys" if variant.constants.get("PREFIX", True) else "tree_keys"
    stages = variant.constants.get("num_stages")
    line = {
        "variant": variant.name,
        "rows x keys": f"{config.block_rows} x {getattr(config, keys)}" if config is not None else "",
        "warps, stages": f"{variant.constants['num_warps']}, {stages}" if stages else variant.constants["num_warps"],
        **resources(variant, capability),
    }
    if not variant.nodes or variant.constants["SCORES"] or (variant.nodes > 1 and not variant.constants["TREE"]):
        return line
    at = {f"{context // 1024}K": counts(variant, context) for context in CONTEXTS}
    first = at["8K"]
    return line | {
        "programs": first["programs"],
        "K, V reads": first["row_tiles"],
        **{f"bytes {name}": round(count["ratio"], 2) for name, count in at.items()},
        **{f"{k}, us": f"{c['estimate']:.1f} ({c['estimate'] / c['floor']:.2f}x)" for k, c in at.items()},
    }


def markdown(rows: list[dict[str, Any]], capability: int) -> str:
    """The tables."""
    note = (
        f"Compiled by triton {triton.__version__} for sm_{capability}: bfloat16, {KV_HEADS} key heads, groups of "
        f"{GROUPS}, vectors of {SIZE}. `registers` and `spilled` bytes are those of a thread, `shared` is that of a "
        "program, `per SM`: programs that fit on a multiprocessor. `programs`: those that have keys at 8K. `K, V "
        "reads`: tiles of rows that read the same keys, the first from memory, the others from the L2 cache. "
        "`bytes`: K and V once, the partial results written and read, queries and outputs, over K and V. `us`: "
        f"**estimates**, not measurements: all these bytes at {TB_PER_SECOND} TB/s or the operations of whole tiles at "
        f"{ATTENTION_TFLOPS} TFLOP/s, whichever is longer, launches apart; in brackets over the floor, K and V at "
        f"{TB_PER_SECOND} TB/s or the operations of the rows at {TFLOPS}."
    )
    counted = [line for line in rows if "programs" in line]
    return "\n\n".join([note, table(counted), "The other variants:", table([x for x in rows if "programs" not in x])])


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table whose columns are the keys."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(map(str, line.values())) for line in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="1,4,8,16,32,64", help="default: %(default)s")
    parser.add_argument("--capability", type=int, choices=list(SHARED), default=90, help="default: %(default)s")
    parser.add_argument("--page", type=Path, help="write between the markers of this page instead of printing")
    parser.add_argument("--json", action="store_true", help="one line of JSON per number of nodes, no other variants")
    args = parser.parse_args(arguments)
    gpu = tiles.Gpu(SHARED[args.capability] - RESERVED, args.capability in (90, 100))
    variants = [hybrid(int(nodes), gpu) for nodes in args.nodes.split(",")]
    if args.json:
        for variant in variants:
            print(json.dumps(row(variant, args.capability)), flush=True)
        return
    text = markdown([row(variant, args.capability) for variant in variants + others(gpu)], args.capability)
    if args.page is None:
        print(text)
        return
    page = args.page.read_text(encoding="utf-8")
    before, start, tail = page.partition(START)
    _, end, after = tail.partition(END)
    if not (start and end):
        parser.error(f"{args.page} needs the markers {START} and {END}, in this order.")
    args.page.write_text(f"{before}{START}\n{text}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
